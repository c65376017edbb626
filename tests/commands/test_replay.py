"""`megarl replay` over written tapes and metrics: starts, comparison and refusals. No training runs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from megarl.commands import replay as command
from megarl.commands.replay import differences, replay, spans_text
from megarl.engines.tape import TapeFile
from megarl.errors import InputError
from megarl.observe.run_dir import RunDirectory
from megarl.recipe.load import read_recipe
from megarl.recipe.text import to_yaml
from megarl.rollout.tape import TAPE_FORMAT

IN_FLIGHT = [
    "cluster.placement=disaggregated",
    "rollout.max_staleness=2",
    "model.path=some/model",
    "train.save_every=2",
]
ENDED = ({"version": 0}, {"ended": True})


class Recorded:
    """A recorded run, written segment by segment."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDirectory(folder / "moved")
        self.run.tape.mkdir(parents=True)
        (folder / "empty.yaml").write_text("{}")
        self.base = folder / "empty.yaml"
        self.segments = 0

    def start(
        self, *records: dict[str, Any], steps: int, after: int = 0, resumed: int | None = None, unlogged: bool = False
    ) -> None:
        recipe = read_recipe(
            self.base, [*IN_FLIGHT, f"train.steps={steps}", "train.resume=auto", "name=earlier"]
        ).recipe
        (self.run.tape / f"recipe-{self.segments}.yaml").write_text(to_yaml(recipe))
        header = {
            "segment": self.segments,
            "format": TAPE_FORMAT,
            "after": after,
            "resumed": resumed,
            "unlogged": unlogged,
            "identity": {},
        }
        file = TapeFile(self.run.tape / "controller.jsonl", header)
        for record in records:
            file.write(record)
        file.close()
        self.segments += 1

    def metrics(self, steps: Sequence[int], **more: float) -> None:
        write_metrics(self.run, steps, **more)


def write_metrics(run: RunDirectory, steps: Sequence[int], **more: float) -> None:
    run.path.mkdir(parents=True, exist_ok=True)
    lines = [{"step": step, "actor/loss": 1 / (step + 1), "timing_s/step": id(run) + step, **more} for step in steps]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The settings of each training; none of them runs."""
    called: list[list[str]] = []

    def run_child(arguments: Sequence[str], environ: Mapping[str, str], folder: Path | None) -> int:
        assert list(arguments[1:4]) == ["-m", "megarl", "train"]
        called.append([Path(arguments[4]).name, *arguments[5:]])
        write_metrics(RunDirectory(Path(arguments[4]).parents[2] / "moved-replay"), REPEATED)
        return 0

    monkeypatch.setattr(command, "run_child", run_child)
    REPEATED[:] = []
    return called


REPEATED: list[int] = []  # steps of the replay's metrics


def test_each_start_is_a_training_beside_the_run(
    recorded: Recorded, commands: list[list[str]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A run of 4 steps was killed, resumed after step 2, ended, and was extended to 6 steps."""
    recorded.start({"version": 3}, steps=4)
    recorded.start(*ENDED, steps=4, after=2, resumed=0)
    recorded.start(*ENDED, steps=6, after=4, resumed=1)
    recorded.metrics(range(7))
    REPEATED[:] = range(7)
    assert replay(recorded.run.path, None, ["observe.console=plain"]) == 0
    common = [f"runs_dir={tmp_path}", f"train.replay={tmp_path}/moved"]
    assert commands == [
        [f"recipe-{number}.yaml", "observe.console=plain", "name=moved-replay", *common, f"train.resume={resume}"]
        for number, resume in enumerate(("never", "auto", "auto"))
    ]
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(", ")[2] for line in lines[:3]] == [
        "start 1 of 3: steps 1 to 2", "start 2 of 3: steps 3 to 4", "start 3 of 3: steps 5 to 6"
    ]  # fmt: skip
    assert lines[3:] == ["7 lines of metrics are bitwise equal (times, rates and memory left out)"]


def test_a_replay_ends_at_a_checkpoint_that_sigterm_caused(
    recorded: Recorded, commands: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """The run was killed, resumed after step 2, stopped by SIGTERM after step 3, killed after step 4, and extended to 6 steps."""
    recorded.start({"version": 2}, steps=4)
    recorded.start({"version": 3}, steps=4, after=2, resumed=0)
    recorded.start(*ENDED, steps=4, after=3, resumed=1)
    recorded.start(*ENDED, steps=6, after=4, resumed=2)
    recorded.metrics(range(7))
    REPEATED[:] = range(4)
    assert replay(recorded.run.path, None, []) == 0
    assert [settings[0] for settings in commands] == ["recipe-0.yaml", "recipe-1.yaml"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("the replay ends after step 3 and does not repeat steps 4 to 6: SIGTERM caused")
    assert [line.partition(": ")[0].strip() for line in lines[1:3]] == ["step 4", "steps 5 to 6"]
    assert lines[1].endswith("--bundle step.tar --step 4") and lines[2].endswith("--bundle step.tar --step 6")
    assert lines[-2:] == [
        "not repeated, since SIGTERM caused the checkpoint before them: steps 4 to 6",
        "4 lines of metrics are bitwise equal (times, rates and memory left out)",
    ]


def test_a_start_that_only_wrote_metrics_after_sigterm_is_not_missing(
    recorded: Recorded, commands: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """The grace time ended after the checkpoint and before the metrics of step 3, which the next start wrote."""
    recorded.start({"version": 3}, steps=4)
    recorded.start(steps=4, after=3, resumed=0, unlogged=True)
    recorded.metrics(range(4))
    REPEATED[:] = range(3)
    assert replay(recorded.run.path, None, []) == 0
    text = capsys.readouterr().out
    assert "does not repeat the start after step 3" in text and "--bundle" not in text
    assert "not repeated, since SIGTERM caused the checkpoint before them: step 3" in text


def test_a_start_that_only_wrote_metrics_is_named(
    recorded: Recorded, commands: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    recorded.start({"version": 3}, steps=4)
    recorded.start(steps=4, after=4, resumed=0, unlogged=True)
    recorded.metrics(range(1, 5))
    REPEATED[:] = range(1, 4)  # a replay that leaves the last step out
    assert replay(recorded.run.path, None, []) == 1
    text = capsys.readouterr().out
    assert "start 2 of 2: the metrics of step 4" in text and "the replay has no metrics of step 4" in text
    assert "3 lines of metrics are bitwise equal" in text


@pytest.mark.parametrize(
    ("steps", "repeated", "more", "status", "words"),
    [
        ([1, 2, 3], [1, 2], {}, 0, "not repeated, since the tape does not contain them: step 3"),
        ([2], [1, 2], {}, 0, "the recorded run has no metrics of them: step 1"),
        ([1, 2], [1, 2], {"critic/score": 1.0}, 1, "2 metrics differ:\n  step 1: critic/score is None, in the recorded run 1.0"),
        ([], [1, 2], {}, 1, "no line of metrics could be compared"),
        ([1, 2], [], {}, 1, "no line of metrics could be compared"),
    ],
)  # fmt: skip
def test_what_is_not_compared_is_named(
    recorded: Recorded, commands: list[list[str]], capsys: pytest.CaptureFixture[str],
    steps: list[int], repeated: list[int], more: dict[str, float], status: int, words: str,
) -> None:  # fmt: skip
    recorded.start({"version": 2}, steps=9)
    recorded.metrics(steps, **more)
    REPEATED[:] = repeated
    assert replay(recorded.run.path, None, []) == status
    assert words in capsys.readouterr().out


def test_a_training_that_fails_ends_the_replay(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded.start({"version": 3}, steps=4)
    recorded.start(*ENDED, steps=4, after=2, resumed=0)
    statuses = iter([7])
    monkeypatch.setattr(command, "run_child", lambda *_: next(statuses))
    assert replay(recorded.run.path, None, []) == 7


def test_a_tape_that_begins_after_a_checkpoint_starts_from_it(recorded: Recorded, commands: list[list[str]]) -> None:
    recorded.start(*ENDED, steps=4, after=2)
    with pytest.raises(
        InputError, match=r"begins after step 2, and the checkpoint of this step is missing: copy it to"
    ):
        replay(recorded.run.path, None, [])
    checkpoint = recorded.run.checkpoints / "step_000002"
    checkpoint.mkdir(parents=True)
    recorded.metrics(range(1, 5))
    REPEATED[:] = [3, 4]
    assert replay(recorded.run.path, None, []) == 0
    assert commands[0][-1] == f"train.resume={checkpoint}"


def test_a_target_with_results_and_settings_of_the_command_are_refused(
    recorded: Recorded, commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded.start(*ENDED, steps=4)
    write_metrics(RunDirectory(tmp_path / "again"), [1])
    monkeypatch.chdir(tmp_path.parent)
    for name in ("again", f"{tmp_path.name}/again", str(tmp_path / "again")):
        with pytest.raises(InputError, match=rf"{tmp_path}/again already holds a run.*--name"):
            replay(recorded.run.path, name, [])
    with pytest.raises(InputError, match=r"sets name, .* itself, got runs_dir=elsewhere: use --name"):
        replay(recorded.run.path, None, ["runs_dir=elsewhere"])
    assert not commands


def test_a_run_without_a_tape_is_refused_with_the_reason(recorded: Recorded, tmp_path: Path) -> None:
    os.rmdir(recorded.run.tape)
    recorded.run.write_recipe(to_yaml(read_recipe(recorded.base, [*IN_FLIGHT, "rollout.data_parallel=2"]).recipe))
    with pytest.raises(
        InputError, match=r"(?s)moved has no tape: engines of a group.*or with rollout.admission continuous"
    ):
        replay(recorded.run.path, None, [])


def test_differences_name_step_and_values_and_nan_repeats() -> None:
    nan = float("nan")
    before = [{"step": 1, "a": nan, "b": 1.0}, {"step": 2, "a": 1.0}]
    assert differences(before, [{"step": 1, "a": nan, "b": 1.0}, {"step": 2, "a": 1.0}]) == []
    assert differences(before, [{"step": 1, "a": 0.0, "b": 1.0}, {"step": 2, "b": 2.0}]) == [
        "step 1: a is 0.0, in the recorded run nan",
        "step 2: a is None, in the recorded run 1.0",
        "step 2: b is 2.0, in the recorded run None",
    ]


def test_steps_as_text() -> None:
    assert [spans_text(steps) for steps in ([4], [4, 5], [1, 2, 3, 7])] == ["step 4", "steps 4 to 5", "steps 1 to 3, 7"]
