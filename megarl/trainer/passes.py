"""The passes that a training step runs, and their order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from megarl.algorithms.advantages import uses_critic
from megarl.algorithms.objective import runs_old_log_prob_pass, runs_reference_pass
from megarl.recipe.algorithm import AlgorithmConfig


class CriticPass(Enum):
    """Position of the critic's pass in a step."""

    NONE = "the recipe has no critic"
    FIRST = "before the actor's passes, so that shared devices change hands once"
    AFTER_KL = "after the KL penalty, because the critic's rewards include it"


@dataclass(frozen=True)
class StepPasses:
    """The passes of one step, in their order. If `critic` is AFTER_KL, the critic's pass follows `kl_in_reward`."""

    teacher: bool  # the teacher's engines score the samples
    critic: CriticPass
    old_log_probs: bool  # log-probs before the updates
    reference: bool  # log-probs of the reference policy
    kl_in_reward: bool  # the KL to the reference policy is subtracted from rewards
    update_actor: bool  # false in the critic's warm-up


def passes_of(algorithm: AlgorithmConfig, warmup_steps: int, step: int) -> StepPasses:
    """Return the passes of `step`. `warmup_steps`: `critic.warmup_steps`; until then only the critic is updated.

    The old-log-prob pass also runs during warm-up, since it measures the gap between trainer and engine.
    """
    has_critic, in_reward = uses_critic(algorithm), algorithm.kl_in_reward
    update_actor = not (has_critic and step <= warmup_steps)
    reads_reference = in_reward or update_actor
    position = CriticPass.AFTER_KL if in_reward else CriticPass.FIRST
    return StepPasses(
        teacher=reads_reference,
        critic=position if has_critic else CriticPass.NONE,
        old_log_probs=runs_old_log_prob_pass(algorithm),
        reference=runs_reference_pass(algorithm) and reads_reference,
        kl_in_reward=in_reward,
        update_actor=update_actor,
    )
