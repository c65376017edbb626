"""`megatron.ddp`: fields of Megatron's DistributedDataParallelConfig that a recipe may set, and contradictions among them."""

from __future__ import annotations

from typing import Any

from megarl import platform
from megarl.errors import RecipeError
from megarl.platform.kinds import kind_of
from megarl.recipe.schema import Recipe
from megarl.registry import nearest

_SUMS = "gradients are summed in float32 over micro batches and ranks; otherwise the update would depend on the split"
_FSDP = "it belongs to Megatron's FSDP, and megarl shards only the optimizer (megatron.distributed_optimizer)"
_FP8 = "it belongs to FP8 weights, and megarl trains in bfloat16 or float32"
_CHECKS = "it ends the run, and megarl skips an update with a non-finite gradient norm (train.stop_after_skipped)"
_BUFFERS = "it registers buffers with NCCL, and megarl frees and refills them (megatron.offload)"
# Fields that megarl's step does not drive, with the reason.
_REFUSED = {
    "grad_reduce_in_fp32": _SUMS,
    "average_in_collective": _SUMS,
    "reduce_scatter_with_fp32_accumulation": _SUMS,
    "use_distributed_optimizer": "megatron.distributed_optimizer decides it",
    "num_distributed_optimizer_instances": "it needs process groups that megarl does not make",
    "check_for_nan_in_grad": _CHECKS,
    "check_for_large_grads": _CHECKS,
    "delay_wgrad_compute": "it needs a separate pipeline schedule, which megarl does not run",
    **dict.fromkeys(("fp8_param_gather", "reuse_grad_buf_for_mxfp8_param_ag", "keep_fp8_transpose_cache"), _FP8),
    **dict.fromkeys(("nccl_ub", "disable_symmetric_registration"), _BUFFERS),
    **dict.fromkeys(
        (
            "use_megatron_fsdp",
            "use_custom_fsdp",
            "data_parallel_sharding_strategy",
            "gradient_reduce_div_fusion",
            "suggested_communication_unit_size",
            "preserve_fp32_weights",
            "fsdp_double_buffer",
            "outer_dp_sharding_strategy",
            "fsdp_manual_registration",
        ),
        _FSDP,
    ),
}
DRIVEN = (
    "overlap_grad_reduce", "overlap_param_gather", "align_param_gather", "bucket_size", "pad_buckets_for_high_nccl_busbw",
)  # fmt: skip
"""Fields that megarl's step drives."""


def refusal_of_ddp(name: str) -> tuple[str, str] | None:
    """Return (the problem, the remedy) for a Megatron field that a recipe may not set; else None."""
    if name in DRIVEN:
        return None
    if name in _REFUSED:
        return _REFUSED[name], "leave it out"
    close = nearest(name, (*DRIVEN, *_REFUSED))
    remedy = f"did you mean {close}?" if close else f"leave it out; megarl supports: {', '.join(DRIVEN)}"
    return "megarl has no such field of Megatron's DistributedDataParallelConfig", remedy


def ddp_settings(recipe: Recipe, *, with_images: bool) -> dict[str, Any]:
    """Return the fields of DistributedDataParallelConfig of the model that `recipe` lays out: `megatron.ddp` over the
    defaults of its device (`DeviceKind.ddp`). Raises RecipeError if a field lacks the field that it depends on.

    Models that read images and adapters have no defaults: a micro batch may leave some of their weights without a gradient.
    """
    megatron = recipe.megatron
    defaults = dict(kind_of(platform.kind(recipe.cluster.device)).ddp)
    if with_images or recipe.lora.rank:
        defaults = {}
    settings = {**defaults, **megatron.ddp}
    if not (megatron.distributed_optimizer and settings.get("overlap_grad_reduce")):  # it needs both
        defaults.pop("overlap_param_gather", None)
    settings = {**defaults, **megatron.ddp}
    for name, required in (("overlap_param_gather", "overlap_grad_reduce"), ("align_param_gather", "overlap_param_gather"), ("bucket_size", "overlap_grad_reduce")):  # fmt: skip
        if megatron.ddp.get(name) and not settings.get(required):
            problem = f"it has no effect without {required}, which is off"
            raise RecipeError(f"megatron.ddp.{name}", problem, f"set {required}: true", value=megatron.ddp[name])
    if with_images and settings.get("overlap_grad_reduce"):
        problem = (
            "a micro batch without images leaves the image encoder without gradients, and Megatron then waits for them"
        )
        raise RecipeError("megatron.ddp.overlap_grad_reduce", problem, "leave it out", value=True)
    return settings


def ddp_notice(recipe: Recipe, *, with_images: bool) -> str | None:
    """Return a notice of overlapped communication and the origin of the setting; None without overlap."""
    settings = ddp_settings(recipe, with_images=with_images)
    on = [name for name in ("overlap_grad_reduce", "overlap_param_gather") if settings.get(name)]
    if not on:
        return None
    device = platform.kind(recipe.cluster.device)
    origin = "set by the recipe" if all(name in recipe.megatron.ddp for name in on) else f"the default on {device}"
    return f"Trainers overlap communication and computation: megatron.ddp {' and '.join(on)} ({origin})"
