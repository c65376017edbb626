"""Layouts that a plan suggests for a recipe that does not fit or does not divide."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.commands.plan.search import suggest
from megarl.commands.plan.search.layouts import Choice, choice_of, refusal
from megarl.errors import InputError
from megarl.preflight.load import load_recipe
from megarl.recipe.text import to_yaml
from tests.support.layout_search import NO_CLIENT, FakeFitChecker, subject


def test_suggestions_stop_at_their_time_limit_during_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(FakeFitChecker):
        def peak(self, choice: Choice) -> int:
            time.sleep(1.5)
            return 0

    task = subject()
    monkeypatch.setattr(suggest, "FitChecker", Slow)
    monkeypatch.setattr(suggest, "_by_changes", lambda *_: iter([choice_of(task.recipe)]))
    assert suggest.suggest(task, NO_CLIENT, seconds=0.5) == ([], True), "it would fit, 1.5 s later"
    monkeypatch.setattr(suggest, "_by_changes", lambda *_: iter([]))
    assert suggest.suggest(task, NO_CLIENT, seconds=60) == ([], False), "nothing was left to look at"


def test_suggestions_stop_at_the_third(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search ends at the third suggestion, without waiting for the fourth, which is being counted."""

    class SlowOnce(FakeFitChecker):
        slow = False

        def peak(self, choice: Choice) -> int:
            if SlowOnce.slow:
                time.sleep(0.01)
                return 0
            SlowOnce.slow = True  # the first takes long
            time.sleep(3)
            return 0

    monkeypatch.setattr(suggest, "FitChecker", SlowOnce)
    began = time.monotonic()
    suggestions, stopped = suggest.suggest(subject(), NO_CLIENT, seconds=60)
    assert len(suggestions) == 3 and not stopped and time.monotonic() - began < 2.5


def test_layouts_that_divide_are_proposed_without_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    task = subject(tensor_parallel=4)  # two key/value heads do not divide
    lines = suggest.uncounted_layouts(task)
    assert len(lines) == 3 and all(line.count("=") <= 2 for line in lines), lines
    for line in lines:
        sizes = {
            key.removeprefix("megatron."): plain for key, plain in (setting.split("=") for setting in line.split())
        }
        changed = replace(task.recipe, megatron=replace(task.recipe.megatron, **{k: int(v) for k, v in sizes.items()}))
        assert refusal(changed, task.model) is None
    small = replace(task, device=replace(task.device, memory=1e-6))
    with pytest.raises(InputError, match="No engine layout on these devices"):
        suggest.uncounted_layouts(small)


def test_suggestions_change_as_few_settings_as_possible(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    task = subject(tensor_parallel=4)  # two key/value heads do not divide
    monkeypatch.setattr(suggest, "FitChecker", FakeFitChecker)
    suggestions, stopped = suggest.suggest(task, NO_CLIENT, seconds=60)
    assert len(suggestions) == 3 and not stopped
    assert all(
        "megarl" not in suggestion.overrides and "megatron.recompute=full" in suggestion.overrides
        for suggestion in suggestions
    )
    assert all(len(suggestion.overrides.split()) <= 3 for suggestion in suggestions), suggestions
    assert [suggestion.times for suggestion in suggestions] == sorted(suggestion.times for suggestion in suggestions)
    for suggestion in suggestions:
        (tmp_path / "recipe.yaml").write_text(to_yaml(task.recipe))
        loaded = load_recipe(tmp_path / "recipe.yaml", suggestion.overrides.split(), check=False)
        assert suggestion.times == pytest.approx(task.step_seconds(loaded) / task.step_seconds(task.recipe))


def test_suggestions_of_one_shape_change_different_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller micro batch and recomputation of the recipe's layout are two suggestions. Both together are slower than one
    of them and are not proposed, nor is another partition of the same layers."""

    class Small(FakeFitChecker):
        def peak(self, choice: Choice) -> int:
            time.sleep(
                0.3 if choice.tokens == 256 else 0.0
            )  # 128 is counted before it, which the search looks at later
            return 2**30 if choice.recompute == "full" or choice.tokens < 512 else 2**40

        def excess(self, choice: Choice, near: float = 1.0) -> float:
            return 0.0

    task = subject(pipeline_parallel=2)
    task.recipe.actor.max_tokens_per_micro_batch = 512
    monkeypatch.setattr(suggest, "FitChecker", Small)
    suggestions, _ = suggest.suggest(task, NO_CLIENT, seconds=60)
    lines = {suggestion.overrides for suggestion in suggestions}
    assert "megatron.recompute=full" in lines and "actor.max_tokens_per_micro_batch=256" in lines, lines
    assert not any("recompute=full" in line and "tokens" in line for line in lines), lines
    assert not any("virtual" in line for line in lines), lines
    assert len(lines) == 3 and "actor.max_tokens_per_micro_batch=128" not in lines, "the same as 256, and slower"
