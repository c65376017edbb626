"""Sessions of a stand-in run (`journalled_run`) in which the controller dies at a chosen call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from megarl.assembly import Run
from megarl.checkpoint import journal, kept_batches
from megarl.checkpoint.folder import checkpoint_name
from megarl.observe.log import RunLog
from megarl.observe.metrics import MetricsLog
from megarl.recipe.schema import Recipe
from megarl.recipe.text import to_yaml
from megarl.rollout.source_engines import EnginesSource
from tests.support.journalled_run import STEPS, Death, Killed, digest, numbers, run_session

Change = Callable[[Recipe], None]
current = Death()  # of the session that runs

# Functions before and after which the controller may die, besides the stand-ins'.
MORTAL = [
    (EnginesSource, "admit"), (EnginesSource, "take"), (EnginesSource, "drain"), (EnginesSource, "state"),
    (MetricsLog, "write"), (MetricsLog, "merge"), (RunLog, "samples"), (journal, "begin"), (journal, "commit"),
    (journal, "retain"), (journal.Journal, "forget_through"), (kept_batches.KeptBatches, "forget_through"),
    (kept_batches.KeptBatches, "wait"), (kept_batches, "write_manifest"),
]  # fmt: skip


def make_mortal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the controller die at the calls of `MORTAL`, when the session's `Death` says so."""

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
    for place, name in MORTAL:
        monkeypatch.setattr(place, name, mortal(getattr(place, name), name))


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


def ahead(recipe: Recipe) -> None:
    recipe.cluster.placement, recipe.rollout.max_staleness, recipe.rollout.at_update = "disaggregated", 1, "drain"


def check_end(recipe: Recipe, run: Run | None, expected: Run, lines: list[Any], place: Any) -> None:
    """Check that a run which was killed at `place` has ended as the `expected` one, with its `lines` of metrics."""
    assert run is not None and numbers(recipe) == lines, place
    assert end_of(run) == end_of(expected), place
    folder = Path(recipe.runs_dir) / "run"
    assert not (folder / "journal").exists() and not (folder / "batches").exists()
    assert max(path.name for path in (folder / "checkpoints").glob("step_*")) == checkpoint_name(STEPS), place


def killed_after(recipe: Recipe, step: int) -> None:
    """Run until the metrics of `step` are written."""

    def kill(place: str) -> None:
        written.append(place)
        if written.count("after write") == step + 1:  # of step 0, too
            raise Killed

    written = list[str]()
    assert session(recipe, cast(Any, kill)) is None


def change_of(key: str, value: Any) -> Change:
    def change(recipe: Recipe) -> None:
        section, _, name = key.rpartition(".")
        setattr(functools.reduce(getattr, section.split("."), recipe), name, value)

    return change
