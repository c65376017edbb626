"""Experts of a layer that a checkpoint stores as one tensor, as kinds of rows (see `slices`). Pure.

gpt-oss stores each expert's matrices transposed, and the rows of gate and up projection alternately. Slices move blocks of
elements and cannot transpose, so slices of the kinds in `REORDERED` count the elements of `in_stored_order(kind, parameter)`.
Weights are NumPy arrays or torch tensors.
"""

from __future__ import annotations

import math
from typing import Any

from megarl.hf.config import number_of_experts
from megarl.hf.families.slices import Config, Kind, ParameterShard, Stored


def expert_stack(config: Config, shape: tuple[int, ...], shard: ParameterShard) -> list[Stored]:
    """Store the parameters of all experts as one tensor, one expert after the other. They cannot be split into shards."""
    assert shard.ranks == 1, "check_layout refuses it"
    elements = math.prod(shape)
    return [Stored((number_of_experts(config), *shape), [(shard.expert, 0, 1, elements, 0, elements)])]


def transposed_stack(config: Config, shape: tuple[int, ...], shard: ParameterShard) -> list[Stored]:
    """Like `expert_stack`, with each expert's matrix transposed."""
    return expert_stack(config, shape[::-1], shard)


def interleaved_stack(config: Config, shape: tuple[int, ...], shard: ParameterShard) -> list[Stored]:
    """Like `transposed_stack`, with the lines of gate and up projection alternately. Biases have no lines to transpose."""
    return expert_stack(config, shape[::-1], shard)


STACKS = (expert_stack, transposed_stack, interleaved_stack)
REORDERED = (transposed_stack, interleaved_stack)


def in_stored_order(kind: Kind, weight: Any) -> Any:
    """Return a parameter with its elements in the order that the slices of `kind` count; a view where that is possible."""
    if kind is interleaved_stack:  # gate, then up -> gate 0, up 0, gate 1, ...
        weight = weight.reshape(2, -1, *weight.shape[1:]).swapaxes(0, 1).reshape(weight.shape)
    return weight.swapaxes(0, 1) if kind in REORDERED and weight.ndim == 2 else weight


def in_parameter_order(kind: Kind, stored: Any) -> Any:
    """Return the parameter of which `stored` is `in_stored_order`."""
    weight = stored.swapaxes(0, 1) if kind in REORDERED and stored.ndim == 2 else stored
    if kind is interleaved_stack:
        return weight.reshape(-1, 2, *weight.shape[1:]).swapaxes(0, 1).reshape(weight.shape)
    return weight
