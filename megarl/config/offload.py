"""Default of `megatron.offload`. Pure."""

from __future__ import annotations

from megarl.config.schema import Recipe


def offloads(recipe: Recipe, device: str | None = None) -> bool:
    """Return whether trainers move their tensors to host memory while engines run. For the critic, pass `critic_view(recipe)`.

    `device`: the value of cluster.device that `auto` resolved to. Without `megatron.offload` in the recipe it is on where
    engines share the trainers' devices, except on a CPU, which has one memory.
    """
    if recipe.megatron.offload is not None:
        return recipe.megatron.offload
    shared = recipe.cluster.placement == "colocated" and recipe.train.source == "rollout"
    return shared and (device or recipe.cluster.device) != "cpu"
