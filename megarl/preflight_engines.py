"""What is checked of the policy's engines before any process starts."""

from __future__ import annotations

from typing import Any

from megarl import engines
from megarl.config.errors import RecipeError
from megarl.config.schema import RolloutConfig
from megarl.model_config import number_of_experts, text_fields


def check_engines(rollout: RolloutConfig) -> None:
    """Refuse an engine that is not known, arguments that it does not have, and groups that it cannot form."""
    engines.check_known(rollout.engine)
    engines.check_args(rollout.engine, rollout.engine_args, "rollout")
    engines.check_groups(rollout.engine, rollout.data_parallel)


def check_experts(rollout: RolloutConfig, config: dict[str, Any]) -> None:
    """Refuse experts that cannot be spread over the devices of an engine, or of a group, as asked. `config`: config.json."""
    if not rollout.spreads_experts:
        return
    key, value = ("data_parallel", rollout.data_parallel) if rollout.data_parallel > 1 else ("expert_parallel", True)
    experts, devices = number_of_experts(text_fields(config)), rollout.data_parallel * rollout.tensor_parallel
    if not experts:
        remedy = "leave it out: every engine is a replica of its own"
        raise RecipeError(f"rollout.{key}", "the model has no experts to spread", remedy, value=value)
    if experts % devices:
        raise RecipeError(
            f"rollout.{key}",
            f"the model's {experts} experts do not divide over rollout.data_parallel x rollout.tensor_parallel = "
            f"{rollout.data_parallel} x {rollout.tensor_parallel} = {devices} devices",
            "change these two until they do",
            value=value,
        )
