"""Linears of a rank's local experts: one grouped GEMM if torch has it, else one product per expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megarl.megatron.native_layers.fused_kernels import aligned, grouped_gemm


class _GroupedLinear(torch.nn.Module):
    """One linear per local expert, with parameters ``weight0``, ``weight1``, ... and, with `bias`, ``bias0``, ...

    With `skip_bias_add`, `forward` returns the biases instead of adding them.
    """

    axis: int  # sharded over expert-tensor-parallel ranks

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[torch.Tensor], Any],
        pg_collection: Any,
        is_expert: bool = True,
        bias: bool = False,
        skip_bias_add: bool = False,
        **_: Any,
    ) -> None:
        super().__init__()
        self.num_gemms, self.groups = num_gemms, pg_collection
        self.biased, self.skip_bias_add = bias, skip_bias_add
        shards = pg_collection.expt_tp.size()
        assert shards == 1 or not bias, "Megatron refuses biases of experts that are split"
        shape = [output_size, input_size]
        shape[self.axis] //= shards
        weights = []
        for _number in range(num_gemms):
            # `current_device` is a device on the CPU platform, a number on CUDA.
            empty = torch.empty(shape, dtype=config.params_dtype, device=torch.cuda.current_device())
            weight = torch.nn.Parameter(empty)
            with torch.no_grad(), get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                init_method(weight)
            # Marked only if split. Transformer Engine marks unsplit experts too, which has no effect in a group of one rank.
            set_tensor_model_parallel_attributes(weight, shards > 1, self.axis, 1)
            weight.allreduce = not (is_expert and config.expert_model_parallel_size > 1)
            weights.append(weight)
        # Megatron's gradient buffers hold parameters in reverse order of registration. Registered in reverse, the weights
        # are contiguous there, and a grouped GEMM reads them without a copy.
        for i in reversed(range(num_gemms)):
            self.register_parameter(f"weight{i}", weights[i])
        for i in reversed(range(num_gemms if bias else 0)):
            zeros = torch.zeros(output_size, dtype=config.params_dtype, device=torch.cuda.current_device())
            self.register_parameter(f"bias{i}", torch.nn.Parameter(zeros))
            getattr(self, f"bias{i}").allreduce = weights[i].allreduce

    def forward(
        self, x: torch.Tensor, tokens_per_expert: list[int]
    ) -> tuple[torch.Tensor, list[torch.nn.Parameter] | None]:
        weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
        product = expert_linears(x, tokens_per_expert, weights)
        if not self.biased:
            return product, None
        biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms)]
        if self.skip_bias_add:
            return product, biases
        return product + expert_rows(biases, tokens_per_expert), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict[str, Any]:
        result = {}
        experts = self.groups.ep.size() * self.num_gemms
        kinds = ("weight", "bias") if self.biased else ("weight",)
        for i in range(self.num_gemms):
            expert = self.groups.ep.rank() * self.num_gemms + i
            shard = make_sharded_tensors_for_checkpoint(
                {f"{i}.{kind}": getattr(self, f"{kind}{i}") for kind in kinds},
                "",
                {f"{i}.weight": self.axis},  # biases are not split
                (*sharded_offsets, (len(sharded_offsets), expert, experts)),
                tp_group=self.groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(shard, f"{i}.", prefix)
            for kind in kinds:
                tensor = shard[f"{i}.{kind}"]
                tensor.replica_id = (*tensor.replica_id[:2], self.groups.expt_dp.rank())
                result[f"{prefix}{kind}{i}"] = tensor
        return result

    def backward_dw(self) -> None:
        """Do nothing: Megatron may ask for a delayed weight gradient, which autograd has already computed."""


class ColumnParallelGroupedLinear(_GroupedLinear):
    axis = 0


class RowParallelGroupedLinear(_GroupedLinear):
    axis = 1


def expert_linears(x: torch.Tensor, tokens_per_expert: Sequence[int], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Multiply rows of x [tokens, in], sorted by expert, by the weights [out, in] of their experts: [tokens, out]."""
    gemm = grouped_gemm(x.device, x.dtype).function
    outputs = weights[0].shape[0] * weights[0].element_size()
    if gemm is None or len(x) == 0 or outputs % 16 or not aligned(x, *weights):
        parts = torch.split(x, list(tokens_per_expert))
        return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weights, strict=True)])
    ends = torch.tensor(tokens_per_expert).cumsum(0).to(torch.int32)
    return _GroupedProduct.apply(x, ends.to(x.device, non_blocking=True), gemm, *weights)


def expert_rows(rows: Sequence[torch.Tensor], tokens_per_expert: Sequence[int]) -> torch.Tensor:
    """Return the row [out] of each token's expert, for tokens sorted by expert: [tokens, out]."""
    counts = torch.tensor(tokens_per_expert, device=rows[0].device)
    return torch.stack(list(rows)).repeat_interleave(counts, 0, output_size=sum(tokens_per_expert))


class _GroupedProduct(torch.autograd.Function):
    """Grouped GEMM: x [tokens, in], expert end offsets (int32 [experts]), kernel, weights [out, in]... -> [tokens, out].

    Weights are stacked for each product, or viewed if they are contiguous. Autograd saves the parameters, so no stack
    stays in memory between forward and backward.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, ends: torch.Tensor, gemm: Callable[..., torch.Tensor], *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.gemm = gemm
        ctx.save_for_backward(x, ends, *weights)
        return gemm(x, stacked(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, ends, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = ctx.gemm(grad, stacked(weights), offs=ends) if ctx.needs_input_grad[0] else None
        grads: tuple[torch.Tensor | None, ...] = (None,) * len(weights)
        if any(ctx.needs_input_grad[3:]):
            grads = ctx.gemm(grad.t(), x, offs=ends).unbind(0)
        return grad_x, None, None, *grads


def stacked(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return `weights` of shape [out, in] as [experts, out, in]; a view if they are contiguous in one storage."""
    first, size = weights[0], weights[0].numel()
    storage, start = first.untyped_storage()._cdata, first.storage_offset()
    for number, weight in enumerate(weights):
        contiguous = weight.untyped_storage()._cdata == storage and weight.storage_offset() == start + number * size
        if not (contiguous and weight.is_contiguous()):
            return torch.stack(list(weights))
    return first.detach().as_strided((len(weights), *first.shape), (size, *first.stride()))
