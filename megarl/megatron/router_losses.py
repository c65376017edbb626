"""The router's auxiliary losses, at one strength whatever the layout."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megarl.megatron.batch import MicroBatch, padded_lengths


class RouterLosses:
    """Gives Megatron's load-balancing and z-loss the weight of a mean over the mini batch.

    With gradients that simply add up (see step.py), Megatron weighs the loss of each micro batch and rank
    by its own number of tokens and leaves the division by all tokens to a later scaling, which we do not
    have: the coefficients are divided instead, before each step.

    The load-balancing loss is not linear in the tokens it is computed over, so it still depends on which
    sequences share a micro batch, and it counts padding (at most 2 x CP tokens a sequence and TP tokens a
    micro batch). Over TP, PP, EP and data parallel, the same micro batches give the same loss.
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        names = ("moe_aux_loss_coeff", "moe_z_loss_coeff") if config.num_moe_experts else ()
        self.coefficients = {name: getattr(config, name) for name in names if getattr(config, name)}

    def scale(self, micro_batches: list[MicroBatch], device: torch.device) -> None:
        """Set this step's coefficients. Collective over data-parallel ranks, if there is any such loss."""
        if not self.coefficients:
            return
        tokens = torch.tensor(float(sum(self._tokens_on_rank(batch) for batch in micro_batches)), device=device)
        dist.all_reduce(tokens, group=parallel_state.get_data_parallel_group())
        for name, value in self.coefficients.items():
            scaled = [v / tokens.item() for v in value] if isinstance(value, list) else value / tokens.item()
            setattr(self.config, name, scaled)

    def _tokens_on_rank(self, batch: MicroBatch) -> int:
        """Tokens of the packed stream that one router sees."""
        context = self.config.context_parallel_size
        pieces = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        padded = padded_lengths(batch.lengths, context_parallel=context, sequence_parallel=pieces)
        return sum(padded) // (context * pieces)
