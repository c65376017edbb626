"""Device memory that the phases of a step take beyond what a rank holds, counted by running them on tensors without
memory: the real model, heads and pipeline schedule."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from megarl.algorithms.objective import teacher_top_k
from megarl.megatron.batch import Candidates, MicroBatch, padded_lengths
from megarl.megatron.layout import uses_sequence_parallel
from megarl.megatron.trainer import PolicyTrainer, Trainer
from megarl.megatron.value_head import ValueHead
from megarl.planner import assumed
from megarl.planner.counts import Activations
from megarl.planner.live import Live
from megarl.planner.workload import Workload


def activations(trainer: Trainer, work: Workload) -> Activations:
    """Run the passes of `trainer`, whose platform holds no values, over `work`."""
    assert not trainer.platform.holds_values
    config, device = trainer.model.config, trainer.platform.device()
    if trainer.model.image_layout is not None:
        raise ValueError("the activations of a model that reads images depend on its images, and are not counted yet")
    if config.num_moe_experts and config.moe_token_dispatcher_type != "alltoall":
        raise ValueError(
            f"activations under megatron.extra.moe_token_dispatcher_type={config.moe_token_dispatcher_type} are not "
            "counted yet: only alltoall's are"
        )
    assume(trainer, work)
    ways = assumed.stand_ins(config)
    seen = {}
    for phase, compute in passes(trainer, work).items():
        with Live(device, ways, backwards=work.backwards) as live:
            compute()
        seen[phase] = live
    return Activations(seen["forward"].peak, seen["update"].peak, seen["update"].kept, seen["optimizer"].peak)


def assume(trainer: Trainer, work: Workload) -> None:
    """Put what other ranks would say into place, process-wide."""
    assumed.install(_arriving(trainer, work.lengths))


def passes(trainer: Trainer, work: Workload) -> dict[str, Callable[[], Any]]:
    """The phases of a step that compute, in their order. Collective."""
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

    # Without gradients nothing is kept from one micro batch to the next, but for the rounds of interleaving.
    return {
        "forward": partial(compute, batches if len(trainer.model.chunks) > 1 else batches[:1]),
        "update": partial(trainer.accumulate, batches, _loss, head),
        "optimizer": optimize,
    }


def _loss(_: MicroBatch, *of_tokens: torch.Tensor | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A loss that reads all that the head computes. The real ones add some vectors of a number a token."""
    terms = [vector.float().sum() for vector in of_tokens if vector is not None]
    return torch.stack(terms).sum(), {}


def micro_batches(trainer: Trainer, work: Workload) -> list[MicroBatch]:
    total, top_k = sum(work.lengths), teacher_top_k(trainer.recipe.algorithm)
    candidates = None
    if top_k and isinstance(trainer, PolicyTrainer):
        tokens = torch.zeros(total, top_k, dtype=torch.int32)
        candidates = Candidates(tokens, torch.zeros(total, top_k))
    tokens = torch.zeros(total, dtype=torch.int64)
    return [MicroBatch(tokens, work.lengths, candidates=candidates) for _ in range(work.micro_batches)]


def _arriving(trainer: Trainer, lengths: list[int]) -> list[int]:
    """Shape of the hidden states between pipeline stages."""
    megatron, config = trainer.recipe.megatron, trainer.model.config
    pieces = megatron.tensor_parallel if uses_sequence_parallel(megatron) else 1
    padded = padded_lengths(
        lengths, context_parallel=megatron.context_parallel, sequence_parallel=pieces, packing=megatron.packing
    )
    sequences = 1 if megatron.packing else len(lengths)
    return [sum(padded) // sequences // megatron.context_parallel // pieces, sequences, config.hidden_size]
