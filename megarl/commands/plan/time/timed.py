"""A plan with its seconds: raw, beside a calibration's, or beside the range of published runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megarl.commands.plan.count.types import Estimate, Plan
from megarl.commands.plan.time.estimate import estimate_of
from megarl.commands.plan.time.spread import published_ratios, runs_alike, spreads
from megarl.hf import published
from megarl.hf.config import number_of_experts, text_fields
from megarl.hf.shape import model_shape
from megarl.platform.devices import Device
from megarl.recipe.schema import Recipe


def with_estimate(
    made: Plan,
    recipe: Recipe,
    models: Mapping[str, dict[str, Any]],
    device: Device,
    table: Device | None,
    response: float | None,
) -> Plan:
    """`made` with its seconds. With a calibrated `device`, those of the `table`'s device stand beside; without, the range over
    published runs of such models."""
    found = estimate_of(made, recipe, models, device, response=response)
    if table is not None and table != device:
        raw = estimate_of(made, recipe, models, table, response=response)
        return replace(made, estimate=replace(found, uncalibrated=raw))
    if device.factors:
        return replace(made, estimate=found)
    return _with_spread(made, found, models["rollout"])


def _with_spread(made: Plan, estimate: Estimate, model: dict[str, Any]) -> Plan:
    """`made` with the range of `estimate` over published runs; of the step also without runs of the recipe's own model."""
    experts, ratios = bool(number_of_experts(text_fields(model))), published_ratios()
    spread = spreads(estimate, experts=experts, ratios=ratios)
    if not spread:
        return replace(made, estimate=estimate)
    runs, shape = runs_alike(experts=experts, ratios=ratios), model_shape(model)
    of_model = [one for one in runs if model_shape(published.read(one.model)) == shape]
    others = spreads(estimate, experts=experts, ratios=[one for one in runs if one not in of_model]) if of_model else []
    return replace(
        made,
        estimate=estimate,
        spread=spread,
        compared=[one.run for one in runs],
        alike="with experts" if experts else "without experts",
        own_runs=[one.run for one in of_model] if others else [],
        without_own=others[-1] if others else None,
    )
