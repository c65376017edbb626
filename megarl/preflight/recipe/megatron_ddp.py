"""Checks of `megatron.ddp`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megarl.errors import RecipeError

if TYPE_CHECKING:
    pass


def check_ddp(section: str, ddp: Mapping[str, Any], *, distributed_optimizer: bool, adapters: bool) -> None:
    """Raise RecipeError for settings in `section`.ddp that Megatron would refuse in a trainer process, or ignore."""

    def refuse(name: str, what: str, remedy: str) -> None:
        raise RecipeError(f"{section}.ddp.{name}", what, remedy, value=ddp[name])

    reduces, gathers = (bool(ddp.get(name)) for name in ("overlap_grad_reduce", "overlap_param_gather"))
    for name in (name for name, on in (("overlap_grad_reduce", reduces), ("overlap_param_gather", gathers)) if on):
        if adapters:
            what = "with lora.rank only adapters have gradients: there is next to nothing to overlap, and it was never tried"
            refuse(name, what, "leave it out")
    if gathers and not distributed_optimizer:
        what = "it gathers what the distributed optimizer's shards updated, and there are none"
        refuse("overlap_param_gather", what, f"set {section}.distributed_optimizer=true, or leave it out")
    if gathers and ddp.get("overlap_grad_reduce") is False:
        what = "Megatron cuts weights into buckets with overlap_grad_reduce alone: there would be one, and nothing to overlap"
        refuse("overlap_param_gather", what, "set overlap_grad_reduce: true")
    if ddp.get("align_param_gather") and ddp.get("overlap_param_gather") is False:
        refuse("align_param_gather", "it says when overlap_param_gather gathers, which is off", "leave it out")
    if ddp.get("bucket_size") is not None and ddp.get("overlap_grad_reduce") is False:
        refuse("bucket_size", "without overlap_grad_reduce Megatron has one bucket, and ignores it", "leave it out")
    size = ddp.get("bucket_size")
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        what = "a bucket has a whole number of parameters, and at least one parameter"
        refuse("bucket_size", what, "give a number of parameters, or leave it out")
    if ddp.get("pad_buckets_for_high_nccl_busbw") and not distributed_optimizer:
        what = "Megatron pads buckets for the distributed optimizer alone"
        refuse("pad_buckets_for_high_nccl_busbw", what, f"set {section}.distributed_optimizer=true, or leave it out")
