"""Checkpoints: whole or not at all, found again, kept to a number; waiting groups survive to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.checkpoint import find_checkpoint, list_checkpoints, load_state, save_checkpoint, set_aside_later
from megarl.rollout.admission import TriedGroup
from megarl.types import Group, InlineData, Sample, SampleTokens


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
            version=4,
        )
        for i in range(2)
    ]
    return TriedGroup(Group(number, f"row/{number}", "source", 4, samples), accepted)


def state(*gathered: list[TriedGroup]) -> dict[str, Any]:
    return {"step": 4, "source": {"counters": {"admitted": 7}, "gathered": list(gathered)}}


def flat(saved: dict[str, Any]) -> list[TriedGroup]:
    return [item for batch in saved["source"]["gathered"] for item in batch]


def write_trainer(folder: Path) -> None:
    folder.mkdir()
    (folder / "weights").write_bytes(b"1234")


def test_round_trip_is_exact(tmp_path: Path) -> None:
    saved = state([tried(3, True), tried(4, False)], [tried(5, True)])
    path = save_checkpoint(tmp_path, 4, saved, 2, write_trainer)
    assert (path / "trainer" / "weights").read_bytes() == b"1234"
    loaded = load_state(path)
    assert loaded["source"]["counters"] == {"admitted": 7} and loaded["step"] == 4
    for old, new in zip(flat(saved), flat(loaded), strict=True):
        assert old.accepted == new.accepted
        assert (old.group.number, old.group.prompt_uid, old.group.version) == (
            new.group.number,
            new.group.prompt_uid,
            new.group.version,
        )
        for before, after in zip(old.group.samples, new.group.samples, strict=True):
            assert {**before.__dict__, "data": None} == {**after.__dict__, "data": None}
        for before, after in zip(old.group.samples[0].data.get(), new.group.samples[0].data.get(), strict=True):
            for name in ("tokens", "loss_mask", "rollout_log_probs"):
                left, right = getattr(before, name), getattr(after, name)
                assert left.dtype == right.dtype and np.array_equal(left, right)
            assert before.text == after.text


def test_a_failed_save_leaves_the_older_one_and_no_rest(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 2, state(), 2, write_trainer)

    def fail(folder: Path) -> None:
        write_trainer(folder)
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        save_checkpoint(tmp_path, 4, state(), 2, fail)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000002"]


def test_going_on_from_an_older_one_sets_the_newer_aside(tmp_path: Path) -> None:
    for step in (5, 9, 10):
        save_checkpoint(tmp_path, step, state(), 9, write_trainer)
    assert [path.name for path in set_aside_later(tmp_path, 5)] == ["step_000009", "step_000010"]
    save_checkpoint(tmp_path, 6, state(), 2, write_trainer)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000005", "step_000006"]
    assert find_checkpoint("auto", tmp_path) == tmp_path / "step_000006"
    assert (tmp_path / "discarded" / "step_000010" / "controller.json").exists()


def test_only_whole_checkpoints_are_found_and_old_ones_go(tmp_path: Path) -> None:
    assert find_checkpoint("auto", tmp_path / "none") is None
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, step, state(), 2, write_trainer)
    (tmp_path / ".step_000011.partial").mkdir()  # a run that was killed while it saved
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000002", "step_000010"]
    assert find_checkpoint("auto", tmp_path) == tmp_path / "step_000010"
    assert find_checkpoint("never", tmp_path) is None
    assert find_checkpoint(str(tmp_path / "step_000002"), tmp_path) == tmp_path / "step_000002"
    with pytest.raises(ValueError, match="neither never, auto nor a checkpoint"):
        find_checkpoint(str(tmp_path), tmp_path)
    with pytest.raises(ValueError, match="holds no checkpoint"):
        find_checkpoint(str(tmp_path / "step_000099"), tmp_path)
    save_checkpoint(tmp_path, 11, state(), 2, write_trainer)
    assert not (tmp_path / ".step_000011.partial").exists()
