"""`actor.optimizer.extra` and `critic.optimizer.extra`: an AdamW whose states and update are on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megarl import platform
from megarl.errors import RecipeError
from megarl.platform.kinds import kind_of

if TYPE_CHECKING:
    from megarl.recipe.schema import Recipe
    from megarl.recipe.training import OptimizerConfig

_SET = "{section}.{key} decides it"
_REDUCED = (
    "states of lower precision are Transformer Engine's FusedAdam's, which keeps them in forms that megarl's checkpoints do "
    "not read or write"
)
# Fields of Megatron's OptimizerConfig that other keys decide, with the key.
_KEYS = {
    "lr": "lr", "min_lr": "min_lr_ratio", "weight_decay": "weight_decay", "adam_beta1": "betas", "adam_beta2": "betas",
    "adam_eps": "eps", "clip_grad": "clip_grad",
}  # fmt: skip
_REDUCED_FIELDS = (
    "use_precision_aware_optimizer", "store_param_remainders", "main_grads_dtype", "main_params_dtype", "exp_avg_dtype",
    "exp_avg_sq_dtype",
)  # fmt: skip
DRIVEN = (
    "optimizer_cpu_offload", "optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d", "pin_cpu_grads", "pin_cpu_params",
)  # fmt: skip
"""Fields that a recipe may set."""
_SHARE = "optimizer_offload_fraction"


def optimizer_settings(config: OptimizerConfig) -> dict[str, Any]:
    """Return the fields of Megatron's OptimizerConfig beyond those that have keys of their own.

    Megatron's HybridDeviceOptimizer runs on the path of the precision-aware optimizer, with float32 states
    (Megatron-LM core_v0.16.1, megatron/training/arguments.py: `--optimizer-cpu-offload`).
    """
    if not config.extra.get("optimizer_cpu_offload"):
        return {}
    return {**config.extra, "use_precision_aware_optimizer": True}


def host_share(config: OptimizerConfig) -> float:
    """Return the share of the optimizer's states that is on the host and updated there."""
    return float(config.extra["optimizer_offload_fraction"]) if config.extra.get("optimizer_cpu_offload") else 0.0


def refusal_of_optimizer_field(name: str, section: str) -> tuple[str, str] | None:
    """Return (the problem, the remedy) for a field that a recipe may not set; None for one that it may."""
    if name in DRIVEN:
        return None
    if name in _KEYS:
        return _SET.format(section=section, key=_KEYS[name]), f"set {section}.{_KEYS[name]}"
    if name in _REDUCED_FIELDS:
        return _REDUCED, "leave it out; optimizer_cpu_offload saves device memory"
    return "megarl's AdamW, its schedule and its guarded step do not use it", "leave it out"


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
