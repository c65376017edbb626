"""A layout that few processes can have: what it cuts is still cut, in two. Pure."""

from __future__ import annotations

from dataclasses import replace

from megarl.recipe.training import MegatronConfig

PROCESSES = 2
_WITH_PIPELINE = 4  # where stages and something else are cut, so that both are


def processes_for(megatron: MegatronConfig) -> int:
    """How many trainers show what the layout does, where nobody says how many."""
    others = max(megatron.tensor_parallel, megatron.context_parallel, megatron.expert_parallel)
    return _WITH_PIPELINE if megatron.pipeline_parallel > 1 and others > 1 else PROCESSES


def shrink_layout(megatron: MegatronConfig, trainers: int, processes: int) -> tuple[MegatronConfig, int]:
    """The layout on at most `processes` trainers, and how many it takes.

    Each size above 1 becomes 2 while there are processes for it: tensor, pipeline, context, then data parallel. Expert
    parallel, which takes its ranks from all but the pipeline's, is 2 where there are two, and expert-tensor parallel
    where there are four.
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
    small = replace(
        megatron,
        tensor_parallel=tp,
        pipeline_parallel=pp,
        context_parallel=cp,
        expert_parallel=ep,
        expert_tensor_parallel=None if megatron.expert_tensor_parallel is None else etp,
        sequence_parallel=megatron.sequence_parallel if tp > 1 else None,
        virtual_pipeline=2 if megatron.virtual_pipeline and pp > 1 else None,
    )
    first, last = stage_layers(small)
    return replace(small, first_stage_layers=first, last_stage_layers=last), tp * pp * cp * dp


def stage_layers(megatron: MegatronConfig) -> tuple[int | None, int | None]:
    """Layers of the first and of the last of two stages, uneven where the recipe's are; None: not said. Of both Megatron
    interleaves more stages alone: of two, the last has what the first leaves."""
    if megatron.pipeline_parallel == 1:
        return None, None
    each = megatron.virtual_pipeline or 1
    first = 3 * each if megatron.first_stage_layers else None
    both = megatron.virtual_pipeline and first is not None
    last = each if megatron.last_stage_layers and not both else None
    return first, last


def layers_for(megatron: MegatronConfig) -> int:
    """Layers of a model that the shrunk layout divides: two, or four where stages are uneven, for each virtual stage. Those
    of one layout divide in another with fewer as well."""
    uneven = megatron.first_stage_layers or megatron.last_stage_layers
    return (4 if uneven else 2) * (megatron.virtual_pipeline or 1)
