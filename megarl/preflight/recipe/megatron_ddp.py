"""Checks of `megatron.ddp`: fields that Megatron would reject in a trainer process, or ignore."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megarl.errors import RecipeError
from megarl.recipe.derived.megatron_ddp import refusal_of_ddp
from megarl.recipe.schema import Recipe
from megarl.recipe.trainers import MegatronConfig


def ddp_errors(recipe: Recipe) -> Iterator[RecipeError]:
    for section, megatron in (("megatron", recipe.megatron), ("critic.megatron", recipe.critic.megatron)):
        for name, value in megatron.ddp.items():
            if refusal := refusal_of_ddp(name):
                yield RecipeError(f"{section}.ddp.{name}", *refusal, value=value)
        adapters = section == "megatron" and recipe.lora.rank > 0
        for name, problem, remedy in _contradictions(section, megatron, adapters=adapters):
            yield RecipeError(f"{section}.ddp.{name}", problem, remedy, value=megatron.ddp[name])


def _contradictions(section: str, megatron: MegatronConfig, *, adapters: bool) -> Iterator[tuple[str, str, str]]:
    """Yield (field, problem, remedy). `adapters`: only LoRA adapters are trained."""
    ddp: Mapping[str, Any] = megatron.ddp
    reduces, gathers = (bool(ddp.get(name)) for name in ("overlap_grad_reduce", "overlap_param_gather"))
    with_optimizer = f"set {section}.distributed_optimizer=true, or leave it out"
    if adapters:
        problem = (
            "with lora.rank only adapters have gradients, so overlap gains little, and the combination is untested"
        )
        for name, on in (("overlap_grad_reduce", reduces), ("overlap_param_gather", gathers)):
            if on:
                yield name, problem, "leave it out"
    if gathers and not megatron.distributed_optimizer:
        problem = "it gathers parameters from the shards of the distributed optimizer, which is off"
        yield "overlap_param_gather", problem, with_optimizer
    if gathers and ddp.get("overlap_grad_reduce") is False:
        problem = (
            "Megatron divides weights into buckets only with overlap_grad_reduce; with one bucket nothing overlaps"
        )
        yield "overlap_param_gather", problem, "set overlap_grad_reduce: true"
    if ddp.get("align_param_gather") and ddp.get("overlap_param_gather") is False:
        yield "align_param_gather", "it schedules overlap_param_gather, which is off", "leave it out"
    size = ddp.get("bucket_size")
    if size is not None and ddp.get("overlap_grad_reduce") is False:
        problem = "without overlap_grad_reduce Megatron has one bucket and ignores the size"
        yield "bucket_size", problem, "leave it out"
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        problem = "a bucket's size must be an integer of at least 1, in parameters"
        yield "bucket_size", problem, "give a number of parameters, or leave it out"
    if ddp.get("pad_buckets_for_high_nccl_busbw") and not megatron.distributed_optimizer:
        problem = "Megatron pads buckets only for the distributed optimizer"
        yield "pad_buckets_for_high_nccl_busbw", problem, with_optimizer
