"""Published measurements of docs/planner.md: written by a command, and consistent with the models that are built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.published import SIZES, STEPS, Published
from docs.generate.planner import PAGE, document, estimated
from megarl.hf import published as model_configs
from megarl.hf.shape import model_shape
from megarl.recipe.schema import Recipe
from tests.support.count_ranks import count_stages


def test_the_page_is_up_to_date() -> None:
    assert document(PAGE.read_text()) == PAGE.read_text(), "python -m docs.generate.planner writes it"


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size.model)
def test_counted_parameters_equal_published_ones(size: object) -> None:
    shape = model_shape(model_configs.read(size.model))
    assert shape.total / 1e9 == pytest.approx(size.total, rel=0.01)
    if size.active is not None:
        assert (shape.active + shape.output) / 1e9 == pytest.approx(size.active, rel=0.02)


@pytest.mark.parametrize("published", STEPS, ids=lambda step: step.name)
def test_estimates_are_within_a_factor_of_published_times(published: Published) -> None:
    """A rate in the wrong unit, or a phase counted twice, would exceed the bound."""
    step = estimated(published)
    of = {phase.name: phase.seconds for phase in step.phases} | {"step": step.seconds}
    for name in published.compared or ("step",):
        assert 1 / 5 < of[name] / published.seconds[name] < 3
    for phase in step.phases:
        if phase.name in published.seconds:
            assert 1 / 6 < phase.seconds / published.seconds[phase.name] < 6, phase.name


@pytest.mark.slow
@pytest.mark.parametrize("model", ["Qwen3-4B", "Qwen3-30B-A3B"])
def test_counted_parameters_equal_those_of_the_stages(model: str, tmp_path: Path) -> None:
    config = model_configs.read(model)
    (tmp_path / "config.json").write_text(json.dumps(config))
    recipe = Recipe()
    recipe.model.path = str(tmp_path)
    held = sum(stage.held.parameters for stage in count_stages(recipe, config, config))
    assert model_shape(config).total == pytest.approx(held, rel=1e-3)
