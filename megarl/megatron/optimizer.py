"""Megatron's optimizer: learning-rate schedule, construction, and a step that skips gradients with a non-finite norm and spikes."""

from __future__ import annotations

import math
from typing import Any

import torch

from megarl.algorithms.spikes import GradNorms
from megarl.recipe.derived.optimizer_extra import optimizer_settings
from megarl.recipe.trainers import OptimizerConfig


def learning_rate(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (counted from 1).

    Warm-up is linear from `lr * init_lr_ratio` (step 0) and reaches `lr` at step `warmup_steps`. The decay then falls to
    `lr * min_lr_ratio` at step `decay_steps` (unset: `total_steps`) and stays there.
    Example: lr 1, warmup_steps 2, linear, decay_steps 6: 0.5, 1, 0.75, 0.5, 0.25, 0, 0.
    """
    assert step >= 1, step
    if step <= config.warmup_steps:
        share = step / config.warmup_steps
        return config.lr * (config.init_lr_ratio + (1.0 - config.init_lr_ratio) * share)
    if config.decay == "constant":
        return config.lr
    span = (config.decay_steps or total_steps) - config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / span) if span > 0 else 1.0
    share = 1.0 - progress if config.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share)


def build_optimizer(config: OptimizerConfig, chunks: list[Any], *, dtype: torch.dtype, distributed: bool) -> Any:
    """Build Megatron's AdamW over the DDP-wrapped `chunks`; float32 master weights if `dtype` is bfloat16."""
    from megatron.core import parallel_state
    from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
    from megatron.core.optimizer import get_megatron_optimizer

    megatron_config = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.eps,
        clip_grad=config.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=distributed,
        **optimizer_settings(config),
    )
    optimizer = get_megatron_optimizer(megatron_config, chunks)
    for group in optimizer.param_groups:
        # `wd_mult` is 0 for norms and biases. Megatron's scheduler, which megarl does not use, would apply it.
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
    for member in members(optimizer):
        # Create moments now: a checkpoint may precede the first update (if that update is skipped).
        if member.init_state_fn is None:
            _init_host_states(member.optimizer)
        else:
            member.init_state_fn(member.optimizer)
        if any(group.get("is_expert_parallel") for group in member.param_groups):
            # Expert-tensor parallel decides which ranks hold copies of an expert. Megatron uses the tensor-parallel
            # group, which excludes experts of all but its first rank from the gradient norm.
            member.tp_group = parallel_state.get_expert_tensor_parallel_group()
    return optimizer


def _init_host_states(optimizer: Any) -> None:
    """Create the moments of Megatron's HybridDeviceOptimizer (AdamW on the host, and the device's optimizer).

    Megatron's `dummy_step` would do it with an update by random gradients, which changes the weights.
    """
    for inner in optimizer.sub_optimizers:
        for parameter in (parameter for group in inner.param_groups for parameter in group["params"]):
            if hasattr(inner, "initialize_state"):  # Transformer Engine
                inner.initialize_state(parameter, store_param_remainders=False)
                continue
            state = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            if isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)):  # others count updates by group
                state["step"] = torch.zeros((), dtype=torch.float32)
            inner.state[parameter] = state
    optimizer._sync_sub_optimizers_state_to_hdo()


def members(optimizer: Any) -> list[Any]:
    """Return the optimizers that Megatron chains: one for experts, one for all other parameters.

    Stubs on ranks without parameters of a kind are skipped.
    """
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    return [member for member in chain if not getattr(member, "is_stub_optimizer", False)]


def inner_optimizers(member: Any) -> list[Any]:
    """Return the torch optimizers of one of `members`: one, or one on the host and one on the device."""
    return list(getattr(member.optimizer, "sub_optimizers", [member.optimizer]))


def guarded_step(
    optimizer: Any, *, lr: float, clip_grad: float, norms: GradNorms | None = None, device: torch.device | None = None
) -> tuple[float, bool]:
    """Clip gradients and update the weights from the gradient buffers.

    Returns the global gradient norm before clipping, and whether the weights were updated: a non-finite norm skips
    the update, and so does a norm above the limit of `norms`. The norm of an update is added to `norms`. device: this rank's,
    needed with `norms`.
    """

    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if not math.isfinite(norm) or (norms is not None and _is_spike(norm, norms, device)):
        return norm, False
    if clip_grad > 0:
        for member in members(optimizer):
            if parameters := member.get_parameters():
                decoupled = getattr(member.config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False)
                clip_grad_by_total_norm_fp32(parameters, clip_grad, norm, use_decoupled_grad=decoupled)
    optimizer.step_with_ready_grads()
    if norms is not None:
        norms.add(norm)
    return norm, True


def _is_spike(norm: float, norms: GradNorms, device: torch.device | None) -> bool:
    """Return whether the norm is above the limit on any rank: ranks may round differently. Collective if there is a limit."""
    from megarl.megatron.ranks import max_over_ranks

    assert device is not None
    limit = norms.limit
    return math.isfinite(limit) and max_over_ranks(float(norm > limit), device) > 0
