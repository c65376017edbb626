"""When the reference policy is refreshed, and what a run logs of it."""

from __future__ import annotations

from megarl.checkpoint.run_checkpoints import is_due
from megarl.observe.log import RunLog
from megarl.recipe.algorithm import AlgorithmConfig
from megarl.trainer.group import ActorGroup


def log_reference(log: RunLog, algorithm: AlgorithmConfig, step: int) -> None:
    """Log the step of the reference policy's weights, unless they never change."""
    if step or algorithm.refresh_reference_every:
        log.add({"actor/reference_step": float(step)})


def refresh_reference_if_due(actor: ActorGroup, log: RunLog, algorithm: AlgorithmConfig, step: int) -> None:
    """Make the policy after `step` the reference policy, if the recipe says so."""
    if is_due(step, algorithm.refresh_reference_every):
        actor.refresh_reference(step)
        log.notice(f"step {step}: the reference policy is now the policy of this step")
