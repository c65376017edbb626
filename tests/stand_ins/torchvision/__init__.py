"""Names of torchvision that vLLM and transformers import, and megarl never uses, for engines on a CPU without it. Only
transforms.v2.functional computes something: tests run transformers' video processors."""

__version__ = "0.28.0"
