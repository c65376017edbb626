"""Stand-ins for the parts that write a checkpoint: group states, and trainers that write as real trainers do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megarl.atomic_files import write_synced
from megarl.checkpoint.manifest import file_sum
from megarl.checkpoint.saver import Saver
from megarl.recipe.schema import TrainConfig
from megarl.rollout.admission import TriedGroup
from megarl.types import Group, InlineData, Sample, SampleTokens, Span


def tried(number: int, accepted: bool) -> TriedGroup:
    rng = np.random.default_rng(number)
    vectors = [
        SampleTokens(
            rng.integers(0, 99, 5).astype(np.int32),
            rng.random(5) < 0.5,
            rng.random(5).astype(np.float32),
            f"text {i}\n",
        )
        for i in range(2)
    ]
    data = InlineData(vectors if accepted else [])
    samples = [
        Sample(
            number,
            i,
            data,
            2,
            3,
            3,
            reward=0.1 + i,
            reward_parts={"accuracy": 1.0},
            answer="7",
            finish_reason="length",
            spans=(Span(0, 3), Span(2, 4)),
            steps=((2, 0.1), (4, -0.25)),
        )
        for i in range(2)
    ]
    return TriedGroup(Group(number, f"row/{number}", "source", samples), accepted)


def state(*gathered: list[TriedGroup]) -> dict[str, Any]:
    return {"step": 4, "identity": {}, "source": {"counters": {"admitted": 7}, "gathered": list(gathered)}}


class Trainers:
    """Two ranks that write `contents`; a background save writes when `work` is called."""

    def __init__(self) -> None:
        self.contents = b"weights"
        self.bytes = 10
        self.error: Exception | None = None
        self._staged: tuple[Path, bytes] | None = None
        self._wrote = False

    def stage_save(self, folder: Path, copy: bool) -> list[tuple[int, list[str]]]:
        self._staged, self._wrote = (folder, self.contents), False
        return [(self.bytes, [f"receipt_{rank}.json"]) for rank in range(2)]

    def write_save(self) -> None: ...

    def save_done(self, wait: bool) -> bool:
        if wait:
            self.work()
        if self.error:
            raise self.error
        return self._wrote

    def work(self) -> None:
        if self.error:
            raise self.error
        assert self._staged is not None
        directory, contents = self._staged
        for rank in range(2):
            directory.mkdir(exist_ok=True)
            name = f"tensors_{rank}"
            write_synced(directory / name, contents + bytes([rank]))
            receipt = {"files": {name: file_sum(directory / name)}, "tensors": {"w": [5, 10]}, "seconds": 0.5 + rank}
            write_synced(directory / f"receipt_{rank}.json", json.dumps(receipt).encode())
        self._wrote = True


def saver(
    folder: Path, trainers: Trainers | None = None, notice: Callable[[str], None] | None = None, **config: Any
) -> Saver:
    """Return a saver of `trainers`. `notice` receives its notices; None: it must have none."""
    groups: Any = {"trainer": trainers or Trainers()}
    config = {"keep_checkpoints": 2, **config}
    return Saver(folder, groups, TrainConfig(**config), lambda: None, notice or unexpected)


def unexpected(text: str) -> None:
    raise AssertionError(f"an unexpected notice: {text}")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def spoil(path: Path, how: str) -> None:
    """Damage a file as disks and users do."""
    if how == "missing":
        path.unlink()
    elif how == "short":
        path.write_bytes(path.read_bytes()[:-1])
    elif how == "flipped":
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    else:
        assert how == "folder"
        shutil.rmtree(path.parent)
