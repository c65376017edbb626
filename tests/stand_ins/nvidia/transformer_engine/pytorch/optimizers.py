from torch.optim import SGD as FusedSGD

from megarl.megatron.adam import Adam as FusedAdam

__all__ = ["FusedAdam", "FusedSGD"]
