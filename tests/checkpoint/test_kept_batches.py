"""Batches that are kept for trainers that start again."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.atomic_files import DiskFullError
from megarl.checkpoint.kept_batches import KeptBatches
from megarl.types import Group, InlineData, Sample, SampleImages, SampleTokens, Span, TokenScores


def vectors(seed: int) -> SampleTokens:
    random = np.random.default_rng(seed)
    length = 5
    return SampleTokens(
        tokens=random.integers(0, 50, length, dtype=np.int32),
        loss_mask=np.array([False, True, True, False, True]),
        rollout_log_probs=random.normal(size=length).astype(np.float32),
        text="an answer",
        routed_experts=random.integers(0, 8, (length, 2, 2), dtype=np.int16),
        images=SampleImages(np.ones((4, 3), np.float32), np.array([[1, 2, 2]]), np.array([1])),
        teacher=TokenScores(*(random.normal(size=shape).astype(np.float32) for shape in (5, (5, 2), (5, 2)))),
    )


def group(number: int) -> Group:
    data = InlineData([vectors(number), vectors(number + 100)])
    spans = (Span(0, 3), Span(2, 4))
    samples = [Sample(number, i, data, 2, 3, 3, reward=0.1 + i / 3, steps=((2, 0.7),), spans=spans) for i in range(2)]
    return Group(number, "row", "test", samples)


def plain(value: Any) -> Any:
    """Return arrays as lists, to compare values."""
    if isinstance(value, np.ndarray):
        return (value.dtype.name, value.tolist())
    if hasattr(value, "__dataclass_fields__"):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def test_a_batch_is_read_as_it_was_kept(tmp_path: Path) -> None:
    """Each value of the samples enters the loss: none may be missing or rounded."""
    batches = KeptBatches(tmp_path / "batches")
    groups = [group(3), group(4)]
    batches.keep(7, groups)
    assert 7 in batches and 6 not in batches
    assert plain(batches.read(7)) == plain(groups)
    batches.keep(8, [])
    assert batches.read(8) == []


def test_batches_up_to_a_checkpoint_are_deleted(tmp_path: Path) -> None:
    batches = KeptBatches(tmp_path / "batches")
    for step in (1, 2, 3):
        batches.keep(step, [group(step)])
    batches.read(3)  # its write has ended
    batches.forget_through(2)
    assert [path.name for path in (tmp_path / "batches").iterdir()] == ["step_000003"]
    assert [step in batches for step in (1, 2, 3)] == [False, False, True]
    batches.close()
    assert not (tmp_path / "batches").exists()


def test_a_session_begins_without_batches_of_an_earlier_one(tmp_path: Path) -> None:
    earlier = KeptBatches(tmp_path / "batches")
    earlier.keep(1, [])
    assert earlier.read(1) == []
    assert 1 not in KeptBatches(tmp_path / "batches") and not (tmp_path / "batches").exists()


@pytest.mark.parametrize("name", ["groups.json", "vectors.npz"])
def test_a_batch_that_cannot_be_written_ends_the_run(name: str, tmp_path: Path) -> None:
    """Otherwise the next failure of a trainer would find no batch. The kernel refuses the write of one of its files."""
    batches = KeptBatches(tmp_path / "batches")
    file = tmp_path / "batches" / "step_000001" / name
    file.parent.mkdir(parents=True)
    file.symlink_to("/dev/full")
    batches.keep(1, [group(1)])
    with pytest.raises(DiskFullError, match="the disk is full"):
        batches.read(1)
    with pytest.raises(DiskFullError, match="the disk is full"):
        batches.keep(2, [group(2)])
