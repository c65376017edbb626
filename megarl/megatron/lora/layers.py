"""What an adapter computes, and how it is cut: delta(x) = alpha / rank * B A x beside a linear of Megatron's.

One linear of Megatron's may hold several of Hugging Face's (q, k and v; gate and up). Each of these parts has an
A [rank, inputs] and a B [rows, rank] of its own, as in PEFT. A linear whose rows are cut over tensor-parallel
ranks has B cut and A whole on each; one whose columns are cut has A cut and B whole. What ranks exchange are
activations of width rank. Where whole matrices see a part of the tokens on each rank, their gradients are summed:
Megatron does so after the backward pass for parameters that are marked `sequence_parallel`.
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


class Part(NamedTuple):
    """One Hugging Face linear inside a linear of Megatron's."""

    name: str  # "q_proj"
    modules: list[str]  # its Hugging Face module; of grouped experts, each local expert's
    rows: int  # on this rank
    adapted: bool


@dataclass(frozen=True)
class Site:
    """A linear of Megatron's that is adapted, as this rank holds it."""

    parts: list[Part]
    interleaved: int  # query groups on this rank: the rows are q, k, v of the first, of the second, ...; else 1
    inputs: int  # columns on this rank
    cut: Cut
    experts: int  # local experts of a grouped linear; 0: not grouped
    exchanges: bool  # the linear gathers its input or reduces its output; else what surrounds it does
    sequence_parallel: bool
    alone: bool  # no other rank of a data-parallel group holds the same experts' copies (`allreduce` is False)


class Adapter(torch.nn.Module):
    """The trained matrices beside one linear: `A.<part>` and `B.<part>`, with a leading dimension of local experts
    where the linear is grouped."""

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
        """What is added to the linear's output on this rank."""
        if tokens_per_expert is not None:
            return self._grouped(x, tokens_per_expert)
        down = F.linear(x, torch.cat(list(self.A.values()))) * self.scale
        return self._up(self._across_ranks(down), {name: matrix for name, matrix in self.B.items()})

    def delta(self, expert: int | None = None) -> torch.Tensor:
        """What is added to the linear's weight on this rank, float32 [rows, inputs]."""

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
        """Matrix A or B of `part` with the parts of all tensor-parallel ranks. Collective within `group`."""
        matrix = (self.A if kind == "A" else self.B)[part].detach()
        if _CUT_MATRIX[self.site.cut] != kind or self.group.size() == 1:
            return matrix
        pieces = [torch.empty_like(matrix) for _ in range(self.group.size())]
        torch.distributed.all_gather(pieces, matrix.contiguous(), group=self.group)
        return torch.cat(pieces, _AXIS[kind])

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict[str, Any]:
        """For checkpoints: whole matrices under names that no layout changes."""
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
        pieces = dict(zip(b, down.split(self.rank, -1), strict=True))
        outputs = [
            F.linear(pieces[part.name], b[part.name]) if part.adapted else down.new_zeros(*down.shape[:-1], part.rows)
            for part in self.site.parts
        ]
        return _interleave(outputs, self.site.interleaved)

    def _across_ranks(self, down: torch.Tensor) -> torch.Tensor:
        """A x as B needs it: of all tokens where B's rows are cut, summed where A's columns are."""
        if not self.site.exchanges or self.group.size() == 1 or self.site.cut == "whole":
            return down
        if self.site.cut == "rows":
            if self.site.sequence_parallel:
                return gather_from_sequence_parallel_region(down)
            return copy_to_tensor_model_parallel_region(down, self.group)
        if self.site.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(down)
        return reduce_from_tensor_model_parallel_region(down)

    def _summed(self, kind: str, matrix: torch.Tensor) -> torch.Tensor:
        """An expert's matrix, its gradient summed over the ranks that cut the expert and each hold it whole."""
        if self.group.size() == 1 or _CUT_MATRIX[self.site.cut] == kind:
            return matrix
        return copy_to_tensor_model_parallel_region(matrix, self.group)

    def _mark(self, matrix: torch.nn.Parameter, kind: str) -> None:
        """Tell Megatron how ranks share a matrix: for its gradient's sum, and its norm."""
        cut = _CUT_MATRIX[self.site.cut] == kind
        dimension = matrix.dim() + _AXIS[kind] if cut else -1
        set_tensor_model_parallel_attributes(matrix, cut and self.group.size() > 1, dimension, 1)
        matrix.allreduce = not self.site.alone
        matrix.sequence_parallel = self.site.sequence_parallel and not cut and not self.site.experts

    def _initial_a(self, module: str, seed: int) -> torch.Tensor:
        """Uniform within 1 / sqrt(inputs), as PEFT starts; drawn from the module's name, so that no layout changes it."""
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
    """All adapters of a model chunk, by the name of their linear, its layer counted over the whole model."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name, adapter in self.named_children():
            result.update(adapter.sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata))
        return result


def _interleave(pieces: list[torch.Tensor], groups: int) -> torch.Tensor:
    """Parts [..., rows] joined as Megatron stores them: the first group's rows of each part, the second's, ..."""
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat([piece.unflatten(-1, (groups, -1)) for piece in pieces], -1).flatten(-2)
