from torchvision.transforms import InterpolationMode as InterpolationMode

pil_to_tensor = to_pil_image = None
