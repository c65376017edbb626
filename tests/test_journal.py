"""A controller that dies at any moment and starts again takes the run to the end of a run that was not disturbed."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from megarl.checkpoint.folder import list_checkpoints
from megarl.cluster.failures import Failure, ProcessInfo, WorkerFailed
from megarl.errors import NotHereError
from megarl.observe.metrics import read_metrics
from megarl.recipe.schema import Recipe
from tests.support.journalled_run import PROMPTS, STEPS, Death, Killed, notices, numbers, recipe_of
from tests.support.mortal_controller import (
    Change,
    ahead,
    change_of,
    check_end,
    killed_after,
    make_mortal,
    session,
    weights,
)
from tests.support.slow import slow_except


@pytest.fixture(autouse=True)
def _mortal(monkeypatch: pytest.MonkeyPatch) -> None:
    make_mortal(monkeypatch)


def synchronous(recipe: Recipe) -> None: ...


def in_background(recipe: Recipe) -> None:
    recipe.train.save_in_background = True


def with_rollbacks(recipe: Recipe) -> None:
    train = recipe.train
    train.on_spike, train.spikes_before_rollback, train.stop_after_skipped = "rollback", 2, 0


def filtered(recipe: Recipe) -> None:
    dynamic = recipe.algorithm.dynamic_sampling
    dynamic.enabled, dynamic.max_attempts = True, 1


KINDS: dict[str, Change] = {
    "synchronous": synchronous,
    "one step ahead": ahead,
    "background": in_background,
    "rollback": with_rollbacks,
    "rollback past a checkpoint": with_rollbacks,
    "filtered": filtered,
}


def word_of(kind: str) -> Callable[[int], str]:
    """The groups of steps 4 and 5 break the update. Others cause spikes in these steps or in steps 5 and 7, before and after a
    checkpoint, or have no spread from step 5 on."""
    if kind == "rollback past a checkpoint":
        return lambda number: "spike" if number in (8, 12) else "answer"
    if kind == "rollback":
        return lambda number: "spike" if number in (6, 8) else "answer"
    if kind == "filtered":
        return lambda number: "flat" if number >= 8 else "answer"
    return lambda number: "broken" if number in (6, 9) else "answer"


@pytest.mark.parametrize("kind", slow_except("rollback".__eq__, KINDS))
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
            sampled = killed.points.count("after take") + again.points.count("after take") - STEPS
            # After the checkpoint of step 6 nothing but it goes on to step 7. A death in the rollback past it samples steps 4 to 7 again.
            assert sampled <= (4 if kind == "rollback past a checkpoint" else 1), (number, points[number])
        check_end(recipe, run, expected, lines, (number, points[number]))
        shutil.rmtree(tmp_path / str(number))


@pytest.mark.parametrize("seed", slow_except(lambda seed: seed in (2, 3), range(6)))
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


def test_a_restart_stays_with_the_checkpoint_that_the_user_has_named(tmp_path: Path) -> None:
    """The first start dies before its trainers have loaded it. `train.restarts` then resumes with `auto`."""
    recipe = recipe_of(tmp_path)
    killed_after(recipe, 6)
    folder = tmp_path / "run" / "checkpoints"
    assert [path.name for path in list_checkpoints(folder)] == ["step_000003", "step_000006"]
    recipe.train.resume = str(folder / "step_000003")
    assert session(recipe, Death(0, "before load")) is None
    assert f"a later checkpoint, which this run abandons, is kept as {folder}/discarded/step_000006" in notices(recipe)
    recipe.train.resume, again = "auto", Death()
    assert session(recipe, again) is not None and again.points.count("after take") == STEPS - 3


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
    ("journal", "every", "sign"),
    [(True, 3, "its journal begins at .*step_000003"), (False, 2, "its last start saved every 2")],
)
def test_a_run_whose_checkpoints_are_gone_does_not_begin_again(
    journal: bool, every: int, sign: str, tmp_path: Path
) -> None:
    """Their file system may not be mounted. A start at step 1 would replace metrics, journal and samples."""

    def change(recipe: Recipe) -> None:
        recipe.train.journal, recipe.train.save_every = journal, every

    recipe = recipe_of(tmp_path, change)
    killed_after(recipe, 5)
    lines = numbers(recipe)
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "elsewhere")
    with pytest.raises(
        NotHereError, match=f"(?s)train.resume = 'auto'.*no checkpoint in .* can be used.*{sign}.*mounted"
    ):
        session(recipe, Death())
    assert numbers(recipe) == lines
    (tmp_path / "elsewhere").rename(tmp_path / "run" / "checkpoints")
    assert session(recipe, Death()) is not None


def test_a_run_without_checkpoints_begins_again(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, change_of("train.journal", False))
    killed_after(recipe, 2)
    assert session(recipe, Death()) is not None


def test_batches_of_a_lost_checkpoint_are_not_called_damaged(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, change_of("train.save_every", 2))
    killed_after(recipe, 5)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_000004")
    assert session(recipe, Death()) is not None
    (text,) = [text for text in notices(recipe) if text.startswith("the journal of step 5 is skipped")]
    assert "the batch of step 3 is missing. A complete checkpoint" in text and "damaged: " not in text


def test_a_step_whose_line_was_lost_keeps_its_seconds(tmp_path: Path) -> None:
    """The controller dies between the state of the journal and the line in the metrics."""
    recipe, points = recipe_of(tmp_path), list[str]()

    def slow_step(place: str) -> None:
        points.append(place)
        if points.count("after update_actor") == 5 and place == "after update_actor":
            time.sleep(0.5)
        if points.count("after commit") == 4:  # of steps 1, 2, 4 and 5: step 3 has a checkpoint
            raise Killed

    assert session(recipe, cast(Any, slow_step)) is None
    assert session(recipe, Death()) is not None
    seconds = {line["step"]: line["timing_s/step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")}
    assert 0.5 < seconds[5] < 5
