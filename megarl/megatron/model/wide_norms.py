"""Norms of queries and keys over all heads together, as MiniMax-M2 has them; Megatron's are over each head."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


class _SumOverRanks(torch.autograd.Function):
    """Sum over the ranks of a group. Each rank's loss depends on the sum, so gradients are summed too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class QueryNorm(torch.nn.Module):
    """RMSNorm over all query heads. Tensor-parallel ranks hold the weights of their heads and share the mean square."""

    def __init__(self, hidden_size: int, config: Any, eps: float) -> None:
        """`hidden_size`: of one head."""
        super().__init__()
        self.eps, self.width = eps, hidden_size * self.heads(config)
        self.group = parallel_state.get_tensor_model_parallel_group()
        held = self.width // self.group.size()
        device = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(held, dtype=config.params_dtype, device=device))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def heads(self, config: Any) -> int:
        """Return the number of heads on all ranks."""
        return int(config.num_attention_heads)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normed `x` [tokens, batch, heads of this rank, head size]."""
        values = x.float()
        total = values.square().sum((-2, -1), keepdim=True)
        if self.group.size() > 1:
            total = _SumOverRanks.apply(total, self.group)
        normed = (values * torch.rsqrt(total / self.width + self.eps)).to(x.dtype)
        return normed * self.weight.view(x.shape[-2:])

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict[str, Any]:
        """Describe the weight to Megatron's checkpoints."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.group,
            dp_cp_group=metadata["dp_cp_group"],
        )


class KeyNorm(QueryNorm):
    """RMSNorm over all key heads."""

    def heads(self, config: Any) -> int:
        """Return the number of heads on all ranks."""
        return int(config.num_query_groups)


def install(layers: list[Any]) -> None:
    """Replace the norms of each head by these norms, in the specs of a block's `layers`."""
    for layer in layers:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm, attention.k_layernorm = QueryNorm, KeyNorm
