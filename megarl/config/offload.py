"""Default of `megatron.offload`. Pure."""

from __future__ import annotations

from megarl.config.schema import Recipe


def offloads(recipe: Recipe, device: str | None = None) -> bool:
    """Return whether the trainers' memory moves to the host while engines run; `critic_view` gives the critic's recipe.

    `device`: the value of cluster.device that `auto` resolved to. Unset, the key follows `cluster.placement`: on where engines share the devices. A CPU has one memory, so it is off there.
    """
    if recipe.megatron.offload is not None:
        return recipe.megatron.offload
    shared = recipe.cluster.placement == "colocated" and recipe.train.source == "rollout"
    return shared and (device or recipe.cluster.device) != "cpu"
