"""Megatron's optimizer: learning-rate schedule, construction, loss scale, and a step that skips gradients with a non-finite norm and
spikes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from megarl.algorithms.spikes import GradNorms
from megarl.recipe.derived.optimizer_extra import optimizer_settings
from megarl.recipe.trainers import OptimizerConfig

_FIRST_SCALE = 2.0**15  # Megatron's default, 2**32, would overflow in each of a run's first 17 updates or more


class StepOutcome(NamedTuple):
    """The result of `guarded_step`: the gradient norm before clipping, and whether the weights were updated.

    overflowed: the update was skipped because of the loss scale, which can still fall. loss_scale: of this update; None without
    float16.
    """

    norm: float
    updated: bool
    overflowed: bool = False
    loss_scale: float | None = None

    @property
    def obstacle(self) -> str:
        """The reason why the weights were not updated."""
        return f"overflow at loss scale {self.loss_scale:g}" if self.overflowed else f"the gradient norm is {self.norm}"

    def metrics(self, role: str) -> dict[str, float]:
        """Return the metrics of the update, of `role`."""
        skipped = float(not self.updated and not self.overflowed)
        metrics = {f"{role}/grad_norm": self.norm, f"{role}/skipped_updates": skipped}
        if self.loss_scale is not None:
            metrics |= {f"{role}/loss_scale": self.loss_scale, f"{role}/overflows": float(self.overflowed)}
        return metrics


class LossScale:
    """Megatron's dynamic loss scale of float16 (DynamicGradScaler), shared by the optimizers of dense weights and experts.

    Megatron gives each optimizer a scale, which changes with its own gradients, and scales the loss by the first one.
    """

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler

    @property
    def scale(self) -> torch.Tensor:
        """The factor of the loss: float32 [1]."""
        scale: torch.Tensor = self._scaler.scale
        return scale

    @property
    def inv_scale(self) -> torch.Tensor:
        """The factor of Megatron's optimizers for their gradients: float32 [1]."""
        inverse: torch.Tensor = self._scaler.inv_scale
        return inverse

    @property
    def can_fall(self) -> bool:
        """True above the smallest scale."""
        return bool(self._scaler.scale > self._scaler.min_scale)

    def update(self, found_inf: bool) -> None:
        """Do nothing: each of Megatron's optimizers calls this for its own gradients, and `advance` counts an update once."""

    def advance(self, overflowed: bool) -> None:
        """Count an update. From the second overflow on each one halves the scale; 1000 updates without one double it."""
        self._scaler.update(overflowed)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss, a scalar, times the scale."""
        return loss * self.scale.view(())

    def state(self) -> dict[str, float]:
        """Return the state as plain values, for `restore`."""
        return {name: float(value) for name, value in self._scaler.state_dict().items()}

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from `state`."""
        counts = {name: int(state[name]) for name in ("growth_tracker", "hysteresis_tracker")}
        scale = torch.tensor([state["scale"]], dtype=torch.float32, device=self.scale.device)
        self._scaler.load_state_dict({"scale": scale, **counts})


def _share_loss_scale(optimizer: Any) -> None:
    """Replace the scales of all members by one."""
    chain = getattr(optimizer, "chained_optimizers", [optimizer])  # with stubs: all ranks of a model count together
    shared = LossScale(chain[0].grad_scaler)
    for member in chain:
        member.grad_scaler = shared


def loss_scale_of(optimizer: Any) -> LossScale | None:
    """Return the loss scale of an optimizer from `build_optimizer`; None without float16."""
    first = next(iter(getattr(optimizer, "chained_optimizers", [optimizer])), None)
    scale = getattr(first, "grad_scaler", None)
    return scale if isinstance(scale, LossScale) else None


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
    """Build Megatron's AdamW over the DDP-wrapped `chunks`; float32 master weights if `dtype` is bfloat16 or float16.

    With float16 the members share a loss scale, see `loss_scale_of`.
    """
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
        fp16=dtype == torch.float16,
        initial_loss_scale=_FIRST_SCALE,
        min_loss_scale=1.0,
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
        _create_moments(member)
        if any(group.get("is_expert_parallel") for group in member.param_groups):
            # Expert-tensor parallel decides which ranks hold copies of an expert. Megatron uses the tensor-parallel
            # group, which excludes experts of all but its first rank from the gradient norm.
            member.tp_group = parallel_state.get_expert_tensor_parallel_group()
    if dtype == torch.float16:
        _share_loss_scale(optimizer)
    return optimizer


def _create_moments(member: Any) -> None:
    inner = member.optimizer
    if hasattr(inner, "sub_optimizers"):  # HybridDeviceOptimizer
        _init_host_states(inner)
    elif member.init_state_fn is not None:
        member.init_state_fn(inner)
    else:
        raise ValueError(
            f"Megatron built {type(inner).__name__}, an optimizer without a function that creates its moments. "
            "Leave out settings that replace Megatron's AdamW."
        )


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
) -> StepOutcome:
    """Clip gradients and update the weights from the gradient buffers.

    A non-finite norm skips the update, and so does a norm above the limit of `norms`. The norm of an update is added to `norms`.
    With float16 the loss scale advances. device: this rank's, needed with `norms` and with float16.
    """

    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    for group in optimizer.param_groups:
        group["lr"] = lr
    overflowed = bool(optimizer.prepare_grads())
    norm = float(optimizer.get_grad_norm())
    scale = loss_scale_of(optimizer)
    scaled_by = None if scale is None else scale.scale.item()
    if scale is not None and _overflows(scale, overflowed or not math.isfinite(norm), device):
        could_fall = scale.can_fall
        scale.advance(True)
        return StepOutcome(norm, False, could_fall, scaled_by)
    if not math.isfinite(norm) or (norms is not None and _is_spike(norm, norms, device)):
        return StepOutcome(norm, False, loss_scale=scaled_by)
    if clip_grad > 0:
        for member in members(optimizer):
            if parameters := member.get_parameters():
                decoupled = getattr(member.config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False)
                clip_grad_by_total_norm_fp32(parameters, clip_grad, norm, use_decoupled_grad=decoupled)
    optimizer.step_with_ready_grads()
    if norms is not None:
        norms.add(norm)
    return StepOutcome(norm, True, loss_scale=scaled_by)


def _overflows(scale: LossScale, here: bool, device: torch.device | None) -> bool:
    """Return whether a gradient is not finite on any rank, and count an update without one. Collective."""
    from megarl.megatron.ranks import max_over_ranks

    assert device is not None
    if max_over_ranks(float(here), device) > 0:
        return True
    scale.advance(False)
    return False


def _is_spike(norm: float, norms: GradNorms, device: torch.device | None) -> bool:
    """Return whether the norm is above the limit on any rank: ranks may round differently. Collective if there is a limit."""
    from megarl.megatron.ranks import max_over_ranks

    assert device is not None
    limit = norms.limit
    return math.isfinite(limit) and max_over_ranks(float(norm > limit), device) > 0
