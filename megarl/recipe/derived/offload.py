"""Default of `megatron.offload`, and copies on the host that follow from it. Pure."""

from __future__ import annotations

from megarl.platform.kinds import is_accelerator
from megarl.recipe.derived.critic_view import critic_view
from megarl.recipe.schema import Recipe


def offloads(recipe: Recipe, device: str | None = None) -> bool:
    """Return whether trainers move their tensors to host memory while engines run. For the critic, pass `critic_view(recipe)`.

    `device`: the value of cluster.device that `auto` resolved to. Without `megatron.offload` in the recipe it is on where
    engines share the trainers' devices, except on a CPU, which has one memory.
    """
    if recipe.megatron.offload is not None:
        return recipe.megatron.offload
    shared = recipe.cluster.placement == "colocated" and recipe.train.source == "rollout"
    return shared and is_accelerator(device or recipe.cluster.device)


def learners_take_turns(recipe: Recipe, device: str | None = None) -> bool:
    """Return whether actor and critic time-share their devices, so that each is loaded before it is saved. The recipe has a
    critic. `device`: as in `offloads`."""
    return any(offloads(learner, device) for learner in (recipe, critic_view(recipe)))


def copies_checkpoints(recipe: Recipe, device: str | None = None, *, critic: bool) -> bool:
    """Return whether trainers copy their part of a checkpoint to host memory before they write it.

    They do so with `train.save_in_background`, because training changes the tensors meanwhile, and if actor and critic
    time-share devices, because the first one's tensors have left the devices when it writes. `critic`: the recipe has a
    critic. `device`: as in `offloads`.
    """
    return recipe.train.save_in_background or (critic and learners_take_turns(recipe, device))
