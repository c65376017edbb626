"""Names of torchvision that vLLM and transformers import, and megarl never uses, for engines on a CPU without it."""

__version__ = "0.28.0"
