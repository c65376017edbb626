"""Transformer Engine's classes that Megatron builds models of, on torch alone.

Each takes the arguments of the real class and no other: `signatures.json` has them, read from the real source.
"""

from transformer_engine import common, pytorch

__version__ = "2.11.0"
__all__ = ["common", "pytorch"]
