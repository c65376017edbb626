"""Slices of flat ranges, and files that any safetensors reader can read."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from safetensors.torch import load_file

from megarl.checkpoint.manifest import file_sum
from megarl.megatron.checkpoint.tensor_files import TensorShard, slices_of_range, write


def test_slices_by_hand() -> None:
    assert list(slices_of_range(1, 7, (3, 3))) == [((0, 1), (1, 2)), ((1, 0), (1, 3)), ((2, 0), (1, 1))]
    assert list(slices_of_range(4, 5, (3, 3))) == [((1, 1), (1, 1))]
    assert list(slices_of_range(3, 9, (3, 3))) == [((1, 0), (2, 3))]
    assert list(slices_of_range(0, 1, ())) == [((), ())]
    assert list(slices_of_range(5, 5, (3, 3))) == []


def test_slices_cover_the_range_in_order() -> None:
    chance = random.Random(0)
    for _ in range(300):
        shape = tuple(chance.randint(1, 4) for _ in range(chance.randint(1, 4)))
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        start = chance.randint(0, whole.numel())
        stop = chance.randint(start, whole.numel())
        values = []
        for offset, size in slices_of_range(start, stop, shape):
            values += whole[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))].flatten().tolist()
        assert values == list(range(start, stop)), (shape, start, stop)


def test_written_files_are_safetensors(tmp_path: Path) -> None:
    tensors = {
        "half": torch.randn(3, 5).bfloat16(),
        "whole": torch.randn(4),
        "mask": torch.tensor([[True, False, True]]),
        "one": torch.tensor(7),
        "turned": torch.randn(4, 3).T,
    }
    shards = [TensorShard(name, tuple(t.shape), (0,) * t.dim(), t) for name, t in tensors.items()]
    assert write(tmp_path / "a.safetensors", shards) == file_sum(tmp_path / "a.safetensors")
    for key, tensor in load_file(tmp_path / "a.safetensors").items():
        expected = tensors[key.split("@")[0]]
        assert tensor.dtype == expected.dtype and torch.equal(tensor, expected), key
