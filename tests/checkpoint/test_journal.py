"""Files of the journal that a resume uses: damaged ones, other settings, other checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

import pytest

from megarl.atomic_files import DiskFullError
from megarl.checkpoint import kept_batches
from megarl.checkpoint.journal import Journal
from megarl.checkpoint.next_commands import after_interruption
from megarl.commands.train_with_restarts import resumable_step
from megarl.errors import NotHereError, RecipeError
from megarl.observe.run_dir import RunDirectory
from megarl.preflight.recipe.train import journal_errors
from megarl.recipe.schema import Recipe
from tests.support import journalled_run
from tests.support.journalled_run import STEPS, Death, notices, numbers, recipe_of
from tests.support.mortal_controller import Change, change_of, check_end, killed_after, make_mortal, session


@pytest.fixture(autouse=True)
def _mortal(monkeypatch: pytest.MonkeyPatch) -> None:
    make_mortal(monkeypatch)


@pytest.mark.parametrize("name", ["controller.json", "waiting.npz", "manifest.json", "groups.json", "vectors.npz"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "deleted"])
def test_what_is_damaged_is_named_and_the_rest_is_used(name: str, damage: str, tmp_path: Path) -> None:
    """The newest state or the newest batch is damaged: the resume goes on after the step before."""
    recipe = recipe_of(tmp_path / "a")
    expected = session(recipe, Death())
    assert expected is not None
    lines = numbers(recipe)
    recipe = recipe_of(tmp_path / "b")
    killed_after(recipe, 5)
    kept = "batches" if name in ("groups.json", "vectors.npz") else "journal"
    path = Path(recipe.runs_dir) / "run" / kept / "step_000005" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    if damage != "deleted":
        path.write_bytes(data if damage == "flipped" else data[: len(data) // 2])
    if (name, damage) == ("manifest.json", "flipped"):
        path.write_bytes(b"{]")
    again = Death()
    run = session(recipe, again)
    check_end(recipe, run, expected, lines, name)
    assert again.points.count("after take") == 3, "steps 5 to 7"
    (text,) = [text for text in notices(recipe) if text.startswith("the journal of step 5")]
    assert name in text and "skipped" in text


def test_without_a_whole_state_the_run_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    killed_after(recipe, 5)
    for path in (tmp_path / "run" / "journal").iterdir():
        (path / "controller.json").write_bytes(b"")
    again = Death()
    assert session(recipe, again) is not None and again.points.count("after take") == 4
    assert any(text.startswith("resumed after step 3 from") for text in notices(recipe))
    assert [line["step"] for line in numbers(recipe)] == [0, *range(1, STEPS + 1)]


def test_a_batch_before_a_whole_one_is_missed(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    killed_after(recipe, 5)
    shutil.rmtree(tmp_path / "run" / "batches" / "step_000004")
    again = Death()
    assert session(recipe, again) is not None and again.points.count("after take") == 4
    skipped = [text for text in notices(recipe) if "the batch of step 4 is missing. A complete checkpoint" in text]
    assert len(skipped) == 2, "of both states"


@pytest.mark.parametrize(
    ("key", "value", "used"),
    [
        ("actor.optimizer.lr", 0.5, False),
        ("algorithm.clip_high", 0.3, False),
        ("train.steps", 9, False),
        ("rollout.temperature", 0.5, False),
        ("actor.max_tokens_per_micro_batch", 100, True),
        ("megatron.tensor_parallel", 2, True),
        ("rollout.engines", 3, True),
        ("train.save_every", 2, True),
    ],
)
def test_other_settings_of_the_training_leave_the_journal_out(key: str, value: Any, used: bool, tmp_path: Path) -> None:
    killed_after(recipe_of(tmp_path), 5)
    changed, again = recipe_of(tmp_path, change_of(key, value)), Death()
    assert session(changed, again) is not None
    assert again.points.count("after take") == changed.train.steps - (5 if used else 3)
    refusals = [text for text in notices(changed) if text.startswith("the journal of step 5 is not used")]
    assert refusals == [] if used else len(refusals) == 1 and key in refusals[0] and str(value) in refusals[0]


def test_steps_that_are_trained_again_in_another_layout_name_it(tmp_path: Path) -> None:
    """Norms that differ slightly are rounding, since the layout has changed, also two starts ago; large differences are a warning."""

    run = RunDirectory(tmp_path / "run")

    def recipe_with(trainers: int) -> Recipe:
        def change(recipe: Recipe) -> None:
            recipe.cluster.trainers, recipe.train.save_every, recipe.model.dtype = trainers, 50, "float32"

        return recipe_of(tmp_path, change)

    def scale_norms(factor: float) -> None:
        lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
        for line in lines:
            line["actor/grad_norm"] = line.get("actor/grad_norm", 1.0) * factor
        run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    def newest_notice() -> tuple[str, str]:
        lines = [json.loads(line) for line in run.notices.read_text().splitlines()]
        return [(line["level"], line["text"]) for line in lines if line["text"].startswith("resumed")][-1]

    killed_after(recipe_with(2), 3)
    scale_norms(1 + 1e-6)
    killed_after(recipe_with(1), 0)
    level, text = newest_notice()
    assert level == "notice" and text.endswith(
        "%: rounding, as from a layout that has changed (cluster.trainers 2 -> 1)"
    )
    scale_norms(1.5)
    assert session(recipe_with(1), Death()) is not None
    level, text = newest_notice()
    assert level == "warning" and "(cluster.trainers 2 -> 1) stays below 0.1 % in float32" in text


def test_another_identity_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before the first checkpoint: the journal holds the position in other data."""
    recipe = recipe_of(tmp_path)
    killed_after(recipe, 2)
    monkeypatch.setitem(cast(Any, journalled_run.IDENTITY), "train.seed", 1)
    with pytest.raises(RecipeError, match=r"journal/step_000002 was written with 0"):
        session(recipe, Death())


def test_a_named_checkpoint_of_the_run_leaves_the_journal_out(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    killed_after(recipe, 5)
    recipe.train.resume = str(tmp_path / "run" / "checkpoints" / "step_000003")
    again = Death()
    assert session(recipe, again) is not None and again.points.count("after take") == 4
    assert "the journal is not used, since train.resume names a checkpoint" in notices(recipe)


def test_the_journal_after_a_checkpoint_of_another_run(tmp_path: Path) -> None:
    """The same command goes on after the journal. `train.resume: auto` would start from the beginning: it is refused."""
    other = recipe_of(tmp_path / "other")
    killed_after(other, 4)
    checkpoint = tmp_path / "other" / "run" / "checkpoints" / "step_000003"

    def change(recipe: Recipe) -> None:
        recipe.train.resume, recipe.train.save_every = str(checkpoint), 50

    recipe = recipe_of(tmp_path / "mine", change)
    killed_after(recipe, 1)  # the first line that it writes is of step 4
    again = Death()
    shutil.copytree(tmp_path / "mine", tmp_path / "auto")
    assert session(recipe, again) is not None
    batches_sampled = again.points.count("after take")
    assert batches_sampled < 4 and [line["step"] for line in numbers(recipe)] == [4, 5, 6, 7]
    recipe = recipe_of(tmp_path / "auto", change_of("train.save_every", 50))
    with pytest.raises(NotHereError, match=f"(?s)its journal begins at {checkpoint}.*or name it in train.resume"):
        session(recipe, Death())


def test_without_the_journal_its_files_are_deleted(tmp_path: Path) -> None:
    killed_after(recipe_of(tmp_path), 5)
    recipe, again = recipe_of(tmp_path, change_of("train.journal", False)), Death()

    def look(place: str) -> None:
        again(place)
        assert not (tmp_path / "run" / "journal").exists() and not (tmp_path / "run" / "batches").exists()

    assert session(recipe, cast(Any, look)) is not None and again.points.count("after take") == 4
    assert "the journal up to step 5 is not used, and training deletes it, since train.journal is false" in notices(
        recipe
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_of("train.save_every", 0), "writes none"),
        (change_of("train.source", "sft"), "samples nothing"),
        (change_of("train.source", "preferences"), "samples nothing"),
    ],
)
def test_recipes_without_a_use_of_the_journal_are_refused(change: Change, words: str, tmp_path: Path) -> None:
    (error,) = journal_errors(recipe_of(tmp_path, change).train)
    assert words in str(error) and error.key == "train.journal"
    assert not list(journal_errors(recipe_of(tmp_path).train))


def test_the_last_words_of_a_run_name_the_journal(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    killed_after(recipe, 5)
    (_, line) = after_interruption(recipe, RunDirectory(tmp_path / "run"))
    assert line == (
        "The journal has the steps up to 5 (train.journal). Go on after it: the same command, which trains the steps since the "
        "checkpoint of step 3 again without sampling."
    )


def test_restarts_count_steps_of_the_journal_as_progress(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    run = RunDirectory(tmp_path / "run")
    assert resumable_step(run.checkpoints, run.journal) is None
    killed_after(recipe, 2)
    assert resumable_step(run.checkpoints, run.journal) == 2 and resumable_step(run.checkpoints, None) is None
    assert session(recipe, Death()) is not None
    assert resumable_step(run.checkpoints, run.journal) == STEPS


def test_a_state_is_written_after_its_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a resume after a power cut would find the state alone."""

    def full(*args: Any) -> None:
        raise DiskFullError("the disk is full")

    monkeypatch.setattr(kept_batches, "write_manifest", full)
    batches = kept_batches.KeptBatches(tmp_path / "batches", durable=True)
    journal = Journal(tmp_path / "journal", batches, {}, None, str)
    batches.keep(1, [])
    with pytest.raises(DiskFullError, match="the disk is full"):
        journal.write(1, {"source": {"gathered": []}}, None)
    assert not (tmp_path / "journal").exists() and not list((tmp_path / "batches").iterdir())
