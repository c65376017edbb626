"""`cluster.elastic`: starts that may take a smaller layout, their wait for devices, and their messages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.cluster.device_map import Machines
from megarl.errors import NotHereError, RecipeError
from megarl.observe import restarts
from megarl.preflight import elastic
from megarl.preflight.elastic import fit_to_devices, least_devices, may_shrink
from megarl.recipe.schema import Recipe

Looks = Callable[[list[Machines | None]], list[float]]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """A recipe of 4 trainers and 4 engines of a run with a checkpoint."""
    for name in (restarts.AFTER, "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    recipe = Recipe(runs_dir=str(tmp_path))
    recipe.cluster.elastic, recipe.cluster.placement, recipe.cluster.device = True, "disaggregated", "cuda"
    recipe.cluster.trainers, recipe.rollout.engines, recipe.train.resume = 4, 4, "auto"
    (tmp_path / "run" / "checkpoints" / "step_000003").mkdir(parents=True)
    return recipe


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    """Simulate what the cluster has at each look, and return the seconds between the looks."""

    def simulate(machines: list[Machines | None], *, may_join: bool = True) -> list[float]:
        now, waits, left = [0.0], list[float](), list(machines)

        @contextlib.contextmanager
        def watching(cluster: Any, kind: Any) -> Iterator[Any]:
            yield (lambda: left.pop(0) if len(left) > 1 else left[0]), may_join

        def sleep(seconds: float) -> None:
            now[0] += seconds
            waits.append(seconds)

        monkeypatch.setattr(elastic, "watching_devices", watching)
        monkeypatch.setattr(elastic.time, "monotonic", lambda: now[0])
        monkeypatch.setattr(elastic.time, "sleep", sleep)
        return waits

    return simulate


def test_only_a_run_that_goes_on_may_shrink(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert may_shrink(recipe)
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000003"
    checkpoint.rmdir()
    assert not may_shrink(recipe), "its first start"
    recipe.train.resume = str(checkpoint)
    assert may_shrink(recipe)
    recipe.train.resume = "auto"
    (tmp_path / "run" / "journal" / "step_000002").mkdir(parents=True)
    assert not may_shrink(recipe), "the journal is not used"
    recipe.train.journal = True
    assert may_shrink(recipe)
    recipe.train.journal = False
    monkeypatch.setenv(restarts.AFTER, "trainer rank 1 died")
    assert may_shrink(recipe), "it died before its first checkpoint"
    for section, name, value in (
        ("train", "replay", "runs/a"),
        ("train", "resume", "never"),
        ("cluster", "elastic", False),
    ):
        former = getattr(getattr(recipe, section), name)
        setattr(getattr(recipe, section), name, value)
        assert not may_shrink(recipe), name
        setattr(getattr(recipe, section), name, former)


def test_without_the_key_no_cluster_is_looked_at(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "watching_devices", None)
    recipe.cluster.elastic = False
    assert fit_to_devices(recipe) == (recipe, [])


@pytest.mark.parametrize("machines", [[("a", 4), ("b", 4)], [("a", 8), ("b", 8)], None])
def test_the_recipes_layout_is_taken_at_once_if_it_fits(
    machines: Machines | None, recipe: Recipe, looks: Looks
) -> None:
    waits = looks([machines])
    assert fit_to_devices(recipe) == (recipe, []) and not waits


def test_a_start_waits_for_machines_that_come_back(recipe: Recipe, looks: Looks, capsys: Any) -> None:
    waits = looks([[("a", 4)], [("a", 4)], [("a", 4), ("b", 4)]])
    assert fit_to_devices(recipe) == (recipe, []) and len(waits) == 2
    assert capsys.readouterr().err == (
        "waiting for devices, 60 s at most (cluster.elastic_wait): the recipe needs 8, and 4 are free (4 on a)\n"
    )


def test_a_machine_that_stays_away_leaves_a_smaller_layout(recipe: Recipe, looks: Looks) -> None:
    recipe.cluster.elastic_wait = 20.0
    waits = looks([[("a", 4), ("b", 1)]])
    smaller, (notice,) = fit_to_devices(recipe)
    assert sum(waits) == 20.0
    assert (smaller.cluster.trainers, smaller.rollout.engines) == (3, 2)
    assert (recipe.cluster.trainers, recipe.rollout.engines) == (4, 4)
    assert notice.startswith(
        "the recipe needs 8 devices, and 5 are free (4 on a, 1 on b): this start goes on with 3 trainers and 2 engines instead of "
        "4 trainers and 4 engines (cluster.elastic)."
    )
    assert "a larger part of the optimizer: see megarl plan RECIPE cluster.trainers=3 rollout.engines=2." in notice


def test_fewer_engines_alone_leave_the_trainers_memory_unmentioned(recipe: Recipe, looks: Looks) -> None:
    looks([[("a", 4), ("b", 3)]])
    smaller, (notice,) = fit_to_devices(recipe)
    assert (smaller.cluster.trainers, smaller.rollout.engines) == (4, 3) and "megarl plan" not in notice


def test_devices_of_this_machine_alone_are_not_waited_for(recipe: Recipe, looks: Callable[..., list[float]]) -> None:
    waits = looks([[("here", 2)]], may_join=False)
    smaller, _ = fit_to_devices(recipe)
    assert (smaller.cluster.trainers, smaller.rollout.engines) == (1, 1) and not waits


def test_cpus_are_counted_over_all_machines(recipe: Recipe, looks: Looks) -> None:
    """An engine of 4 tensor-parallel ranks fits in no machine, which only matters for devices."""
    recipe.rollout.tensor_parallel, recipe.rollout.engines = 4, 2
    looks([[("a", 3), ("b", 3)]])
    with pytest.raises(NotHereError):
        fit_to_devices(recipe)
    recipe.cluster.device = "cpu"
    smaller, _ = fit_to_devices(recipe)
    assert (smaller.cluster.trainers, smaller.rollout.engines) == (2, 1)


def test_too_few_devices_are_refused_with_the_arithmetic(recipe: Recipe, looks: Looks) -> None:
    recipe.megatron.tensor_parallel, recipe.rollout.min_engines = 2, 3
    assert least_devices(recipe) == 5
    looks([[("a", 3), ("b", 1)]])
    with pytest.raises(NotHereError) as caught:
        fit_to_devices(recipe)
    text = str(caught.value)
    for words in (
        "cluster.elastic = true",
        "the smallest layout needs 5 devices (1 replica of megatron.tensor_parallel x pipeline_parallel x context_parallel = "
        "2 x 1 x 1 = 2; rollout.engines x rollout.tensor_parallel = 3 x 1)",
        "4 are free (3 on a, 1 on b)",
        "lower rollout.min_engines, or lower the parallel sizes",
    ):
        assert words in text


def test_torchrun_is_refused(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RecipeError, match="fixed number of trainers"):
        fit_to_devices(recipe)
