"""Checks of `actor.optimizer.extra` and `critic.optimizer.extra`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megarl import platform
from megarl.algorithms.advantages import uses_critic
from megarl.errors import RecipeError
from megarl.platform.kinds import kind_of
from megarl.recipe.derived.optimizer_extra import SHARE, host_share, refusal_of_optimizer_field
from megarl.recipe.schema import Recipe


def optimizer_extra_errors(recipe: Recipe, section: str) -> Iterator[RecipeError]:
    """Yield an error for each setting in `section`.extra that Megatron would reject in a trainer process, or ignore.

    `recipe`: for a critic, the result of `critic_view`.
    """
    extra: Mapping[str, Any] = recipe.actor.optimizer.extra
    for name, problem, remedy in _problems(recipe, section, extra):
        yield RecipeError(f"{section}.extra.{name}", problem, remedy, value=extra.get(name))


def _problems(recipe: Recipe, section: str, extra: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (field, problem, remedy)."""
    wrong = []
    for name, value in extra.items():
        is_number = name == SHARE
        if refusal := refusal_of_optimizer_field(name, section):
            wrong.append((name, *refusal))
        elif isinstance(value, bool) == is_number or not isinstance(value, (int, float) if is_number else bool):
            words = "a number" if is_number else "true or false"
            wrong.append((name, f"it must be {words}", f"give {words}, without quotes"))
    yield from wrong
    if wrong:  # the checks below compare values
        return
    if not extra.get("optimizer_cpu_offload"):
        for name in extra:
            if name != "optimizer_cpu_offload":
                yield name, "it has no effect without optimizer_cpu_offload", "set optimizer_cpu_offload: true"
        return
    share = extra.get(SHARE)
    if share is None or not 0 < share <= 1:
        problem = "it is unset or outside (0, 1], so Megatron would keep all states on the device"
        yield SHARE, problem, f"set {SHARE}: 1.0"
    for problem, remedy in _offload_problems(recipe, section):
        yield "optimizer_cpu_offload", problem, remedy


def _offload_problems(recipe: Recipe, section: str) -> Iterator[tuple[str, str]]:
    """Yield (problem, remedy) for conditions of optimizer_cpu_offload that the recipe does not meet."""
    refusal = kind_of(platform.kind(recipe.cluster.device)).no_host_optimizer
    if refusal is not None:
        yield refusal
    megatron = section.replace("actor.optimizer", "megatron").replace("critic.optimizer", "critic.megatron")
    if not recipe.megatron.distributed_optimizer:
        problem = "Megatron implements it in the distributed optimizer, which is off"
        yield problem, f"set {megatron}.distributed_optimizer=true"
    if recipe.model.dtype != "bfloat16":
        problem = "it only offloads the float32 master weights and moments of bfloat16 weights"
        yield problem, "set model.dtype=bfloat16, or leave it out"
    if recipe.lora.rank:
        yield "with lora.rank only the adapters have optimizer states, which are small", "leave it out"


def optimizer_notices(recipe: Recipe) -> list[str]:
    """Return a notice for each optimizer (actor, critic) with states on the host."""
    optimizers = {"actor": recipe.actor.optimizer}
    if uses_critic(recipe.algorithm):
        optimizers["critic"] = recipe.critic.optimizer
    return [
        f"{role}.optimizer.extra: {share:.0%} of master weights and moments are on the host, which updates them. The estimate "
        "includes the copies of gradients and weights, but not the duration of the host's update"
        for role, config in optimizers.items()
        if (share := host_share(config))
    ]
