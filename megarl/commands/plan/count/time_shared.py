"""Who leaves a device that is shared to the others. Pure."""

from __future__ import annotations

from megarl.recipe.offload import offloads
from megarl.recipe.schema import Recipe


def takes_turns(recipe: Recipe) -> bool:
    """Whether those who share a device can leave it: on a CPU there is no memory but the host's."""
    return recipe.cluster.placement == "colocated" and recipe.cluster.device != "cpu"


def leaves(recipe: Recipe) -> bool:
    """Whether the actor's trainers leave the device while others compute there; the critic's, of `critic_view`'s recipe."""
    return takes_turns(recipe) and offloads(recipe)
