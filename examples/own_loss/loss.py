"""A policy loss with a smooth trust region, and an advantage by ranks. The recipe imports this file by `algorithm.modules`."""

import numpy as np

from megarl.algorithms.advantages import advantage
from megarl.algorithms.losses import policy_loss


@policy_loss("smooth_clip", needs_old_log_probs=True)
def smooth_clip(inputs, settings):
    """-A (1 + w tanh((ratio - 1) / w)): as PPO's ratio near 1, and at most w away from it; w is `algorithm.options.width`."""
    width = settings.options["width"]
    ratio = (inputs.log_probs - inputs.old_log_probs).exp()
    bounded = 1 + width * ((ratio - 1) / width).tanh()
    return -inputs.advantages * bounded, {"actor/ratio": ratio.detach()}


@advantage("ranks", needs_siblings=True)
def ranks(outcomes, settings):
    """The rank of a sample's reward in its group, from -1 (worst) to 1 (best); equal rewards share a rank: numpy [B]."""
    values = np.zeros(len(outcomes.rewards))
    for group in np.unique(outcomes.groups):
        rows = np.flatnonzero(outcomes.groups == group)
        rewards = outcomes.rewards[rows]
        better_than = (rewards[:, None] > rewards).sum(1) - (rewards[:, None] < rewards).sum(1)
        values[rows] = better_than / max(len(rows) - 1, 1)
    return values
