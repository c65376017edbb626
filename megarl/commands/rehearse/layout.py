"""A parallel layout for few processes that keeps every kind of parallelism, mostly with size 2. Pure."""

from __future__ import annotations

from dataclasses import replace

from megarl.recipe.trainers import MegatronConfig

PROCESSES = 2
_WITH_PIPELINE = 4  # for a pipeline combined with another kind of parallelism


def processes_for(megatron: MegatronConfig) -> int:
    """Return the default number of trainers for a layout."""
    largest = max(megatron.tensor_parallel, megatron.context_parallel, megatron.expert_parallel)
    return _WITH_PIPELINE if megatron.pipeline_parallel > 1 and largest > 1 else PROCESSES


def shrink_layout(megatron: MegatronConfig, trainers: int, processes: int) -> tuple[MegatronConfig, int]:
    """Return a layout for at most `processes` trainers, and its number of trainers.

    Each size above 1 becomes 2 while there are enough processes, in the order tensor, pipeline, context and data
    parallel. Expert parallel uses the ranks of one pipeline stage: its size is 2 if a stage has two ranks. Expert-tensor
    parallel has size 2 if a stage has four.
    """
    left = processes

    def halves(size: int) -> int:
        nonlocal left
        if size == 1 or left < 2:
            return 1
        left //= 2
        return 2

    tp, pp, cp = (
        halves(size) for size in (megatron.tensor_parallel, megatron.pipeline_parallel, megatron.context_parallel)
    )
    dp = halves(trainers // (megatron.tensor_parallel * megatron.pipeline_parallel * megatron.context_parallel))
    experts_in = tp * cp * dp
    ep = min(megatron.expert_parallel, 2, experts_in)
    etp = min(megatron.expert_tensor_parallel or 1, 2, experts_in // ep)
    small = with_sizes(megatron, tp, pp, cp, ep, None if megatron.expert_tensor_parallel is None else etp)
    return small, tp * pp * cp * dp


def with_sizes(
    megatron: MegatronConfig, tensor: int, pipeline: int, context: int, expert: int, expert_tensor: int | None
) -> MegatronConfig:
    """Return a layout with these parallel sizes. Settings that they exclude are left out, and stages stay uneven."""
    small = replace(
        megatron,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        context_parallel=context,
        expert_parallel=expert,
        expert_tensor_parallel=expert_tensor,
        sequence_parallel=megatron.sequence_parallel if tensor > 1 else None,
        virtual_pipeline=2 if megatron.virtual_pipeline and pipeline > 1 else None,
    )
    first, last = stage_layers(small)
    return replace(small, first_stage_layers=first, last_stage_layers=last)


def stage_layers(megatron: MegatronConfig) -> tuple[int | None, int | None]:
    """Return the number of layers of the first and the last of two stages, uneven if the recipe's stages are.

    None leaves the number to Megatron. With interleaving and two stages only one of them may be set.
    """
    if megatron.pipeline_parallel == 1:
        return None, None
    each = megatron.virtual_pipeline or 1
    first = 3 * each if megatron.first_stage_layers else None
    both = megatron.virtual_pipeline and first is not None
    last = each if megatron.last_stage_layers and not both else None
    return first, last


def layers_for(megatron: MegatronConfig) -> int:
    """Return a number of layers that the small layout divides: two, or four with uneven stages, per virtual stage.

    A layout that needs fewer layers also divides this number.
    """
    uneven = megatron.first_stage_layers or megatron.last_stage_layers
    return (4 if uneven else 2) * (megatron.virtual_pipeline or 1)
