from transformer_engine.pytorch import distributed, fp8, ops
from transformer_engine.pytorch.modules import DotProductAttention, GroupedLinear, LayerNormLinear, Linear, RMSNorm

__all__ = ["DotProductAttention", "GroupedLinear", "LayerNormLinear", "Linear", "RMSNorm", "distributed", "fp8", "ops"]
