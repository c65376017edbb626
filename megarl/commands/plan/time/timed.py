"""Estimate of a plan: raw seconds, with a calibration's, or with the range of published runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megarl.commands.plan.count.types import Estimate, RecipePlan
from megarl.commands.plan.time.estimate import estimate_of
from megarl.commands.plan.time.spread import published_ratios, runs_of_kind, spreads
from megarl.hf import published
from megarl.hf.config import number_of_experts, text_fields
from megarl.hf.shape import model_shape
from megarl.platform.devices import Device
from megarl.recipe.schema import Recipe


def with_estimate(
    counted: RecipePlan,
    recipe: Recipe,
    models: Mapping[str, dict[str, Any]],
    device: Device,
    table: Device | None,
    response: float | None,
) -> RecipePlan:
    """Return `counted` with its estimate.

    With a calibrated `device` the estimate for the `table`'s device is added, else the range over published runs.
    """
    estimate = estimate_of(counted, recipe, models, device, response=response)
    if table is not None and table != device:
        raw = estimate_of(counted, recipe, models, table, response=response)
        return replace(counted, estimate=replace(estimate, uncalibrated=raw))
    if device.factors:
        return replace(counted, estimate=estimate)
    return _with_spread(counted, estimate, models["rollout"])


def _with_spread(counted: RecipePlan, estimate: Estimate, model: dict[str, Any]) -> RecipePlan:
    """Add the range of `estimate` over published runs; for the step also without runs of the recipe's model."""
    experts, ratios = bool(number_of_experts(text_fields(model))), published_ratios()
    spread = spreads(estimate, experts=experts, ratios=ratios)
    if not spread:
        return replace(counted, estimate=estimate)
    runs, shape = runs_of_kind(experts=experts, ratios=ratios), model_shape(model)
    of_model = [run for run in runs if model_shape(published.read(run.model)) == shape]
    other_runs = [run for run in runs if run not in of_model]
    other_spreads = spreads(estimate, experts=experts, ratios=other_runs) if of_model else []
    return replace(
        counted,
        estimate=estimate,
        spread=spread,
        compared=[run.run for run in runs],
        model_kind="with experts" if experts else "without experts",
        own_runs=[run.run for run in of_model] if other_spreads else [],
        without_own=other_spreads[-1] if other_spreads else None,
    )
