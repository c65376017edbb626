"""Checks of `actor.optimizer.extra` and `critic.optimizer.extra`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megarl import platform
from megarl.errors import RecipeError
from megarl.platform.kinds import kind_of

if TYPE_CHECKING:
    from megarl.recipe.schema import Recipe
from megarl.recipe.optimizer_extra import _SHARE, refusal_of_optimizer_field

if TYPE_CHECKING:
    from megarl.recipe.schema import Recipe
from megarl.recipe.optimizer_extra import host_share


def check_optimizer_extra(recipe: Recipe, section: str) -> None:
    """Raise RecipeError for settings in `section`.extra that Megatron would refuse in a trainer process, or ignore.

    `recipe`: of a critic, as `critic_view` returns it.
    """
    extra: Mapping[str, Any] = recipe.actor.optimizer.extra

    def refuse(name: str, what: str, remedy: str) -> None:
        raise RecipeError(f"{section}.extra.{name}", what, remedy, value=extra[name])

    for name, value in extra.items():
        if refusal := refusal_of_optimizer_field(name, section):
            refuse(name, *refusal)
        number = name == _SHARE
        if isinstance(value, bool) == number or not isinstance(value, (int, float) if number else bool):
            refuse(
                name, f"Megatron takes {'a number' if number else 'true or false'}, without quotes", "change the value"
            )
    if not extra.get("optimizer_cpu_offload"):
        for name in extra:
            if name != "optimizer_cpu_offload":
                refuse(name, "it has no effect without optimizer_cpu_offload", "set optimizer_cpu_offload: true")
        return
    share = extra.get(_SHARE)
    if share is None or not 0 < share <= 1:
        what = "optimizer_offload_fraction is unset or not in (0, 1], and Megatron would then keep all states on the device"
        raise RecipeError(f"{section}.extra.{_SHARE}", what, f"set {_SHARE}: 1.0", value=share)
    refusal = kind_of(platform.kind(recipe.cluster.device)).no_host_optimizer
    if refusal is not None:
        refuse("optimizer_cpu_offload", *refusal)
    megatron = section.replace("actor.optimizer", "megatron").replace("critic.optimizer", "critic.megatron")
    if not recipe.megatron.distributed_optimizer:
        what = "Megatron's path for it is the distributed optimizer's"
        refuse("optimizer_cpu_offload", what, f"set {megatron}.distributed_optimizer=true")
    if recipe.model.dtype != "bfloat16":
        what = "it is for bfloat16 weights, whose float32 masters and moments it keeps on the host"
        refuse("optimizer_cpu_offload", what, "set model.dtype=bfloat16, or leave it out")
    if recipe.lora.rank:
        refuse("optimizer_cpu_offload", "with lora.rank only adapters have states, and they are small", "leave it out")


def optimizer_notices(recipe: Recipe) -> list[str]:
    """The share of each optimizer that is on the host: the actor's, and the critic's of a recipe with a critic."""
    from megarl.algorithms.advantages import uses_critic  # which reads the schema

    optimizers = {"actor": recipe.actor.optimizer}
    if uses_critic(recipe.algorithm):
        optimizers["critic"] = recipe.critic.optimizer
    return [
        f"{role}.optimizer.extra: {share:.0%} of master weights and moments are on the host, which updates them. The estimate "
        "has the copies of gradients and weights, and not the seconds of the host's own update"
        for role, config in optimizers.items()
        if (share := host_share(config))
    ]
