import enum

InterpolationMode = enum.Enum(
    "InterpolationMode", ["NEAREST", "NEAREST_EXACT", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS"]
)
