"""Positions of the elements of a Megatron parameter's shard in the tensors of a Hugging Face checkpoint. Pure.

Each function here is the kind of a row in a family's table. It is given the model's configuration (`text_fields`), the shape of
the parameter on one rank, and the rank's shard, and returns where each of the row's tensors stores it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

Config = dict[str, Any]

Slice = tuple[int, int, int, int, int, int]
"""Row, column, rows and columns in the checkpoint's tensor as a matrix (see `as_matrix`); element offset and row stride in the
contiguous parameter."""


class ParameterShard(NamedTuple):
    """Part `rank` of `ranks` equal parts of a parameter, split along dimension `dim`."""

    rank: int = 0
    ranks: int = 1
    dim: int = 0
    expert: int = 0  # number of the expert that the parameter belongs to


class Stored(NamedTuple):
    """A checkpoint tensor's shape, and the slices of it that a shard holds."""

    shape: tuple[int, ...]
    slices: list[Slice]


Kind = Callable[[Config, tuple[int, ...], ParameterShard], list[Stored]]


def copy(config: Config, shape: tuple[int, ...], shard: ParameterShard) -> list[Stored]:
    """Store the parameter as it is."""
    if shard.dim == 0:
        return [_lines(shape, shape[0] * shard.ranks, [(shard.rank * shape[0], 0, shape[0])])]
    rows, columns = shape
    return [Stored((rows, columns * shard.ranks), [(0, shard.rank * columns, rows, columns, 0, columns)])]


def one_row(config: Config, shape: tuple[int, ...], shard: ParameterShard) -> list[Stored]:
    """Store a vector that every rank has whole as a matrix of one row."""
    return [Stored((1, shape[0]), [(0, 0, 1, shape[0], 0, shape[0])])]


def vocabulary(config: Config, shape: tuple[int, ...], shard: ParameterShard) -> list[Stored]:
    """Store an embedding or output layer without the rows that Megatron adds to make the vocabulary divisible."""
    first, size = shard.rank * shape[0], config["vocab_size"]
    return [_lines(shape, size, [(first, 0, min(shape[0], size - first))])]


def gate_up(config: Config, shape: tuple[int, ...], shard: ParameterShard) -> list[Stored]:
    """Store a gated MLP's first linear as two tensors. Each rank has its share of the gate, then of the up projection."""
    half = shape[0] // 2
    return [
        _lines(shape, half * shard.ranks, [(shard.rank * half, 0, half)]),
        _lines(shape, half * shard.ranks, [(shard.rank * half, half, half)]),
    ]


def qkv(config: Config, shape: tuple[int, ...], shard: ParameterShard) -> list[Stored]:
    """Store query, key and value as three tensors. In the parameter, each key/value head follows its query heads."""
    heads = config["num_attention_heads"]
    return _query_key_value(shape, shard, heads, config.get("num_key_value_heads") or heads)


def tower_qkv(config: Config, shape: tuple[int, ...], shard: ParameterShard) -> list[Stored]:
    """Store a vision tower's query, key and value as one tensor, one after the other."""
    heads = config["vision_config"]["num_heads"]
    parts = _query_key_value(shape, shard, heads, heads)
    rows = parts[0].shape[0]
    dim = 0 if len(shape) > 1 else 1  # a vector is a matrix of one row
    slices = [
        (*(start + (number * rows if axis == dim else 0) for axis, start in enumerate(piece[:2])), *piece[2:])
        for number, part in enumerate(parts)
        for piece in part.slices
    ]
    return [Stored((3 * rows, *shape[1:]), slices)]  # type: ignore[arg-type]


def _query_key_value(shape: tuple[int, ...], shard: ParameterShard, heads: int, groups: int) -> list[Stored]:
    per_group, held = heads // groups, groups // shard.ranks  # query heads of a group; groups of this shard
    size = shape[0] // (held * (per_group + 2))  # of a head
    first = shard.rank * held
    stored = []
    for begin, count in ((0, per_group), (per_group, 1), (per_group + 1, 1)):
        lines, stride = count * size, (per_group + 2) * size
        runs = [((first + group) * lines, group * stride + begin * size, lines) for group in range(held)]
        stored.append(_lines(shape, groups * lines, runs))
    return stored


def _lines(shape: Sequence[int], lines: int, runs: Iterable[tuple[int, int, int]]) -> Stored:
    """Return a tensor of `lines` along the first dimension, of which the parameter holds `runs`.

    A run is its first line in the tensor, its first line in the parameter, and their number; empty runs are left out.
    """
    whole = (lines, *shape[1:])
    width = math.prod(shape[1:])
    if len(shape) == 1:
        return Stored(whole, [(0, line, 1, count, offset, shape[0]) for line, offset, count in runs if count > 0])
    return Stored(whole, [(line, 0, count, width, offset * width, width) for line, offset, count in runs if count > 0])


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Return the rows and columns of a checkpoint tensor as a matrix: one row for a vector."""
    if len(shape) < 2:
        return 1, math.prod(shape)
    return shape[0], math.prod(shape[1:])


def gated_qkv(config: Config, shape: tuple[int, ...], shard: ParameterShard) -> list[Stored]:
    """Store query, key and value as three tensors, the query of each head with the gate of its output after it.

    In the parameter, each key/value head follows the queries and then the gates of its query heads.
    """
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    per_group, held = heads // groups, groups // shard.ranks
    stride = shape[0] // held
    size = stride // (2 * per_group + 2)
    first = shard.rank * held
    gated = [
        (
            ((first + group) * per_group + head) * 2 * size + gate * size,
            group * stride + (gate * per_group + head) * size,
            size,
        )
        for group in range(held)
        for head in range(per_group)
        for gate in (0, 1)
    ]
    stored = [_lines(shape, 2 * heads * size, gated)]
    for begin in (2 * per_group * size, (2 * per_group + 1) * size):
        runs = [((first + group) * size, group * stride + begin, size) for group in range(held)]
        stored.append(_lines(shape, groups * size, runs))
    return stored


class DeltaSizes(NamedTuple):
    """Sizes of a gated delta net. Its parameters hold query, key, value, output gate, beta and decay of one key head after the
    other, so that tensor-parallel ranks have whole heads."""

    heads: int  # key heads
    key: int  # of a head's query and key
    value: int  # of all value heads of a key head
    per_key: int  # value heads of a key head

    @property
    def parts(self) -> tuple[int, ...]:
        """Lines of query, key, value, output gate, beta and decay of a key head."""
        return self.key, self.key, self.value, self.value, self.per_key, self.per_key


def delta_sizes(config: Config) -> DeltaSizes:
    """Return the sizes of a model's gated delta nets."""
    per_key = config["linear_num_value_heads"] // config["linear_num_key_heads"]
    width = config["linear_value_head_dim"] * per_key
    return DeltaSizes(config["linear_num_key_heads"], config["linear_key_head_dim"], width, per_key)


def delta_by_head(config: Config, shape: tuple[int, ...], shard: ParameterShard) -> list[Stored]:
    """Store a delta net's input as two tensors, both by key head: query, key, value and gate; beta and decay."""
    sizes = delta_sizes(config)
    wide, narrow = sum(sizes.parts[:4]), sum(sizes.parts[4:])
    held = sizes.heads // shard.ranks
    return [
        _lines(
            shape,
            sizes.heads * count,
            [((shard.rank * held + head) * count, head * (wide + narrow) + begin, count) for head in range(held)],
        )
        for begin, count in ((0, wide), (wide, narrow))
    ]


def delta_by_part(config: Config, shape: tuple[int, ...], shard: ParameterShard) -> list[Stored]:
    """Store a delta net's input as four tensors: query, key and value of all heads one after the other; gate; beta; decay."""
    sizes = delta_sizes(config)
    return [_parts(shape, sizes, shard, sizes.parts, tensor) for tensor in ((0, 1, 2), (3,), (4,), (5,))]


def delta_convolution(config: Config, shape: tuple[int, ...], shard: ParameterShard) -> list[Stored]:
    """Store a delta net's convolution with the channels of query, key and value of all heads one after the other."""
    sizes = delta_sizes(config)
    return [_parts(shape, sizes, shard, sizes.parts[:3], (0, 1, 2))]


def _parts(
    shape: tuple[int, ...], sizes: DeltaSizes, shard: ParameterShard, of_head: tuple[int, ...], tensor: tuple[int, ...]
) -> Stored:
    """Return a tensor of the parts `tensor` of all heads, of a parameter with the parts `of_head` of one head after the other."""
    held, runs, start = sizes.heads // shard.ranks, [], 0
    for part in tensor:
        count, begin = of_head[part], sum(of_head[:part])
        runs += [
            (start + (shard.rank * held + head) * count, head * sum(of_head) + begin, count) for head in range(held)
        ]
        start += sizes.heads * count
    return _lines(shape, start, runs)
