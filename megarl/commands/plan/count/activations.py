"""Activation memory of a training step, counted by running the real passes on tensors without memory.

The trainer's model, heads and pipeline schedule run; see `commands/plan/meta_device.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state

from megarl.algorithms.objective import teacher_top_k
from megarl.commands.plan.count import assumptions
from megarl.commands.plan.count.live_tensors import MemoryCounter
from megarl.commands.plan.count.types import Activations
from megarl.commands.plan.count.workload import Workload, image_grid, image_tokens
from megarl.commands.plan.meta_device import KnownValues
from megarl.megatron.batch import Candidates, MicroBatch, padded_lengths
from megarl.megatron.heads.output_heads import language_model, output_weight
from megarl.megatron.heads.value_head import ValueHead
from megarl.megatron.images import Images
from megarl.megatron.layout import uses_sequence_parallel
from megarl.megatron.trainer import PolicyTrainer, Trainer


def activations(trainer: Trainer, work: Workload) -> Activations:
    """Count the peak of each pass of `trainer` over `work`. The trainer's platform must hold no values."""
    assert not trainer.platform.holds_values
    config, device = trainer.model.config, trainer.platform.device()
    assume(trainer, work)
    ways, width = assumptions.stand_ins(config), _vocabulary(trainer)
    seen = {}
    for phase, compute in passes(trainer, work).items():
        forget()
        values = nullcontext() if trainer.model.image_layout is None else KnownValues()
        with MemoryCounter(device, ways, backwards=work.backwards, width=width) as live, values:
            compute()
        seen[phase] = live
    forward, update = seen["forward"], seen["update"]
    return Activations(
        forward.peak,
        update.peak,
        update.kept,
        seen["optimizer"].peak,
        forward_logits=forward.wide,
        update_logits=update.wide,
    )


def assume(trainer: Trainer, work: Workload) -> None:
    """Install the values that this rank would receive from other ranks (process-wide)."""
    assumptions.install(_arriving(trainer, work.lengths))


def passes(trainer: Trainer, work: Workload) -> dict[str, Callable[[], Any]]:
    """Return the computing phases of a step in their order: phase name -> function. Collective."""
    recipe = trainer.recipe
    batches = micro_batches(trainer, work)
    if isinstance(trainer, PolicyTrainer):
        temperature, with_entropy = recipe.rollout.temperature, recipe.train.source == "rollout"
        compute: Any = partial(trainer.log_probs, temperature=temperature)
        head: Any = trainer.head(temperature, with_entropy, with_candidates=True)
    else:
        compute, head = trainer.values, ValueHead()  # type: ignore[attr-defined]

    def optimize() -> None:
        trainer.optimizer.prepare_grads()
        trainer.optimizer.step_with_ready_grads()

    # Without gradients nothing is kept between micro batches, except between the rounds of interleaving.
    return {
        "forward": partial(compute, batches if len(trainer.model.chunks) > 1 else batches[:1]),
        "update": partial(trainer.accumulate, batches, _loss, head),
        "optimizer": optimize,
    }


def forget() -> None:
    """Drop Megatron's global buffer of gathered sequences, so that each pass counts it again."""
    parallel_state.get_global_memory_buffer().buffer.clear()


def _loss(_: MicroBatch, *of_tokens: torch.Tensor | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sum everything that the head computes. The real losses add some vectors with one number per token."""
    terms = [vector.float().sum() for vector in of_tokens if vector is not None]
    return torch.stack(terms).sum(), {}


def micro_batches(trainer: Trainer, work: Workload) -> list[MicroBatch]:
    total, top_k = sum(work.lengths), teacher_top_k(trainer.recipe.algorithm)
    candidates = None
    if top_k and isinstance(trainer, PolicyTrainer):
        tokens = torch.zeros(total, top_k, dtype=torch.int32)
        candidates = Candidates(tokens, torch.zeros(total, top_k))
    tokens = torch.zeros(total, dtype=torch.int64)
    images = largest_images(trainer, work.lengths)
    return [MicroBatch(tokens, work.lengths, candidates=candidates, images=images) for _ in range(work.micro_batches)]


def largest_images(trainer: Trainer, lengths: list[int]) -> Images | None:
    """Return one image per sequence, as large as it may be. None for a model without images."""
    layout = trainer.model.image_layout
    if layout is None:
        return None
    most = image_tokens(trainer.recipe.data, pixels=(layout.merge * layout.patch) ** 2)
    grids = [[1, *image_grid(min(most, length), layout.merge)] for length in lengths]
    pixels = torch.zeros(sum(rows * columns for _, rows, columns in grids), layout.patch_values)
    return Images(pixels, torch.tensor(grids), sequences=list(range(len(lengths))), starts=[0] * len(lengths))


def _vocabulary(trainer: Trainer) -> int | None:
    """Return the number of logits per token on this rank. None on other pipeline stages and in a critic."""
    last = language_model(trainer.model.chunks[-1])
    return int(output_weight(last).shape[0]) if last.post_process and isinstance(trainer, PolicyTrainer) else None


def _arriving(trainer: Trainer, lengths: list[int]) -> list[int]:
    """Return the shape of the hidden states between pipeline stages."""
    megatron, config = trainer.recipe.megatron, trainer.model.config
    pieces = megatron.tensor_parallel if uses_sequence_parallel(megatron) else 1
    padded = padded_lengths(
        lengths, context_parallel=megatron.context_parallel, sequence_parallel=pieces, packing=megatron.packing
    )
    sequences = 1 if megatron.packing else len(lengths)
    return [sum(padded) // sequences // megatron.context_parallel // pieces, sequences, config.hidden_size]
