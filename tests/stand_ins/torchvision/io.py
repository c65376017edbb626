ImageReadMode = decode_image = None
