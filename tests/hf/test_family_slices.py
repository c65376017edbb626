"""Slices of checkpoint tensors in the shards of a parameter. tests/megatron/test_layouts.py compares whole models with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.hf import families
from megarl.hf.families.slices import (
    Kind,
    ParameterShard,
    as_matrix,
    copy,
    delta_by_head,
    delta_by_part,
    delta_convolution,
    gate_up,
    gated_qkv,
    qkv,
    tower_qkv,
    vocabulary,
)
from megarl.hf.families.stacks import (
    expert_stack,
    in_parameter_order,
    in_stored_order,
    interleaved_stack,
    transposed_stack,
)

CONFIG: dict[str, Any] = {
    "vocab_size": 21,
    "hidden_size": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 2,
    "vision_config": {"num_heads": 4},
}

# Kind, shape of the whole parameter, split dimension.
KINDS: list[tuple[Kind, tuple[int, ...], int]] = [
    (copy, (8, 12), 0),
    (copy, (8, 12), 1),
    (copy, (8,), 0),
    (copy, (8, 1, 4), 0),
    (vocabulary, (24, 12), 0),
    (gate_up, (32, 12), 0),
    (gate_up, (32,), 0),
    (qkv, (16 * 3, 12), 0),
    (qkv, (16 * 3,), 0),
    (tower_qkv, (12 * 5, 12), 0),
    (tower_qkv, (12 * 5,), 0),
    (gated_qkv, (4 * 6 * 3, 12), 0),
    (delta_by_head, (4 * (3 + 3 + 4 + 4 + 2 + 2), 12), 0),
    (delta_by_part, (4 * (3 + 3 + 4 + 4 + 2 + 2), 12), 0),
    (delta_convolution, (4 * (3 + 3 + 4), 1, 4), 0),
]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("kind", "shape", "dim"), KINDS)
def test_shards_hold_each_element_once(kind: Kind, shape: tuple[int, ...], dim: int, ranks: int) -> None:
    """A shard of a padded vocabulary also has elements that are not stored."""
    held = tuple(size // ranks if axis == dim else size for axis, size in enumerate(shape))
    seen: list[np.ndarray] = []
    padding = 0
    for rank in range(ranks):
        used = np.zeros(np.prod(held), int)
        for number, stored in enumerate(kind(CONFIG, held, ParameterShard(rank, ranks, dim))):
            if rank == 0:
                seen.append(np.zeros(as_matrix(stored.shape), int))
            assert as_matrix(stored.shape) == seen[number].shape, "ranks disagree about a tensor's shape"
            for row, column, rows, columns, offset, stride in stored.slices:
                seen[number][row : row + rows, column : column + columns] += 1
                for line in range(rows):
                    used[offset + line * stride : offset + line * stride + columns] += 1
        assert used.max() == 1
        padding += int((used == 0).sum())
    assert all((count == 1).all() for count in seen)
    assert padding == (3 * 12 if kind is vocabulary else 0)


def test_a_family_is_one_short_file() -> None:
    for file in Path(families.__file__).parent.glob("*.py"):
        text = file.read_text()
        assert "= Family(" not in text or len(text.splitlines()) <= 80, f"{file.name} exceeds 80 lines"


def test_slices_by_hand() -> None:
    second = ParameterShard(1, 2)
    assert copy(CONFIG, (4, 6), second)[0] == ((8, 6), [(4, 0, 4, 6, 0, 6)])
    assert copy(CONFIG, (4, 6), ParameterShard(1, 2, dim=1))[0] == ((4, 12), [(0, 6, 4, 6, 0, 6)])
    assert copy(CONFIG, (6,), second)[0] == ((12,), [(0, 6, 1, 6, 0, 6)])
    assert vocabulary(CONFIG, (12, 2), second)[0] == ((21, 2), [(12, 0, 9, 2, 0, 2)])
    assert vocabulary(CONFIG, (12, 2), ParameterShard(2, 3))[0] == ((21, 2), []), "a shard of padding alone"
    gate, up = gate_up(CONFIG, (4, 2), second)
    assert (gate, up) == (((4, 2), [(2, 0, 2, 2, 0, 2)]), ((4, 2), [(2, 0, 2, 2, 4, 2)]))


def test_heads_by_hand() -> None:
    """Two groups, each with two query heads of one line, a key and a value, of which the second rank has the second group."""
    config = {"num_attention_heads": 4, "num_key_value_heads": 2}
    query, key, value = qkv(config, (4, 5), ParameterShard(1, 2))
    assert query == ((4, 5), [(2, 0, 2, 5, 0, 5)])
    assert key == ((2, 5), [(1, 0, 1, 5, 10, 5)])
    assert value == ((2, 5), [(1, 0, 1, 5, 15, 5)])
    (query, key, value) = gated_qkv(config, (6, 5), ParameterShard(1, 2))
    lines = [(row, offset // 5) for row, _, _, _, offset, _ in query.slices]
    assert lines == [(4, 0), (5, 2), (6, 1), (7, 3)], "head by head, query and gate; in the parameter all queries first"
    assert key.slices[0][4] == 4 * 5 and value.slices[0][4] == 5 * 5


def test_stacks_by_hand() -> None:
    """The second of two experts: gate lines 0 and 1, up lines 2 and 3, each of three inputs."""
    config, shard = {"num_local_experts": 2}, ParameterShard(expert=1)
    weight = np.arange(12).reshape(4, 3)
    stored = in_stored_order(interleaved_stack, weight)
    assert stored.tolist() == [[0, 6, 3, 9], [1, 7, 4, 10], [2, 8, 5, 11]], "gate 0, up 0, gate 1, up 1 of each input"
    assert interleaved_stack(config, (4, 3), shard) == [((2, 3, 4), [(1, 0, 1, 12, 0, 12)])]
    assert in_stored_order(interleaved_stack, weight[:, 0]).tolist() == [0, 6, 3, 9]
    assert interleaved_stack(config, (4,), shard) == [((2, 4), [(1, 0, 1, 4, 0, 4)])]
    assert in_stored_order(transposed_stack, weight).tolist() == weight.T.tolist()
    assert transposed_stack(config, (4, 3), shard) == [((2, 3, 4), [(1, 0, 1, 12, 0, 12)])]
    assert in_stored_order(expert_stack, weight) is weight and in_parameter_order(expert_stack, weight) is weight
    assert expert_stack(config, (4, 3), shard) == [((2, 4, 3), [(1, 0, 1, 12, 0, 12)])]


@pytest.mark.parametrize("kind", [interleaved_stack, transposed_stack, expert_stack])
@pytest.mark.parametrize("shape", [(6, 4), (6,), (4, 4)])
def test_the_order_of_a_stack_is_restored(kind: Kind, shape: tuple[int, ...]) -> None:
    weight = np.arange(np.prod(shape)).reshape(shape)
    restored = in_parameter_order(kind, in_stored_order(kind, weight).copy())
    assert restored.shape == shape and (restored == weight).all()
