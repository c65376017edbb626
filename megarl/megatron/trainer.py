"""A trainer on one rank: log-probs, optimizer steps, weights out, checkpoints. The critic's own is in critic.py."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.algorithms.inputs import LossInputs
from megarl.megatron import checkpoint, export
from megarl.megatron.batch import MicroBatch
from megarl.megatron.kernels import description
from megarl.megatron.lora.peft import gathered, save_adapter
from megarl.megatron.lora.verify_merge import hold_to_merged
from megarl.megatron.model import Model, build, parameters_on_rank
from megarl.megatron.offload import Offloader, copy_to_host, swap
from megarl.megatron.optimizer import build_optimizer, guarded_step, learning_rate
from megarl.megatron.output_heads import Head, PolicyHead
from megarl.megatron.overlap import settle
from megarl.megatron.ranks import coordinates, gather, highest, sum_metrics
from megarl.megatron.router_losses import RouterLosses
from megarl.megatron.routing_replay import Routing
from megarl.megatron.step import Objective, StepMetrics, configure, run
from megarl.platform import Platform
from megarl.recipe.schema import Recipe

logger = logging.getLogger(__name__)


class Trainer:
    """Model and optimizer of one rank, whatever it learns. Every method that computes is collective: all ranks call
    it alike.

    torch.distributed is initialised and `platform.prepare()` has run before this module is imported.
    All ranks with the same `coordinates.dp_rank` are given the same micro batches.

    `weights_only`: it loads and exports, and has neither gradients nor an optimizer.
    """

    names: StepMetrics

    def __init__(
        self,
        recipe: Recipe,
        platform: Platform,
        total_optimizer_steps: int,
        *,
        value_head: bool = False,
        weights_only: bool = False,
    ) -> None:
        self.recipe, self.platform, self.total_steps = recipe, platform, total_optimizer_steps
        self.model: Model = build(recipe, platform, value_head=value_head, weights_only=weights_only)
        configure(self.model.config, self.model.chunks)
        self._router_losses = RouterLosses(
            self.model.chunks,
            self.model.config,
            balance=recipe.megatron.moe_aux_loss_coef,
            z=recipe.megatron.moe_z_loss_coef,
        )
        self.optimizer: Any = None
        if not weights_only:
            config = (
                recipe.actor.optimizer
            )  # without values, commands/plan/count/parameters.py accounts for states on the host
            config = config if platform.holds_values else dataclasses.replace(config, extra={})
            distributed = recipe.megatron.distributed_optimizer
            self.optimizer = build_optimizer(config, self.model.chunks, dtype=self.model.dtype, distributed=distributed)
        self.coordinates = coordinates()
        self.step = 0  # optimizer steps asked for so far, skipped ones included
        self._offloader = Offloader(self.model.chunks, self.optimizer)
        self._said_no_offload = False

    def describe(self) -> dict[str, Any]:
        """Facts for the log: the layout and this rank's parameters."""
        return {
            **self._layout(),
            "dtype": self.recipe.model.dtype,
            "parameters_on_rank": parameters_on_rank(self.model),
            "trained_parameters_on_rank": parameters_on_rank(self.model, trained=True),
            "can_offload": self.platform.can_offload,
            "kernels": self._kernels(),
        }

    def _kernels(self) -> str:
        """Kernels of this rank's native layers; "" with layers of another library."""
        config, device = self.model.config, self.platform.device()
        native = self.platform.uses_native_layers
        return description(device, self.model.dtype, experts=bool(config.num_moe_experts)) if native else ""

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight once, under its Hugging Face name, whole, on every rank. Collective: take all of them.

        They contain what adapters add; the model's own stay as they are.
        """
        yield from self._exported(self.model.merged_chunks)

    def _exported(self, chunks: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
        seen = set()
        self.settle()
        with torch.no_grad():
            for name, weight in self.model.bridge.export_weights(chunks):
                # A tied embedding stands on the first and the last pipeline stage, and comes from both.
                if name not in seen:
                    seen.add(name)
                    yield name, weight

    def export_adapters(self, *, with_base: bool, check: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Every adapter's matrices under PEFT's names, on rank 0 and its host; `with_base`: behind the model's own weights,
        as they are without them. Collective: take all of them. `check`: RuntimeError on rank 0 where they are not what
        `export_weights` has."""
        lora = self.model.lora
        assert lora is not None, "there are adapters only with lora.rank > 0"
        if with_base:
            yield from self._exported(lora.base())
        with torch.no_grad():
            matrices = gathered(lora)
        if check:
            hold_to_merged(lora, self._exported, matrices)
        yield from matrices.items()

    def save_hf(self, directory: Path) -> None:
        """Write a Hugging Face directory with the model's configuration and tokenizer."""
        export.save_hf(directory, Path(self.recipe.model.path), self.export_weights())

    def compare_with_hf(self, directory: Path) -> export.Comparison:
        """Hold what `save_hf` wrote to the weights here; see `export.compare_with_hf`."""
        return export.compare_with_hf(directory, self.export_weights(), Path(self.recipe.model.path))

    def stage_save(self, directory: Path, *, copy: bool) -> checkpoint.Save:
        """Return this rank's part of a checkpoint, still to be started; see `checkpoint.Save`. The caller makes it atomic."""
        self.settle()
        layout = self._layout()
        return checkpoint.Save(directory, self.model, self.optimizer, step=self.step, layout=layout, copy=copy)

    def load(self, directory: Path) -> str | None:
        """Continue from a checkpoint: bit for bit in its own layout, else with what the returned notice says.
        Raises ValueError for another model's."""
        self.settle()
        if self.optimizer is None:
            checkpoint.load_weights(directory, self.model)
            return None
        layout, seed = self._layout(), self.recipe.train.seed
        self.step, notice = checkpoint.load(directory, self.model, self.optimizer, layout=layout, seed=seed)
        return notice

    def offload_optimizer(self) -> None:
        """Give the device memory of gradients and optimizer states back. Weights can still be exported."""
        if self._can_offload():
            self.settle()
            self._offloader.offload_optimizer()
            self.platform.empty_cache()

    def offload_weights(self) -> None:
        """Give the weights' device memory back, after `offload_optimizer`. Nothing computes until `onload`."""
        if self._can_offload():
            self._offloader.offload_weights()
            self.platform.empty_cache()

    def onload(self) -> None:
        """Undo `offload_optimizer` and `offload_weights`, whichever came."""
        if self.platform.can_offload:
            self._offloader.onload()

    def settle(self) -> None:
        """Make the weights whole on every rank, before anything but a training forward reads them. Collective."""
        settle(self.model.chunks)

    def _can_offload(self) -> bool:
        if not self.platform.can_offload and not self._said_no_offload:
            logger.info("offload: nothing to do, this device's memory is the host's")
            self._said_no_offload = True
        return self.platform.can_offload

    def _forward(self, micro_batches: list[MicroBatch], keep: Any, head: Head) -> list[Any] | None:
        """What `keep` returns for each micro batch, without gradients; None off the last pipeline stage."""
        self.settle()
        for chunk in self.model.chunks:
            chunk.eval()
        with torch.no_grad():
            return self._run(micro_batches, keep, head, forward_only=True)

    def _update(self, micro_batches: list[MicroBatch], loss: Any, head: Head) -> dict[str, float] | None:
        """One optimizer step. `loss(batch, *what head returns)`: see `step.run`. Returns the summed metrics with the
        step's own, which `train_step` describes; None off the last pipeline stage."""
        contributions = self.accumulate(micro_batches, loss, head)
        self.step += 1
        config = self.recipe.actor.optimizer
        rate = learning_rate(self.step, config, self.total_steps)
        norm, updated = guarded_step(self.optimizer, lr=rate, clip_grad=config.clip_grad)
        if not updated:
            logger.warning("optimizer step %d skipped: the gradient norm is %s", self.step, norm)
        peak = highest(self.platform.peak_memory(), self.platform.device())
        routers = self._router_losses.metrics()
        if contributions is None:
            return None
        own = {
            self.names.grad_norm: norm,
            self.names.lr: rate,
            self.names.skipped: float(not updated),
            **{getattr(self.names, name): value for name, value in routers.items()},
            "perf/max_memory_allocated_gb": peak,
        }
        return {**sum_metrics(contributions, self.platform.device()), **own}

    def accumulate(self, micro_batches: list[MicroBatch], loss: Any, head: Head) -> list[Any] | None:
        """Forward and backward of a mini batch: its gradient is left in the DDP buffers. Returns what `loss` returned
        beside the loss, one a micro batch; None off the last pipeline stage."""
        for chunk in self.model.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._router_losses.begin(micro_batches, self.platform.device())
        return self._run(micro_batches, loss, head, forward_only=False)

    def _run(self, micro_batches: list[MicroBatch], loss: Any, head: Head, *, forward_only: bool) -> list[Any] | None:
        return run(
            self.model.chunks,
            self.model.config,
            micro_batches,
            loss,
            head,
            device=self.platform.device(),
            forward_only=forward_only,
            packing=self.recipe.megatron.packing,
            image_layout=self.model.image_layout,
        )

    def _on_device(self, vectors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: vector.to(self.platform.device()) for name, vector in vectors.items()}

    def _layout(self) -> dict[str, int]:
        m = self.recipe.megatron
        return {
            "processes": dist.get_world_size(),
            "tensor_parallel": m.tensor_parallel,
            "pipeline_parallel": m.pipeline_parallel,
            "virtual_pipeline": m.virtual_pipeline or 1,
            "context_parallel": m.context_parallel,
            "expert_parallel": m.expert_parallel,
            "expert_tensor_parallel": m.expert_tensor_parallel or 1,
            "distributed_optimizer": int(m.distributed_optimizer),
        }


class PolicyTrainer(Trainer):
    """The actor's trainer: log-probs, policy updates, and the reference policy's weights."""

    names = StepMetrics(
        "actor/grad_norm",
        "actor/lr",
        "actor/skipped_updates",
        "actor/moe_aux_loss",
        "actor/moe_z_loss",
        "actor/moe_load/max",
        "actor/moe_load/mean",
    )

    def __init__(
        self, recipe: Recipe, platform: Platform, total_optimizer_steps: int, *, weights_only: bool = False
    ) -> None:
        super().__init__(recipe, platform, total_optimizer_steps, weights_only=weights_only)
        self._reference: list[torch.Tensor] | None = None

    def log_probs(
        self,
        micro_batches: list[MicroBatch],
        *,
        temperature: float,
        reference: bool = False,
        with_entropy: bool = False,
        record: bool = True,
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]] | None:
        """Log-probs [T] of each micro batch at token index (float32), without gradients; and their entropy [T]
        where asked for, else None. The policy's own pass records its routing into the micro batches where
        `megatron.routing_replay` asks for it, or, without `record`, follows what was recorded; the reference's routers
        choose freely.

        The first token of a sequence is predicted by nothing: 0. With `reference`, those of the weights
        that `keep_reference` kept. On ranks of the last pipeline stage; elsewhere None.
        """

        def keep(_: MicroBatch, log_probs: torch.Tensor, entropy: torch.Tensor | None, __: None) -> tuple[Any, Any]:
            return log_probs.new_zeros(()), (log_probs, entropy)

        if reference:
            micro_batches = [dataclasses.replace(batch, routing=None) for batch in micro_batches]
        elif record and self.recipe.megatron.routing_replay == "old_log_probs":
            for batch in micro_batches:
                batch.routing = Routing(recording=True)
        with self._reference_weights() if reference else contextlib.nullcontext():
            results = self._forward(micro_batches, keep, self.head(temperature, with_entropy, with_candidates=False))
        for batch in micro_batches:
            if batch.routing is not None:
                batch.routing.recording = False
        return results

    def train_step(
        self,
        micro_batches: list[MicroBatch],
        objective: Objective,
        *,
        temperature: float,
        with_entropy: bool,
    ) -> dict[str, float] | None:
        """One optimizer step on this rank's part of a mini batch.

        `objective` is given the LossInputs of each micro batch, of whose fields `MicroBatch.vectors` holds all
        but log-probs and entropy. It returns a loss that is normalised over the whole mini batch, and metrics
        that add up over it. Returns the sums of the metrics over micro batches and data-parallel ranks, with
        actor/grad_norm (before clipping), actor/lr, actor/skipped_updates (1 where the gradient norm was not
        finite: the weights are then unchanged) and perf/max_memory_allocated_gb (`Platform.peak_memory` of the
        rank that has the highest); None off the last pipeline stage.
        """

        def loss(batch: MicroBatch, *of_tokens: torch.Tensor | None) -> tuple[torch.Tensor, Any]:
            return objective(self.loss_inputs(batch, *of_tokens))

        return self._update(micro_batches, loss, self.head(temperature, with_entropy, with_candidates=True))

    def loss_inputs(
        self,
        batch: MicroBatch,
        log_probs: torch.Tensor | None,
        entropy: torch.Tensor | None = None,
        top_log_probs: torch.Tensor | None = None,
    ) -> LossInputs:
        """What a loss sees of `batch`, with its vectors on the device."""
        assert log_probs is not None
        reference: dict[str, torch.Tensor] = {}
        if top_log_probs is not None:
            assert batch.candidates is not None
            reference = {"reference_top_log_probs": batch.candidates.log_probs}
        return LossInputs(
            log_probs=log_probs,
            entropy=entropy,
            top_log_probs=top_log_probs,
            lengths=batch.lengths,
            **self._on_device(batch.vectors | reference),
        )

    def gather(self, value: Any) -> list[Any]:
        """See `ranks.gather`; on ranks of the last stage."""
        return gather(value)

    def keep_reference(self) -> None:
        """Keep a copy of the current weights on the host: the reference policy.

        With adapters it takes no copy: the reference policy is the model without them.
        """
        if self.model.lora is None:
            self.settle()
            self._reference = [copy_to_host(weight) for weight in self._weights()]

    def reference_bytes(self) -> int:
        """Of host memory, that `keep_reference` takes."""
        return sum(self.reference_sizes())

    def reference_sizes(self) -> list[int]:
        """Bytes of each tensor that `keep_reference` copies to the host."""
        return [] if self.model.lora else [weight.nbytes for weight in self._weights()]

    def save_adapter(self, directory: Path) -> None:
        """Write the adapters as a directory that PEFT reads; see `lora.peft.save_adapter`."""
        assert self.model.lora is not None, "there are adapters only with lora.rank > 0"
        save_adapter(directory, self.model.lora, self.recipe.model.path)

    def head(self, temperature: float, with_entropy: bool, *, with_candidates: bool) -> PolicyHead:
        """What the last stage computes of hidden states."""
        return PolicyHead(
            temperature, with_entropy, with_candidates, self.model.vocab_size, self.recipe.megatron.keep_logits
        )

    def _weights(self) -> list[torch.Tensor]:
        """Parameters, and routing biases, which are buffers."""
        return [
            value.data
            for chunk in self.model.chunks
            for name, value in [*chunk.named_parameters(), *chunk.named_buffers()]
            if isinstance(value, torch.nn.Parameter) or name.endswith("expert_bias")
        ]

    @contextlib.contextmanager
    def _reference_weights(self) -> Iterator[None]:
        if self.model.lora is not None:
            with self.model.lora.off():
                yield
            return
        assert self._reference is not None, "keep_reference() comes first"
        self.settle()
        swap(self._weights(), self._reference)
        try:
            yield
        finally:
            swap(self._weights(), self._reference)
