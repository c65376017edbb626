"""Boxes of flat ranges, and files that any reader of safetensors reads."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from safetensors.torch import load_file

from megarl.checkpoint.manifest import file_sum
from megarl.megatron.tensor_files import Piece, boxes, write


def test_boxes_by_hand() -> None:
    assert list(boxes(1, 7, (3, 3))) == [((0, 1), (1, 2)), ((1, 0), (1, 3)), ((2, 0), (1, 1))]
    assert list(boxes(4, 5, (3, 3))) == [((1, 1), (1, 1))]
    assert list(boxes(3, 9, (3, 3))) == [((1, 0), (2, 3))]
    assert list(boxes(0, 1, ())) == [((), ())]
    assert list(boxes(5, 5, (3, 3))) == []


def test_boxes_are_the_range_in_order() -> None:
    chance = random.Random(0)
    for _ in range(300):
        shape = tuple(chance.randint(1, 4) for _ in range(chance.randint(1, 4)))
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        start = chance.randint(0, whole.numel())
        stop = chance.randint(start, whole.numel())
        found = []
        for offset, size in boxes(start, stop, shape):
            found += whole[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))].flatten().tolist()
        assert found == list(range(start, stop)), (shape, start, stop)


def test_written_files_are_safetensors(tmp_path: Path) -> None:
    tensors = {
        "half": torch.randn(3, 5).bfloat16(),
        "whole": torch.randn(4),
        "mask": torch.tensor([[True, False, True]]),
        "one": torch.tensor(7),
        "turned": torch.randn(4, 3).T,
    }
    pieces = [Piece(name, tuple(t.shape), (0,) * t.dim(), t) for name, t in tensors.items()]
    assert write(tmp_path / "a.safetensors", pieces) == file_sum(tmp_path / "a.safetensors")
    for key, tensor in load_file(tmp_path / "a.safetensors").items():
        expected = tensors[key.split("@")[0]]
        assert tensor.dtype == expected.dtype and torch.equal(tensor, expected), key
