"""Trainers that outlive a controller which dies at any moment take the run to the end of a run that was not disturbed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from megarl.recipe.schema import Recipe
from tests.support.journalled_run import Death, RememberingWorkers, notices, numbers, recipe_of
from tests.support.mortal_controller import Change, ahead, check_end, make_mortal, session
from tests.test_journal import in_background, with_rollbacks, word_of


@pytest.fixture(autouse=True)
def _mortal(monkeypatch: pytest.MonkeyPatch) -> None:
    make_mortal(monkeypatch)


def refreshing(recipe: Recipe) -> None: ...


def without_refresh(recipe: Recipe) -> None:
    recipe.algorithm.refresh_reference_every = 0


KINDS: dict[str, Change] = {
    "refreshing": refreshing,
    "without refresh": without_refresh,
    "one step ahead": ahead,
    "background": in_background,
    "rollback": with_rollbacks,
}


def kept_recipe(folder: Path, kind: str) -> Recipe:
    def change(recipe: Recipe) -> None:
        KINDS[kind](recipe)
        recipe.train.keep_workers = 60.0

    return recipe_of(folder, change)


class Fleet:
    """The trainers of a run: the ones that live, and how many have started."""

    def __init__(self) -> None:
        self.workers: RememberingWorkers | None = None
        self.started = 0

    def starts(self, workers: RememberingWorkers) -> None:
        self.started += workers is not self.workers
        self.workers = workers


@pytest.mark.parametrize("kind", KINDS)
def test_a_death_at_any_call_changes_no_number(kind: str, tmp_path: Path) -> None:
    """Trainers go on, load the checkpoint, or start again. MEGARL_ALL_DEATHS: try all calls instead of every seventh."""
    recipe, alive, word = kept_recipe(tmp_path / "undisturbed", kind), Death(), word_of(kind)
    expected = session(recipe, alive, word=word)
    assert expected is not None
    lines, points = numbers(recipe), alive.points
    went_on = loaded = started = 0
    stride = 1 if "MEGARL_ALL_DEATHS" in os.environ else 7
    for number in range([*KINDS].index(kind), len(points), stride):
        recipe, fleet = kept_recipe(tmp_path / str(number), kind), Fleet()
        run = session(recipe, Death(number), word=word, starts=fleet.starts)
        if run is None and fleet.workers is not None:
            again = Death()
            run = session(recipe, again, word=word, starts=fleet.starts, outlived=fleet.workers)
            resumed = [text for text in notices(recipe) if "outlived the controller" in text]
            went_on += bool(resumed)
            loaded += not resumed and fleet.started == 1
            started += fleet.started == 2
            if resumed:
                assert again.points.count("after update_actor") + again.points.count("after take") <= 2 * len(lines)
                first = again.points.index("before hold")
                assert not {"before load", "before update_actor"} & {*again.points[:first]}, (
                    "nothing is loaded or trained"
                )
        check_end(recipe, run, expected, lines, (number, points[number]))
        shutil.rmtree(tmp_path / str(number))
    assert went_on > 5 and started > 0
    assert (loaded == 0) == (kind != "without refresh"), (went_on, loaded, started)


def test_trainers_that_are_an_update_ahead_do_not_go_on(tmp_path: Path) -> None:
    """The controller dies after the update of step 5, before the journal has it."""
    recipe = kept_recipe(tmp_path / "undisturbed", "without refresh")
    alive = Death()
    expected = session(recipe, alive)
    updates = [number for number, place in enumerate(alive.points) if place == "after update_actor"]
    killed, fleet = kept_recipe(tmp_path / "killed", "without refresh"), Fleet()
    assert expected is not None and session(killed, Death(updates[4]), starts=fleet.starts) is None
    assert fleet.workers is not None and fleet.workers.held is None and len(fleet.workers.weights) == 5
    run = session(killed, Death(), starts=fleet.starts, outlived=fleet.workers)
    check_end(killed, run, expected, numbers(recipe), "update 5")
    assert fleet.started == 1 and any("from the checkpoint of step 3; step" in text for text in notices(killed))
