"""Checks that sections share: unused sections, optimizer, mini batches and parallel sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megarl.errors import RecipeError
from megarl.recipe.trainers import MegatronConfig, OptimizerConfig


def unused_section_errors(section: str, settings: Any, cause: str, remedy: str) -> Iterator[RecipeError]:
    """Yield an error if the unused `section` has `settings` other than the defaults."""
    if settings != type(settings)():
        yield RecipeError(section, f"{cause}, so this section has no effect", f"{remedy}, or leave the section out")


def optimizer_errors(section: str, optimizer: OptimizerConfig) -> Iterator[RecipeError]:
    """Yield an error for betas outside [0, 1), also for NaN."""
    if not all(0 <= beta < 1 for beta in optimizer.betas):
        key, betas = f"{section}.optimizer.betas", list(optimizer.betas)
        yield RecipeError(key, "each beta must be in [0, 1)", "set betas in this range, e.g. [0.9, 0.98]", value=betas)


def mini_batch_errors(section: str, mini_batches: int, prompts: int) -> Iterator[RecipeError]:
    """Yield an error if the `prompts` of a step do not divide into `section`.mini_batches."""
    if prompts % mini_batches:
        problem = f"data.prompts_per_step = {prompts} does not divide into {mini_batches} mini batches"
        remedy = "choose a divisor of data.prompts_per_step"
        yield RecipeError(f"{section}.mini_batches", problem, remedy, value=mini_batches)


def parallel_size_errors(key: str, processes: int, section: str, megatron: MegatronConfig) -> Iterator[RecipeError]:
    """Yield errors of parallel sizes that are invalid for every model. `key`: the setting of the number of `processes`."""
    model_parallel = megatron.tensor_parallel * megatron.pipeline_parallel * megatron.context_parallel
    if processes % model_parallel:
        yield RecipeError(
            key,
            f"{processes} processes do not divide by tensor {megatron.tensor_parallel} x pipeline "
            f"{megatron.pipeline_parallel} x context {megatron.context_parallel} = {model_parallel}",
            f"use a multiple of {model_parallel}, or change the sizes in {section}",
            value=processes,
        )
    if megatron.sequence_parallel and megatron.tensor_parallel == 1:
        yield RecipeError(
            f"{section}.sequence_parallel",
            "sequence parallelism divides sequences over tensor-parallel ranks, and tensor_parallel is 1",
            f"set {section}.tensor_parallel > 1, or leave it out",
            value=True,
        )
    if megatron.virtual_pipeline and megatron.pipeline_parallel == 1:
        yield RecipeError(
            f"{section}.virtual_pipeline",
            "an interleaved schedule needs more than one pipeline stage",
            f"set {section}.pipeline_parallel > 1, or unset it",
            value=megatron.virtual_pipeline,
        )
