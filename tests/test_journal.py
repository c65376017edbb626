"""A controller that dies at any moment and starts again takes the run to the end of a run that was not disturbed."""

from __future__ import annotations

import functools
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from megarl.assembly import Run
from megarl.checkpoint import journal, kept_batches
from megarl.checkpoint.folder import checkpoint_name
from megarl.checkpoint.next_commands import after_interruption
from megarl.cluster.failures import Failure, ProcessInfo, WorkerFailed
from megarl.commands.train_with_restarts import resumable_step
from megarl.errors import RecipeError
from megarl.observe.log import RunLog
from megarl.observe.metrics import MetricsLog, read_metrics
from megarl.observe.run_dir import RunDirectory
from megarl.preflight.recipe.recovery import journal_errors
from megarl.recipe.load import to_yaml
from megarl.recipe.schema import Recipe
from megarl.rollout.source_engines import EnginesSource
from tests.support import journalled_run
from tests.support.journalled_run import (
    PROMPTS,
    STEPS,
    Death,
    Killed,
    digest,
    notices,
    numbers,
    recipe_of,
    run_session,
)

Change = Callable[[Recipe], None]
current = Death()  # of the session that runs

# Functions before and after which the controller may die, besides those of the stand-ins.
MORTAL = [
    (EnginesSource, "admit"), (EnginesSource, "take"), (EnginesSource, "drain"), (EnginesSource, "state"),
    (MetricsLog, "write"), (MetricsLog, "merge"), (RunLog, "samples"), (journal, "begin"), (journal, "commit"),
    (journal, "retain"), (journal.Journal, "forget_through"), (kept_batches.KeptBatches, "forget_through"),
    (kept_batches.KeptBatches, "wait"), (kept_batches, "write_manifest"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _mortal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def mortal(function: Any, name: str) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            current(f"before {name}")
            result = function(*args, **kwargs)
            current(f"after {name}")
            return result

        return wrapped

    @functools.cache
    def yaml_of(text: str) -> str:
        return to_yaml(recipes[text])

    def cached_yaml(recipe: Recipe) -> str:  # it takes longer than the run
        recipes[repr(recipe)] = recipe
        return yaml_of(repr(recipe))

    recipes = dict[str, Recipe]()
    monkeypatch.setattr("megarl.observe.log.to_yaml", cached_yaml)
    monkeypatch.setattr("megarl.preflight.run_directory.to_yaml", cached_yaml)
    for place, name in MORTAL:
        monkeypatch.setattr(place, name, mortal(getattr(place, name), name))
    yield


def session(recipe: Recipe, death: Death, **more: Any) -> Run | None:
    """Run until `death`; returns the run if it lives to the end."""
    global current
    current = death
    try:
        return run_session(recipe, death, **more)
    except Killed:
        return None


def end_of(run: Run) -> tuple[Any, ...]:
    """Return what must equal at the end of a run, besides its metrics."""
    norms = run.skipped.norms["actor"].state()
    return (
        digest(weights(run)),
        run.kl_weight.value,
        norms,
        run.skipped.streaks(),
        cast(Any, run.source).admission.state,
    )


def weights(run: Run) -> list[Any]:
    return cast(Any, run.actor.workers).weights


def synchronous(recipe: Recipe) -> None: ...


def ahead(recipe: Recipe) -> None:
    recipe.cluster.placement, recipe.rollout.max_staleness, recipe.rollout.at_update = "disaggregated", 1, "drain"


def in_background(recipe: Recipe) -> None:
    recipe.train.save_in_background = True


def with_rollbacks(recipe: Recipe) -> None:
    train = recipe.train
    train.on_spike, train.spikes_before_rollback, train.save_every, train.stop_after_skipped = "rollback", 1, 2, 0


KINDS: dict[str, Change] = {
    "synchronous": synchronous,
    "one step ahead": ahead,
    "background": in_background,
    "rollback": with_rollbacks,
}


def word_of(kind: str) -> Callable[[int], str]:
    """The groups of steps 4 and 5 break the update. With rollbacks, one of step 5 causes a spike."""
    if kind == "rollback":
        return lambda number: "spike" if number == 8 else "answer"
    return lambda number: "broken" if number in (6, 9) else "answer"


def check_end(recipe: Recipe, run: Run | None, expected: Run, lines: list[Any], place: Any) -> None:
    """Check that a run which was killed at `place` has ended as the `expected` one, with its `lines` of metrics."""
    assert run is not None and numbers(recipe) == lines, place
    assert end_of(run) == end_of(expected), place
    folder = Path(recipe.runs_dir) / "run"
    assert not (folder / "journal").exists() and not (folder / "batches").exists()
    assert max(path.name for path in (folder / "checkpoints").glob("step_*")) == checkpoint_name(STEPS), place


@pytest.mark.parametrize("kind", KINDS)
def test_a_death_at_any_call_changes_no_number(kind: str, tmp_path: Path) -> None:
    """MEGARL_ALL_DEATHS: try all calls instead of every ninth."""
    recipe, alive = recipe_of(tmp_path / "undisturbed", KINDS[kind]), Death()
    expected = session(recipe, alive, word=word_of(kind))
    assert expected is not None
    lines, points = numbers(recipe), alive.points
    assert [line["step"] for line in lines] == [0, *range(1, STEPS + 1)] and len(points) > 150
    stride = 1 if "MEGARL_ALL_DEATHS" in os.environ else 9
    for number in range([*KINDS].index(kind), len(points), stride):
        recipe = recipe_of(tmp_path / str(number), KINDS[kind])
        killed, again = Death(number), Death()
        run = session(recipe, killed, word=word_of(kind))
        if run is None:
            run = session(recipe, again, word=word_of(kind))
            taken = killed.points.count("after take") + again.points.count("after take")
            assert taken <= STEPS + 1, "more than the batch that was being sampled or trained was sampled again"
        check_end(recipe, run, expected, lines, (number, points[number]))
        shutil.rmtree(tmp_path / str(number))


@pytest.mark.parametrize("seed", range(6))
def test_a_controller_that_dies_again_and_again(seed: int, tmp_path: Path) -> None:
    """Deaths while it resumes, too. Every other seed deletes half a file that was being written."""
    kind = [*KINDS][seed % 3]
    recipe = recipe_of(tmp_path / "undisturbed", KINDS[kind])
    expected = session(recipe, Death(), word=word_of(kind))
    assert expected is not None
    lines, choose = numbers(recipe), random.Random(seed)
    recipe = recipe_of(tmp_path / "killed", KINDS[kind])
    deaths = 0
    while (run := session(recipe, Death(choose.randrange(20, 150)), word=word_of(kind))) is None:
        deaths += 1
        assert deaths < 100
        if seed % 2:
            tear_newest(Path(recipe.runs_dir) / "run", choose)
    check_end(recipe, run, expected, lines, deaths)
    assert deaths >= 3


def tear_newest(folder: Path, choose: random.Random) -> None:
    """Cut off a file of the newest state of the journal, or of the newest batch."""
    files = [path for path in (folder / choose.choice(["journal", "batches"])).glob("step_*/*")]
    if files:
        newest = max(path.parent for path in files)
        path = choose.choice([path for path in files if path.parent == newest])
        path.write_bytes(path.read_bytes()[:-7])


def killed_after(recipe: Recipe, step: int) -> None:
    """Run until the metrics of `step` are written."""

    def kill(place: str) -> None:
        written.append(place)
        if written.count("after write") == step + 1:  # of step 0, too
            raise Killed

    written = list[str]()
    assert session(recipe, cast(Any, kill)) is None


def test_a_resume_says_what_it_trains_again(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    killed_after(recipe, 5)
    folder = tmp_path / "run"
    assert [path.name for path in sorted((folder / "batches").iterdir())] == ["step_000004", "step_000005"]
    assert [path.name for path in sorted((folder / "journal").iterdir())] == ["step_000004", "step_000005"]
    again = Death()
    assert session(recipe, again) is not None
    assert again.points.count("after take") == 2 and again.points.count("after update_actor") == 4
    text = next(text for text in notices(recipe) if text.startswith("resumed"))
    assert text.startswith(
        "resumed after step 5 from the journal: the trainers have the weights after step 5 again, in "
    )
    assert text.endswith(
        "from the checkpoint of step 3; steps 4 to 5 were trained again on their batches, with the same gradient norms"
    )
    assert any("recovery/retrained_steps" in line for line in read_metrics(folder / "metrics.jsonl"))


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
    skipped = [text for text in notices(recipe) if "the batch of step 4 is damaged: manifest.json is missing" in text]
    assert len(skipped) == 2, "of both states"


def change_of(key: str, value: Any) -> Change:
    def change(recipe: Recipe) -> None:
        section, _, name = key.rpartition(".")
        setattr(functools.reduce(getattr, section.split("."), recipe), name, value)

    return change


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
    said = [text for text in notices(changed) if text.startswith("the journal of step 5 is not used")]
    assert said == [] if used else len(said) == 1 and key in said[0] and str(value) in said[0]


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
    """The same command goes on after the journal. `train.resume: auto` would start from the beginning: the notice says so."""
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
    taken = again.points.count("after take")
    assert taken < 4 and [line["step"] for line in numbers(recipe)] == [4, 5, 6, 7]
    recipe = recipe_of(tmp_path / "auto", change_of("train.save_every", 50))
    assert session(recipe, Death()) is not None
    assert any("not used, since it begins at" in text and str(checkpoint) in text for text in notices(recipe))


def test_without_the_journal_its_files_are_deleted(tmp_path: Path) -> None:
    killed_after(recipe_of(tmp_path), 5)
    recipe, again = recipe_of(tmp_path, change_of("train.journal", False)), Death()

    def look(place: str) -> None:
        again(place)
        assert not (tmp_path / "run" / "journal").exists() and not (tmp_path / "run" / "batches").exists()

    assert session(recipe, cast(Any, look)) is not None and again.points.count("after take") == 4


def test_trainers_that_die_after_a_resume_find_the_batches_of_both_sessions(tmp_path: Path) -> None:
    def change(recipe: Recipe) -> None:
        recipe.train.trainer_restarts, recipe.train.save_every = 1, 50

    recipe = recipe_of(tmp_path / "a", change)
    expected = session(recipe, Death())
    assert expected is not None
    lines = numbers(recipe)
    recipe = recipe_of(tmp_path / "b", change)
    killed_after(recipe, 4)
    checks = list[None]()

    def failures() -> WorkerFailed | None:
        checks.append(None)
        return WorkerFailed(Failure.death(ProcessInfo("trainer rank 0"), "killed")) if len(checks) == 9 else None

    check_end(recipe, session(recipe, Death(), failures=failures), expected, lines, "trainers")
    assert any(
        "from the starting model; steps 1 to" in text for text in notices(recipe) if text.startswith("the trainers")
    )


@pytest.mark.parametrize("rule", ["refresh", "keep", "finish"])
def test_no_group_is_lost_or_doubled_while_requests_go_on(rule: str, tmp_path: Path) -> None:
    """With these rules the numbers depend on time. Each group is trained on once, in a run that dies five times."""

    def change(recipe: Recipe) -> None:
        ahead(recipe)
        recipe.rollout.at_update, recipe.evaluation.every, recipe.train.save_every = rule, 0, 4

    recipe, choose, deaths = recipe_of(tmp_path, change), random.Random(rule), 0
    while (run := session(recipe, Death(choose.randrange(20, 60) if deaths < 5 else None))) is None:
        deaths += 1
    assert deaths >= 3
    texts = [text for each in weights(run) if each[0] == "update" for text in each[1]]
    groups = [int(text.split()[1].split(".")[0]) for text in texts]
    assert sorted(groups) == sorted([*range(STEPS * PROMPTS)] * 2), groups
    assert [line["step"] for line in numbers(recipe)] == [0, *range(1, STEPS + 1)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_of("train.save_every", 0), "writes none"),
        (change_of("train.source", "sft"), "samples nothing"),
        (change_of("train.source", "preferences"), "samples nothing"),
    ],
)
def test_recipes_without_a_use_of_the_journal_are_refused(change: Change, words: str, tmp_path: Path) -> None:
    (error,) = journal_errors(recipe_of(tmp_path, change))
    assert words in str(error) and error.key == "train.journal"
    assert not list(journal_errors(recipe_of(tmp_path)))


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
