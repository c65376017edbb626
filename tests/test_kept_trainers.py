"""Trainers that outlive a controller which dies at any moment take the run to the end of a run that was not disturbed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from megarl.recipe.schema import Recipe
from tests.support.journalled_run import Death, RememberingWorkers, notices, numbers, recipe_of
from tests.support.mortal_controller import Change, ahead, check_end, make_mortal, session
from tests.support.slow import slow_except
from tests.test_journal import with_rollbacks, word_of


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


PLACES = (  # at which the controller dies
    "after take", "before update_actor", "after update_actor", "before hold", "after hold", "after commit", "after write",
    "after the update of the engines",
)  # fmt: skip


def deaths(points: list[str]) -> list[Death]:
    """Return deaths at a late call of each of `PLACES`, or at all calls."""
    if "MEGARL_ALL_DEATHS" in os.environ:
        return [Death(number) for number in range(len(points))]
    return [Death(points.count(place) * 2 // 3, place) for place in PLACES]


@pytest.mark.parametrize("kind", slow_except({"one step ahead", "rollback"}.__contains__, KINDS))
def test_a_death_changes_no_number(kind: str, tmp_path: Path) -> None:
    """Trainers go on, load the checkpoint, or start again. MEGARL_ALL_DEATHS: at any call."""
    recipe, alive, word = kept_recipe(tmp_path / "undisturbed", kind), Death(), word_of(kind)
    expected = session(recipe, alive, word=word)
    assert expected is not None
    lines = numbers(recipe)
    ways = set()
    for number, death in enumerate(deaths(alive.points)):
        recipe, fleet = kept_recipe(tmp_path / str(number), kind), Fleet()
        run = session(recipe, death, word=word, starts=fleet.starts)
        if run is None and fleet.workers is not None:
            again = Death()
            run = session(recipe, again, word=word, starts=fleet.starts, outlived=fleet.workers)
            went_on = any("outlived the controller" in text for text in notices(recipe))
            ways.add("went on" if went_on else "loaded" if fleet.started == 1 else "started")
            if went_on:
                resumed = again.points[: again.points.index("before hold")]
                assert not {"before load", "before update_actor"} & {*resumed}, "nothing is loaded or trained"
                assert fleet.started == 1
        check_end(recipe, run, expected, lines, (number, death.points[-1]))
        shutil.rmtree(tmp_path / str(number))
    assert ways == {"went on", "loaded" if kind == "without refresh" else "started"}


def test_trainers_that_are_an_update_ahead_do_not_go_on(tmp_path: Path) -> None:
    """The controller dies after the update of step 5, before the journal has it."""
    recipe = kept_recipe(tmp_path / "undisturbed", "without refresh")
    expected = session(recipe, Death())
    killed, fleet, death = kept_recipe(tmp_path / "killed", "without refresh"), Fleet(), Death(4, "after update_actor")
    assert expected is not None and session(killed, death, starts=fleet.starts) is None
    assert fleet.workers is not None and fleet.workers.held is None and len(fleet.workers.weights) == 5
    run = session(killed, Death(), starts=fleet.starts, outlived=fleet.workers)
    check_end(killed, run, expected, numbers(recipe), "update 5")
    assert fleet.started == 1 and any("from the checkpoint of step 3; step" in text for text in notices(killed))
