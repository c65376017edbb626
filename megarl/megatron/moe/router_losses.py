"""Auxiliary losses of MoE routers, as sums over sequences and tokens: independent of how the batch is split.

Balance loss: DeepSeek-V3's complementary sequence-wise loss (arXiv 2412.19437, equations 17-20). For a sequence of
T tokens in a layer with N experts, K per token, and scores s normalized over the experts,

    sum_i f_i P_i,    f_i = N / (K T) x (number of tokens whose K highest scores include expert i),    P_i = mean of s_i.

It is 1 for even load. The K highest scores ignore group limits and routing biases. A sequence is weighted by its number of
tokens. z-loss: the square of logsumexp of a token's router logits (arXiv 2202.08906).

Both are means over all tokens of the mini batch's sequences that the loss counts, prompts included. Padding and filler
sequences are excluded. A layer adds coefficient x mean to the loss.

Megatron 0.16.1's losses are not used: they depend on which sequences share a micro batch, and count padding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter

from megarl.megatron.batch import MicroBatch, PackedStream
from megarl.megatron.current_batch import current

_BALANCE, _Z, _LOAD = 0, 1, slice(2, None)  # columns of the statistics


class RouterLosses:
    """Adds both losses to the gradient of every router of `chunks`, and measures losses and expert load."""

    def __init__(self, chunks: list[Any], config: Any, *, balance: float, z: float) -> None:
        self.config, self.balance, self.z = config, balance, z
        self._tokens = torch.ones(())  # in the mini batch, on the device
        self._statistics = torch.empty(0)
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, TopKRouter):
                    module.routing = partial(self._route, module, module.routing)

    def begin(self, micro_batches: list[MicroBatch], device: torch.device) -> None:
        """Start a mini batch; `micro_batches` is this data-parallel rank's part. Collective."""
        if not self.config.num_moe_experts:
            return
        tokens = torch.tensor(float(sum(batch.counted_tokens for batch in micro_batches)), device=device)
        dist.all_reduce(tokens, group=parallel_state.get_data_parallel_group())
        self._tokens = tokens.clamp_(min=1.0)
        self._statistics = torch.zeros(self.config.num_layers, self.config.num_moe_experts + 2, device=device)

    def metrics(self, role: str) -> dict[str, float]:
        """Return metrics of the mini batch since `begin`, over all ranks, of `role`. Collective.

        `moe_aux_loss` and `moe_z_loss`, each if its coefficient is set: mean over layers, before the coefficient.
        `moe_load/...`: tokens of a layer's busiest expert divided by the mean over its experts, as maximum and mean
        over layers; 1 is even. {} for a dense model.
        """
        if not self.config.num_moe_experts:
            return {}
        # Exactly one rank routes a token in a layer.
        dist.all_reduce(self._statistics)
        statistics = self._statistics.cpu().double()
        rows = statistics[statistics[:, _LOAD].sum(1) > 0]
        if not len(rows):
            return {}
        load = rows[:, _LOAD].amax(1) / rows[:, _LOAD].mean(1)
        metrics = {f"{role}/moe_load/max": load.max().item(), f"{role}/moe_load/mean": load.mean().item()}
        if self.balance:
            metrics[f"{role}/moe_aux_loss"] = rows[:, _BALANCE].mean().item()
        if self.z:
            metrics[f"{role}/moe_z_loss"] = rows[:, _Z].mean().item()
        return metrics

    def _route(
        self,
        router: TopKRouter,
        routing: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        logits: torch.Tensor,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run Megatron's `routing` of logits [s, b, experts], with the losses attached to its input and output."""
        if not (router.training and torch.is_grad_enabled()):  # recomputed forward passes run with gradients
            return routing(logits, **kwargs)
        stream = current()
        sequences = self._rows_here(stream)
        real = sequences >= 0
        statistics = self._statistics[router.layer_number - 1]
        if self.z:
            squares = logits.flatten(0, -2).float().logsumexp(-1).square()
            z = squares.where(real, squares.new_zeros(())).sum() / self._tokens
            logits = _Attach.apply(logits, self._scaled(self.z * z))
            statistics[_Z] += z.detach()
        probs, chosen = routing(logits, **kwargs)
        if self.balance:
            balance = self._balance(router, logits, sequences, stream.lengths)
            probs = _Attach.apply(probs, self._scaled(self.balance * balance))
            statistics[_BALANCE] += balance.detach()
        statistics[_LOAD] += real.float() @ chosen.float()
        return probs, chosen

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return a loss times the loss scale of float16, by which the optimizer divides all gradients."""
        scaled: torch.Tensor = self.config.grad_scale_func(loss) if self.config.grad_scale_func else loss
        return scaled

    def _balance(
        self, router: TopKRouter, logits: torch.Tensor, sequences: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        """Return this rank's part of the balance loss: the sum of its tokens' scores times their sequence's slopes."""
        top, scores = compute_routing_scores_for_aux_loss(
            logits.flatten(0, -2).float(), router.topk, router.score_function, fused=self.config.moe_router_fusion
        )
        members = (torch.arange(len(lengths), device=sequences.device)[:, None] == sequences).float()
        counts = members @ top.float()
        group = parallel_state.get_tensor_and_context_parallel_group()
        if dist.get_world_size(group) > 1:  # a sequence's tokens are spread over all these ranks
            dist.all_reduce(counts, group=group)
        # T x sum_i f_i P_i over all tokens of the mini batch: T cancels once.
        slopes = counts * (self.config.num_moe_experts / (router.topk * self._tokens * lengths[:, None]))
        return (scores * (members.T @ slopes)).sum()

    def _rows_here(self, stream: PackedStream) -> torch.Tensor:
        """Return the sequence index of each token on this rank's routers: sequence parallel splits them over TP ranks."""
        if not self.config.sequence_parallel:
            return stream.sequences
        rank = parallel_state.get_tensor_model_parallel_rank()
        return stream.sequences.chunk(self.config.tensor_model_parallel_size)[rank]


class _Attach(torch.autograd.Function):
    """Return `carrier` and give `loss` a gradient of 1 in the backward pass, independent of `carrier`'s gradient.

    Megatron's MoEAuxLossAutoScaler multiplies by a scale that its schedules set.
    """

    @staticmethod
    def forward(ctx: Any, carrier: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.dtype = loss.dtype
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad, torch.ones((), dtype=ctx.dtype, device=grad.device)
