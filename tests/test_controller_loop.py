"""The loop over stand-ins for trainers, engines and saver: when it stops, what it saves, what it lets go of."""

from __future__ import annotations

import gc
import math
import weakref
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint import checkpoint_name
from megarl.config.schema import Recipe
from megarl.controller import Controller, Layout
from megarl.critic import Critic
from megarl.observe.log import RunLog
from megarl.placement import TrainersOnly
from megarl.rollout.source import Batch
from megarl.types import Group, InlineData, Sample, SampleTokens


class Workers:
    """Trainers whose gradient norm in step s is ``norms[s - 1]``, and 1 after that."""

    size = 1

    def __init__(self, role: str, norms: list[float]) -> None:
        self.role, self.norms = role, iter(norms)

    def call(self, method: str, *args: Any) -> list[Any]:
        if method not in ("update_actor", "update_critic"):
            return [None]
        norm = next(self.norms, 1.0)
        skipped = float(not math.isfinite(norm))
        step = {f"{self.role}/grad_norm": norm, f"{self.role}/lr": 0.1, f"{self.role}/skipped_updates": skipped}
        return [None, [{**step, "perf/max_memory_allocated_gb": 1.0}]]

    def scatter(self, method: str, per_rank: list[tuple[Any, ...]]) -> list[Any]:
        return [None]

    def scatter_with_data(self, method: str, per_rank: list[Any], parts: int) -> list[Any]:
        return [(None, [InlineData([])] * parts)]


class Source:
    """Batches of one group, none in the steps of ``without``. Remembers their vectors weakly."""

    def __init__(self, without: tuple[int, ...] = ()) -> None:
        self.without, self.taken, self.alive = without, 0, lambda: None

    def take(self, count: int) -> Batch:
        self.taken += 1
        if self.taken in self.without:
            return Batch([])
        data = InlineData([SampleTokens(None, None, None)] * 2)  # type: ignore[arg-type]
        self.alive = weakref.ref(data)
        samples = [Sample(self.taken, i, data, 2, 3, 3, reward=i) for i in range(2)]
        return Batch([Group(self.taken, "row", "test", 0, samples)])

    def admit(self, version: int) -> None:
        assert self.alive() is None, "the last batch is still held when the next is sampled"

    def drain(self) -> None:
        gc.collect()
        assert self.alive() is None, "the batch is still held when weights are exchanged, and it is evaluated"

    def state(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


class Saver:
    """Saves a folder with nothing in it, and keeps two."""

    pending = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, step: int, state: dict[str, Any]) -> dict[str, float]:
        (self.folder / checkpoint_name(step)).mkdir(parents=True)
        for old in sorted(self.folder.iterdir())[:-2]:
            old.rmdir()
        return {}

    def finish(self) -> None: ...

    def rescue(self, *, wait: bool) -> None: ...


@pytest.fixture
def recipe() -> Recipe:
    recipe = Recipe()
    recipe.train.steps, recipe.train.save_every, recipe.train.stop_after_skipped = 8, 1, 3
    recipe.data.prompts_per_step, recipe.rollout.samples_per_prompt = 1, 2
    recipe.observe.console, recipe.observe.samples_per_step = "plain", 0
    recipe.observe.tensorboard = recipe.observe.report = False
    return recipe


def fit(
    recipe: Recipe,
    folder: Path,
    actor: list[float],
    *,
    critic: list[float] | None = None,
    without: tuple[int, ...] = (),
) -> int:
    """Run to the end; how many steps were taken."""
    source, workers = Source(without), Workers("critic", critic or [])
    parts: dict[str, Any] = {
        "trainers": Workers("actor", actor),
        "critic": Critic(recipe, workers, [0], 1, [True], None) if critic is not None else None,
        "source": source,
        "saver": Saver(folder / "checkpoints"),
        "tokenizer": None,
    }
    with RunLog(recipe, folder, 1, recipe.train.steps) as log:
        layout = Layout([0], [True], 1, 1, 1, None, None)
        made = Controller(
            recipe=recipe, layout=layout, placement=TrainersOnly(), log=log, evaluate=None, identity={}, **parts
        )
        made.fit()
    return source.taken


NAN = math.nan


def test_a_run_whose_updates_are_all_skipped_stops_and_names_the_way_back(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as raised:
        fit(recipe, tmp_path, [1.0, 1.0, 1.0, NAN, NAN, math.inf, 1.0])
    text = str(raised.value)
    for words in (
        "in 3 steps in a row, 4 to 6", "actor/skipped_updates", "actor/grad_norm was nan (2 of them)",
        "actor/grad_norm was inf (1 of them)", f"train.resume={tmp_path}/checkpoints/step_000002", "stop_after_skipped=0",
    ):  # fmt: skip
        assert words in text, (words, text)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step_000002", "step_000003"], "a checkpoint of the same weights took a better one's place"
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 6, "the last step has its line"
    assert "no weight has changed" in (tmp_path / "notices.jsonl").read_text()


def test_an_update_between_begins_the_count_anew(recipe: Recipe, tmp_path: Path) -> None:
    assert fit(recipe, tmp_path, [NAN, NAN, 1.0, NAN, NAN, 1.0, NAN, NAN]) == 8


def test_steps_without_a_group_count_too(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(
        RuntimeError, match=r"2 to 4.*grad_norm was nan \(1 of them\), no group with spread.*\(2 of them"
    ):
        fit(recipe, tmp_path, [1.0, NAN], without=(3, 4))
    assert "There is one checkpoint of before" in (tmp_path / "summary.json").read_text(), (
        "its weights are not known good"
    )


def test_zero_never_stops(recipe: Recipe, tmp_path: Path) -> None:
    recipe.train.stop_after_skipped = 0
    assert fit(recipe, tmp_path, [NAN] * 8) == 8
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_000007", "step_000008"]


def test_a_critic_that_learns_nothing_stops_the_run(recipe: Recipe, tmp_path: Path) -> None:
    """Also while it alone learns. What it was given is let go before the next batch is sampled: see `Source.admit`."""
    recipe.algorithm.advantage, recipe.critic.warmup_steps = "gae", 2
    with pytest.raises(RuntimeError, match=r"1 to 3: every update of the critic.*critic/grad_norm was nan"):
        fit(recipe, tmp_path, [], critic=[NAN] * 8)
