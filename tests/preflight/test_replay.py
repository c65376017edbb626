"""`train.replay`: what cannot be repeated is refused before any process starts, with the reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megarl.checkpoint.journal import JournalEntry
from megarl.commands.bundle.choice import choose
from megarl.commands.replay import starts_of
from megarl.engines.specs import first_specs
from megarl.engines.tape import TapeFile
from megarl.errors import RecipeError
from megarl.observe.run_dir import RunDirectory
from megarl.preflight.engines_and_devices import demand_of
from megarl.preflight.load import load_recipe
from megarl.preflight.models import models_of
from megarl.preflight.replay import cannot_replay, open_tape, recipe_file, replay_errors, write_recipe
from megarl.preflight.run_directory import RunPlace
from megarl.recipe.load import read_recipe
from megarl.recipe.schema import Recipe
from megarl.recipe.text import to_yaml
from megarl.rollout.tape import TAPE_FORMAT, history, segments_of

IN_FLIGHT = ["cluster.placement=disaggregated", "rollout.max_staleness=2"]
IDENTITY = {"train.seed": 0, "model": {"weights": "abc"}}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"model: {{path: some/model}}\nruns_dir: {tmp_path}/runs\nname: recorded\ntrain: {{steps: 30}}\n")
    return path


def place(recipe: Recipe, step: int = 0, identity: dict[str, object] = IDENTITY) -> RunPlace:
    directory = RunDirectory(Path(recipe.runs_dir) / recipe.name)
    checkpoint = directory.checkpoints / f"step_{step:06}" if step else None
    if checkpoint is not None:
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "controller.json").write_text('{"source": {"segment": 0}}')
    return RunPlace(directory, checkpoint, step + 1, identity, [])


def record(file: Path, *versions: int) -> Recipe:
    """Write the tape of a run that was killed after the last of `versions`."""
    recipe = load_recipe(file, IN_FLIGHT)
    tape = open_tape(recipe, place(recipe))
    assert tape is not None
    write_recipe(tape, recipe)
    controller = TapeFile(tape.folder / "controller.jsonl", tape.header)
    for version in versions:
        controller.write({"version": version})
    return recipe


def error_of(file: Path, *overrides: str) -> str:
    (error,) = replay_errors(load_recipe(file, [*overrides]))
    assert error.key == "train.replay"
    return str(error)


REPLAY = "train.replay=runs/recorded"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], "it repeats without a tape"),
        (["train.source=sft", "algorithm.loss=sft", "algorithm.advantage=none"], "it repeats without a tape"),
        ([*IN_FLIGHT, "rollout.data_parallel=2", "rollout.engines=2"], "rollout.data_parallel"),
    ],
)
def test_runs_without_a_tape_are_refused(file: Path, overrides: list[str], words: str) -> None:
    assert words in error_of(file, REPLAY, *overrides)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (None, "recorded is not the directory of a run"),
        ([], "recorded has no tape: neither its weights nor its batches depend on time"),
        ([*IN_FLIGHT, "rollout.data_parallel=2"], "recorded has no tape: engines of a group"),
        (IN_FLIGHT, "recorded has no tape: it ended before its first step, or tape/controller.jsonl was deleted"),
    ],
)
def test_a_missing_tape_is_refused(file: Path, tmp_path: Path, overrides: list[str] | None, words: str) -> None:
    recorded = RunDirectory(tmp_path / "runs" / "recorded")
    recorded.path.mkdir(parents=True)
    if overrides is not None:
        recorded.write_recipe(to_yaml(read_recipe(file, overrides).recipe))
    text = error_of(file, f"train.replay={recorded.path}", "name=again", *IN_FLIGHT)
    assert words in text and "or with rollout.admission=continuous" in text


def test_a_run_with_drain_and_continuous_admission_has_a_tape(file: Path) -> None:
    drain = [*IN_FLIGHT, "rollout.at_update=drain"]
    assert cannot_replay(load_recipe(file, drain)) is not None
    assert cannot_replay(load_recipe(file, [*drain, "rollout.admission=continuous"])) is None


def test_a_tape_without_a_whole_step_is_refused(file: Path, tmp_path: Path) -> None:
    record(file, 0)
    text = error_of(file, f"train.replay={tmp_path}/runs/recorded", "name=again", *IN_FLIGHT)
    assert "the tape of " in text and "has no whole step" in text


def test_other_settings_are_named_and_those_that_change_no_number_are_free(file: Path, tmp_path: Path) -> None:
    record(file, 0, 1)
    replay = [*IN_FLIGHT, f"train.replay={tmp_path}/runs/recorded", "name=again"]
    text = error_of(file, *replay, "actor.optimizer.lr=0.5", "rollout.window=0.5")
    assert re.search(r"actor\.optimizer\.lr \S+ -> 0\.5", text) and "rollout.window 0.3 -> 0.5" in text
    free = ["observe.console=plain", "train.keep_checkpoints=9", "train.resume=auto"]
    assert list(replay_errors(load_recipe(file, [*replay, *free]))) == []


def test_a_setting_that_an_older_recipe_lacks_had_its_default(file: Path, tmp_path: Path) -> None:
    record(file, 0, 1)
    recorded = recipe_file(tmp_path / "runs" / "recorded" / "tape", 0)
    recorded.write_text("".join(line for line in recorded.read_text().splitlines(True) if " temperature:" not in line))
    replay = [*IN_FLIGHT, f"train.replay={tmp_path}/runs/recorded", "name=again"]
    assert list(replay_errors(load_recipe(file, replay))) == []
    assert "rollout.temperature 1.0 -> 0.5" in error_of(file, *replay, "rollout.temperature=0.5")


def test_the_recorded_directory_is_not_written(file: Path, tmp_path: Path) -> None:
    record(file, 0, 1)
    assert "into the recorded run" in error_of(file, *IN_FLIGHT, f"train.replay={tmp_path}/runs/recorded")


def test_a_tape_of_an_earlier_format_is_refused_by_its_number(file: Path, tmp_path: Path) -> None:
    record(file, 0, 1)
    tape = tmp_path / "runs" / "recorded" / "tape" / "controller.jsonl"
    tape.write_text(tape.read_text().replace(f'"format":{TAPE_FORMAT},', ""))
    text = error_of(file, f"train.replay={tmp_path}/runs/recorded", "name=again", *IN_FLIGHT)
    assert "segment 0 of the tape has format 1, of an earlier megarl" in text


def test_a_run_with_finish_has_a_tape(file: Path) -> None:
    recipe = load_recipe(file, [*IN_FLIGHT, "rollout.at_update=finish"])
    tape = open_tape(recipe, place(recipe))
    assert tape is not None and tape.header["format"] == TAPE_FORMAT


def test_a_replay_needs_no_judge(file: Path, tmp_path: Path) -> None:
    """It reads the recorded verdicts, so that it needs neither the judge's model nor its devices."""
    judge = ["reward.function=judge", "judge.path=some/judge", "judge.prompt=How good is {{ response }}?"]
    recipe = load_recipe(file, [*IN_FLIGHT, *judge])
    assert open_tape(recipe, place(recipe)) is not None
    assert demand_of(recipe).devices == 3 and "judge.path" in models_of(recipe)
    replay = load_recipe(file, [*IN_FLIGHT, *judge, "train.replay=runs/recorded"])
    assert demand_of(replay).devices == 2 and "judge.path" not in models_of(replay)
    assert not any(spec.name == "judge0" for _, spec in first_specs(replay, training=True))


def test_a_replay_starts_where_the_recorded_run_started(file: Path, tmp_path: Path) -> None:
    record(file, 0, 1, 2)
    recipe = load_recipe(file, [*IN_FLIGHT, f"train.replay={tmp_path}/runs/recorded", "name=again"])
    tape = open_tape(recipe, place(recipe))
    assert tape is not None and tape.plan is not None and tape.plan.last_step == 2
    assert tape.of_engine("engine0").recorded == f"{tmp_path}/runs/recorded/tape/engine0.jsonl"
    with pytest.raises(RecipeError, match="starts after step 2, but the recorded run started from the beginning"):
        open_tape(recipe, place(recipe, step=2))


@pytest.mark.parametrize(
    ("identity", "words"),
    [
        ({**IDENTITY, "train.seed": 1}, "had another train.seed"),
        ({**IDENTITY, "model": {"weights": "def"}}, "had another model"),
    ],
)
def test_other_data_are_refused(file: Path, tmp_path: Path, identity: dict[str, object], words: str) -> None:
    record(file, 0, 1)
    recipe = load_recipe(file, [*IN_FLIGHT, f"train.replay={tmp_path}/runs/recorded", "name=again"])
    with pytest.raises(RecipeError, match=words):
        open_tape(recipe, place(recipe, identity=identity))


def test_a_resumed_run_names_the_segment_that_saved_its_checkpoint(file: Path) -> None:
    recipe = record(file, 0, 1, 2)
    tape = open_tape(recipe, place(recipe, step=2))
    assert tape is not None
    assert (tape.header["segment"], tape.header["after"], tape.header["resumed"]) == (1, 2, 0)


def test_a_segment_gets_a_new_number_if_the_tape_is_lost_while_checkpoints_remain(file: Path) -> None:
    recipe = load_recipe(file, IN_FLIGHT)
    for start in range(2):
        tape = open_tape(recipe, place(recipe, step=2))
        assert tape is not None
        assert (tape.header["segment"], tape.header["resumed"]) == (1 + start, None)
        write_recipe(tape, recipe)
        TapeFile(tape.folder / "controller.jsonl", tape.header).write({"version": 3})
    (plan,) = history(segments_of(tape.folder))
    assert (plan.segment.number, plan.segment.after, plan.last_step) == (2, 2, 3)


def test_a_start_that_is_refused_for_a_locked_directory_leaves_the_recipe_of_the_live_run(file: Path) -> None:
    """The tape is opened before the directory is locked."""
    recipe = load_recipe(file, IN_FLIGHT)
    tape = open_tape(recipe, place(recipe))
    assert tape is not None and not tape.folder.exists()
    write_recipe(tape, recipe)
    written = recipe_file(tape.folder, 0).read_bytes()
    again = load_recipe(file, [*IN_FLIGHT, "actor.optimizer.lr=0.5"])
    open_tape(again, place(again))
    assert recipe_file(tape.folder, 0).read_bytes() == written == to_yaml(recipe).encode()


def test_the_checkpoint_that_a_tape_begins_after_is_named(file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(file, IN_FLIGHT)
    tape = open_tape(recipe, place(recipe, step=2))
    assert tape is not None
    write_recipe(tape, recipe)
    TapeFile(tape.folder / "controller.jsonl", tape.header).write({"version": 3})
    replay = load_recipe(file, [*IN_FLIGHT, f"train.replay={tmp_path}/runs/recorded", "name=again"])
    with pytest.raises(RecipeError, match=f"train.resume={tmp_path}/runs/recorded/checkpoints/step_000002"):
        open_tape(replay, place(replay))


def test_a_start_from_the_journal_is_on_the_tape_and_cannot_be_replayed(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its first weights are in no checkpoint."""
    monkeypatch.chdir(tmp_path)
    recipe = record(file, 0, 1, 2)
    resumed = place(recipe, 4)
    state = resumed.directory.journal / "step_000006"
    state.mkdir(parents=True)
    (state / "controller.json").write_text('{"source": {"segment": 0}}')
    resumed.journal, resumed.first_step = JournalEntry(state, 4, ()), 7
    tape = open_tape(recipe, resumed)
    assert tape is not None
    assert {name: tape.header[name] for name in ("segment", "after", "resumed", "unlogged", "journal")} == {
        "segment": 1, "after": 6, "resumed": 0, "unlogged": False, "journal": True,
    }  # fmt: skip
    write_recipe(tape, recipe)
    controller = TapeFile(tape.folder / "controller.jsonl", tape.header)
    for version in (6, 7):
        controller.write({"version": version})
    text = "segment 1 of the tape began from the journal"
    assert text in error_of(file, REPLAY, "name=again", *IN_FLIGHT)
    with pytest.raises(ValueError, match=text):
        starts_of(RunDirectory(tmp_path / "runs" / "recorded"), [])
    with pytest.raises(ValueError, match=text):
        choose(RunDirectory(tmp_path / "runs" / "recorded"), 7)
