"""LoRA adapters as Megatron modules: delta(x) = alpha / rank * B A x, sharded like the adapted linear.

One Megatron linear may fuse several Hugging Face linears (q, k and v; gate and up). Each part has separate matrices
A [rank, inputs] and B [rows, rank], as in PEFT. A column-parallel linear (rows split over tensor-parallel ranks) has B
sharded and A replicated; a row-parallel linear has A sharded and B replicated. Ranks exchange activations of width
rank. A replicated matrix that sees only some tokens on each rank needs its gradient summed: Megatron does that after
the backward pass for parameters marked `sequence_parallel`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

Cut = Literal["rows", "columns", "whole"]
_AXIS = {"A": -1, "B": -2}
_CUT_MATRIX = {"rows": "B", "columns": "A", "whole": None}


class LinearPart(NamedTuple):
    """One Hugging Face linear inside a Megatron linear."""

    name: str  # "q_proj"
    modules: list[str]  # Hugging Face module names; one per local expert in a grouped linear
    rows: int  # on this rank
    adapted: bool


@dataclass(frozen=True)
class Site:
    """The local shard of an adapted Megatron linear."""

    parts: list[LinearPart]
    interleaved: int  # query groups on this rank if rows are stored q, k, v per group; else 1
    inputs: int  # columns on this rank
    cut: Cut
    experts: int  # local experts of a grouped linear; 0: not grouped
    communicates: bool  # the linear itself gathers its input or reduces its output; else the surrounding module does
    sequence_parallel: bool
    expert_gradients: bool  # gradients are reduced over expert-data-parallel ranks (Megatron: allreduce=False)


class Adapter(torch.nn.Module):
    """The trained matrices of one linear: `A.<part>` and `B.<part>`.

    In a grouped linear they have a leading dimension of local experts.
    """

    def __init__(self, site: Site, *, rank: int, alpha: float, seed: int, config: Any) -> None:
        super().__init__()
        self.site, self.rank, self.scale = site, rank, alpha / rank
        grouped = site.experts > 0
        ps = parallel_state
        self.group = ps.get_expert_tensor_parallel_group() if grouped else ps.get_tensor_model_parallel_group()
        device = torch.cuda.current_device()
        self.A, self.B = torch.nn.ParameterDict(), torch.nn.ParameterDict()
        for part in site.parts:
            if part.adapted:
                a = torch.stack([self._initial_a(module, seed) for module in part.modules])
                b = torch.zeros(len(part.modules), part.rows, rank)
                for kind, matrices, value in (("A", self.A, a), ("B", self.B, b)):
                    value = value if grouped else value[0]
                    matrices[part.name] = torch.nn.Parameter(value.to(device, config.params_dtype))
                    self._mark(matrices[part.name], kind)

    def forward(self, x: torch.Tensor, tokens_per_expert: list[int] | None = None) -> torch.Tensor:
        """Return the summand of the linear's output on this rank; `x` and output are sharded as the linear's."""
        if tokens_per_expert is not None:
            return self._grouped(x, tokens_per_expert)
        down = F.linear(x, torch.cat(list(self.A.values()))) * self.scale
        return self._up(self._across_ranks(down), {name: matrix for name, matrix in self.B.items()})

    def delta(self, expert: int | None = None) -> torch.Tensor:
        """Return the summand of the linear's weight on this rank, float32 [rows, inputs]."""

        def of_expert(matrix: torch.Tensor) -> torch.Tensor:
            return (matrix if expert is None else matrix[expert]).float()

        deltas = [
            of_expert(self.B[part.name]) @ of_expert(self.A[part.name]) * self.scale
            if part.adapted
            else torch.zeros(part.rows, self.site.inputs, device=self._device())
            for part in self.site.parts
        ]
        return _interleave([delta.T for delta in deltas], self.site.interleaved).T

    def whole(self, kind: str, part: str) -> torch.Tensor:
        """Return matrix A or B of `part` with the shards of all tensor-parallel ranks. Collective within `group`."""
        matrix = (self.A if kind == "A" else self.B)[part].detach()
        if _CUT_MATRIX[self.site.cut] != kind or self.group.size() == 1:
            return matrix
        shards = [torch.empty_like(matrix) for _ in range(self.group.size())]
        torch.distributed.all_gather(shards, matrix.contiguous(), group=self.group)
        return torch.cat(shards, _AXIS[kind])

    def shard(self, kind: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of the full matrix A or B of a part: the inverse of `whole`."""
        if _CUT_MATRIX[self.site.cut] != kind or self.group.size() == 1:
            return whole
        return whole.chunk(self.group.size(), _AXIS[kind])[self.group.rank()]

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict[str, Any]:
        """Return sharded tensors of the full matrices under names that do not depend on the layout."""
        result = {}
        for kind, matrices in (("A", self.A), ("B", self.B)):
            for name, matrix in matrices.items():
                offsets, copy = list(sharded_offsets), self.group.rank()
                if self.site.experts:
                    experts = parallel_state.get_expert_model_parallel_group()
                    offsets.append((0, experts.rank(), experts.size()))
                    replica = parallel_state.get_expert_data_parallel_rank()
                else:
                    replica = metadata["dp_cp_group"].rank()
                if _CUT_MATRIX[self.site.cut] == kind:
                    offsets.append((matrix.dim() + _AXIS[kind], self.group.rank(), self.group.size()))
                    copy = 0
                key = f"{prefix}{kind}.{name}"
                result[key] = ShardedTensor.from_rank_offsets(key, matrix, *offsets, replica_id=(0, copy, replica))
        return result

    def _grouped(self, x: torch.Tensor, tokens_per_expert: list[int]) -> torch.Tensor:
        a = torch.cat([self._summed("A", matrix) for matrix in self.A.values()], dim=1)
        b = {name: self._summed("B", matrix) for name, matrix in self.B.items()}
        outputs = []
        for expert, rows in enumerate(x.split(tokens_per_expert)):
            down = F.linear(rows, a[expert]) * self.scale
            outputs.append(self._up(down, {name: matrix[expert] for name, matrix in b.items()}))
        return torch.cat(outputs)

    def _up(self, down: torch.Tensor, b: dict[str, torch.Tensor]) -> torch.Tensor:
        parts = dict(zip(b, down.split(self.rank, -1), strict=True))
        outputs = [
            F.linear(parts[part.name], b[part.name]) if part.adapted else down.new_zeros(*down.shape[:-1], part.rows)
            for part in self.site.parts
        ]
        return _interleave(outputs, self.site.interleaved)

    def _across_ranks(self, down: torch.Tensor) -> torch.Tensor:
        """Return A x as B needs it: gathered over tokens if B is row-sharded, summed if A is column-sharded."""
        if not self.site.communicates or self.group.size() == 1 or self.site.cut == "whole":
            return down
        if self.site.cut == "rows":
            if self.site.sequence_parallel:
                return gather_from_sequence_parallel_region(down)
            return copy_to_tensor_model_parallel_region(down, self.group)
        if self.site.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(down)
        return reduce_from_tensor_model_parallel_region(down)

    def _summed(self, kind: str, matrix: torch.Tensor) -> torch.Tensor:
        """Return an expert's matrix; if it is replicated over tensor-parallel ranks, its gradient is summed over them."""
        if self.group.size() == 1 or _CUT_MATRIX[self.site.cut] == kind:
            return matrix
        return copy_to_tensor_model_parallel_region(matrix, self.group)

    def _mark(self, matrix: torch.nn.Parameter, kind: str) -> None:
        """Set the attributes from which Megatron derives gradient sums and the gradient norm."""
        cut = _CUT_MATRIX[self.site.cut] == kind
        dimension = matrix.dim() + _AXIS[kind] if cut else -1
        set_tensor_model_parallel_attributes(matrix, cut and self.group.size() > 1, dimension, 1)
        matrix.allreduce = not self.site.expert_gradients
        matrix.sequence_parallel = self.site.sequence_parallel and not cut and not self.site.experts

    def _initial_a(self, module: str, seed: int) -> torch.Tensor:
        """Draw A uniformly within 1 / sqrt(inputs), as PEFT does, seeded by module name: the same in every layout."""
        ranks = self.group.size() if self.site.cut == "columns" else 1
        inputs = self.site.inputs * ranks
        digest = hashlib.sha256(f"{seed}/{module}".encode()).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:7], "little"))
        values = torch.empty(self.rank, inputs, device="cpu")
        values.uniform_(-(inputs**-0.5), inputs**-0.5, generator=generator)
        return values.chunk(ranks, 1)[self.group.rank() if ranks > 1 else 0]

    def _device(self) -> torch.device:
        return next(self.parameters()).device


class Adapters(torch.nn.Module):
    """All adapters of a model chunk by the name of their linear, with layer numbers of the whole model."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name, adapter in self.named_children():
            result.update(adapter.sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata))
        return result


def _interleave(parts: list[torch.Tensor], groups: int) -> torch.Tensor:
    """Join parts [..., rows] as Megatron stores them: the rows of the first group of each part, of the second, ..."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part.unflatten(-1, (groups, -1)) for part in parts], -1).flatten(-2)
