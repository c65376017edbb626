"""The rule for spikes: which gradient norms are compared, and with what; and its recipe keys."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from megarl.algorithms.spikes import FEWEST, GradNorms
from megarl.preflight.load import load_recipe
from megarl.recipe import RecipeError
from megarl.recipe.schema import TrainConfig


def norms_of(norms: list[float], **settings: Any) -> GradNorms:
    return GradNorms(TrainConfig(**{"on_spike": "skip", **settings}), norms)


def test_the_limit_is_a_multiple_of_the_median() -> None:
    """Worked by hand: eight norms of 1, nine of 3 and one of 500 have the median 3."""
    assert norms_of([1.0] * 8 + [3.0] * 9 + [500.0], spike_factor=4.0).limit == 12.0
    assert norms_of([1.0] * 8 + [2.0] * 8, spike_factor=10.0).limit == 15.0, (
        "an even number: the mean of the middle two"
    )


def test_no_update_is_a_spike_before_there_are_enough_norms() -> None:
    norms = norms_of([1.0] * (FEWEST - 1))
    assert norms.limit == math.inf
    norms.add(1.0)
    assert norms.limit == 10.0


def test_nothing_is_a_spike_without_the_key() -> None:
    assert norms_of([1.0] * 64, on_spike=None).limit == math.inf


def test_norms_of_zero_are_left_out() -> None:
    norms = norms_of([])
    for _ in range(20):
        norms.add(0.0)
        norms.add(2.0)
    assert len(norms) == 20 and norms.limit == 20.0


@pytest.mark.parametrize("seed", range(20))
def test_the_newest_norms_of_the_window_decide(seed: int) -> None:
    """The limit equals a list's, does not depend on the order within the window, and rises at most to the next norm of the list if a
    very large norm is added."""
    draw = random.Random(seed)
    window, factor = draw.randint(16, 40), draw.uniform(1.5, 20)
    values = [math.exp(draw.gauss(0, 1)) for _ in range(draw.randint(window, 120))]
    norms = norms_of([], spike_window=window, spike_factor=factor)
    for value in values:
        norms.add(value)
    newest = values[-window:]
    assert norms.state() == newest and norms.limit == factor * statistics.median(newest)
    shuffled = draw.sample(newest, window)
    assert norms_of(shuffled, spike_window=window, spike_factor=factor).limit == norms.limit
    norms.add(1e9)
    middle = sorted(newest)[window // 2 - 1 : window // 2 + 2]
    assert norms.limit <= factor * middle[-1]


def test_a_resumed_window_equals_the_saved_one_and_may_be_shorter() -> None:
    saved = [0.1 * number for number in range(1, 65)]
    norms = norms_of([9.0])
    norms.restore(saved)
    assert norms.state() == saved
    shorter = norms_of([], spike_window=20)
    shorter.restore(saved)
    assert shorter.state() == saved[-20:]


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["train.spike_factor=5"], "train.spike_factor", "train.on_spike is not set"),
        (["train.spike_window=32"], "train.spike_window", "train.on_spike is not set"),
        (["train.on_spike=warn", "train.spike_factor=1"], "train.spike_factor", "above 1"),
        (["train.on_spike=warn", "train.spike_window=15"], "train.spike_window", "at least 16"),
        (["train.on_spike=stop"], "train.on_spike", "warn, skip, rollback"),
        (["train.on_spike=rollback"], "train.on_spike", "train.save_every = 0 writes none"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, overrides: list[str], key: str, words: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("model: {path: some/model}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(file, overrides)
    assert caught.value.key == key and words in str(caught.value)


def test_a_recipe_may_set_all_keys_or_none(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("model: {path: some/model}\ntrain: {on_spike: skip, spike_factor: 5, spike_window: 32}\n")
    assert load_recipe(file, []).train.spike_factor == 5
    assert load_recipe(file, ["train.on_spike=null", "train.spike_factor=10", "train.spike_window=64"])


def test_the_smallest_window_has_enough_norms() -> None:
    (window,) = (field for field in dataclasses.fields(TrainConfig) if field.name == "spike_window")
    assert window.metadata["at_least"] == FEWEST and f"once {FEWEST} norms" in window.metadata["doc"]
