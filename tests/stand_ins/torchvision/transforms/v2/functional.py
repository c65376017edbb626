"""Functions for 8-bit frames on a CPU, as torchvision implements them: transformers' video processors call them."""

import torch

from torchvision.transforms import InterpolationMode as InterpolationMode

pil_to_tensor = to_pil_image = None


def resize(image, size, interpolation, antialias):
    assert image.dtype == torch.uint8 and interpolation is InterpolationMode.BICUBIC, (image.dtype, interpolation)
    frames = image.flatten(0, -4)
    resized = torch.nn.functional.interpolate(frames, size, mode="bicubic", antialias=antialias)
    return resized.unflatten(0, image.shape[:-3])


def normalize(image, mean, std, inplace=False):
    mean, std = (torch.as_tensor(values, dtype=image.dtype)[:, None, None] for values in (mean, std))
    return image.sub(mean).div_(std)


def grayscale_to_rgb(image):
    assert image.shape[-3] == 3, image.shape
    return image
