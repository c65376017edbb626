"""Several scorers for one row: the sum, the names of its metrics, and refused settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.preflight.data import Prepared, prepare_rewards
from megarl.preflight.load import load_recipe
from megarl.recipe import RecipeError
from megarl.recipe.schema import Recipe
from megarl.registry import Registry
from megarl.rewards import Score, Scorer, find
from megarl.rewards.weighted import Term, combine, terms_of


def term(label: str | None, weight: float = 1.0) -> Term:
    return Term(Scorer(str(label), lambda request: 0.0), weight, label)


def test_a_single_scorers_score_is_unchanged() -> None:
    score = Score(0.75, {"accuracy": 1.0, "steps": -0.25}, "7", ((2, 0.25), (6, -0.5)))
    assert combine([term(None)], [score]) is score


def test_scores_are_summed_by_weight_with_their_parts() -> None:
    """1 x 0.5 + 0.2 x 3 - 0.5 x 1 = 0.6. Accuracy and answer come from the first scorer that reports them."""
    scores = [Score(0.5, {"length": 4.0}), Score(3.0, {"accuracy": 1.0}, "7"), Score(1.0, {"accuracy": 0.0}, "8")]
    result = combine([term("a"), term("b", 0.2), term("c", -0.5)], scores)
    assert result.value == pytest.approx(0.6) and result.answer == "7"
    named = {"a": 0.5, "a/length": 4.0, "b": 3.0, "b/accuracy": 1.0, "c": 1.0, "c/accuracy": 0.0}
    assert result.parts == {**named, "accuracy": 1.0}


def test_step_rewards_are_weighted_and_merged_at_equal_ends() -> None:
    """0.5 x (1 + 0.25 - 0.5) + 2 x (0 + 0.1): steps at 2 and 6, and at 6."""
    first = Score(0.75, {"steps": -0.25}, steps=((2, 0.25), (6, -0.5)))
    second = Score(0.1, {"steps": 0.1}, steps=((6, 0.1),))
    result = combine([term("a", 0.5), term("b", 2.0)], [first, second])
    assert result.steps == ((2, 0.125), (6, pytest.approx(-0.05)))
    assert result.value == pytest.approx(0.375 + 0.2)
    assert result.parts["steps"] == pytest.approx(0.075)
    outcome = result.value - sum(reward for _, reward in result.steps)
    assert outcome == pytest.approx(0.5 * 1.0), "the outcome reward at the end"


def test_terms_of_each_source() -> None:
    by_source = terms_of(None, {}, ["openai/gsm8k", "aime24"])
    assert [[term.scorer.name for term in row] for row in by_source.values()] == [["gsm8k"], ["math_dapo"]]
    (single,) = terms_of("math", {}, ["x"])["x"]
    assert (single.scorer, single.weight, single.label) == (find("math"), 1.0, None)
    both = terms_of(None, {"gsm8k": 1, "tests.support.scorers:letters": 0.1}, ["x"])["x"]
    assert [(term.label, term.weight) for term in both] == [("gsm8k", 1), ("letters", 0.1)]
    with pytest.raises(ValueError, match="did you mean 'gsm8k'"):
        terms_of(None, {"gsm9k": 1.0}, ["x"])


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["reward.function=gsm8k", "reward.functions={math: 1.0}"], "reward.functions", "set only one of the two"),
        (["reward.functions={gsm8k: 0}"], "reward.functions.gsm8k", "a weight must be finite and not 0"),
        (["reward.functions={gsm8k: .nan}"], "reward.functions.gsm8k", "a weight must be finite and not 0"),
        (["reward.functions={'a:length': 1, 'b:length': 1}"], "reward.functions", "which is the metric of 'a:length'"),
        (["reward.functions={'a:accuracy': 1}"], "reward.functions", "the metric of a part of the sum"),
        (["reward.functions={gsm8k: much}"], "reward.functions", "could not be converted to Float"),
    ],
)
def test_invalid_weights_and_functions_are_refused(tmp_path: Path, overrides: list[str], key: str, words: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("model: {path: some/model}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(file, overrides)
    assert caught.value.key == key and words in str(caught.value)


def test_a_scorer_that_cannot_be_prepared_is_refused_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare() -> None:
        raise ModuleNotFoundError("No module named 'checker'")

    from megarl.rewards import base

    monkeypatch.setattr(base, "SCORERS", Registry("scorer"))
    base.SCORERS.register("checker")(Scorer("checker", lambda request: 0.0, prepare=prepare))
    recipe = Recipe()
    recipe.reward.function = "checker"

    class Rows:
        data_sources = ("x",)

    prepared = Prepared(None, Rows(), None, None, None, [])  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="'checker' cannot be used here: ModuleNotFoundError: No module named 'checker'"
    ):
        prepare_rewards(recipe, prepared)
