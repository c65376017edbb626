"""Fields of Megatron's OptimizerConfig that `actor.optimizer.extra` and `critic.optimizer.extra` may set.

They select an AdamW with states and update on the host.
"""

from __future__ import annotations

from typing import Any

from megarl.recipe.trainers import OptimizerConfig

_SET = "{section}.{key} decides it"
_REDUCED = (
    "states of lower precision need Transformer Engine's FusedAdam, in formats that megarl's checkpoints do "
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
SHARE = "optimizer_offload_fraction"


def optimizer_settings(config: OptimizerConfig) -> dict[str, Any]:
    """Return the fields of Megatron's OptimizerConfig that have no separate recipe key.

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
