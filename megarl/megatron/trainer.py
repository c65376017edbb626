"""`Trainer`: model and optimizer of one rank. `PolicyTrainer` adds log-probs, updates of the policy and the reference policy.

Trainer processes call these classes (`megarl/trainer/`). critic.py has `CriticTrainer`. pipeline.py runs the passes over micro
batches, and optimizer.py makes the optimizer's step.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megarl.algorithms.inputs import LossInputs
from megarl.algorithms.spikes import GradNorms
from megarl.megatron import export
from megarl.megatron.batch import MicroBatch
from megarl.megatron.checkpoint import rank_part
from megarl.megatron.heads.output_heads import OutputHead, PolicyHead, SquaresHead
from megarl.megatron.lora.peft import gather_adapters, save_adapter
from megarl.megatron.lora.verify_merge import verify_merge
from megarl.megatron.model.build import Model, build, parameters_on_rank
from megarl.megatron.moe.recorded_routing import Routing
from megarl.megatron.moe.router_losses import RouterLosses
from megarl.megatron.native_layers.fused_kernels import description
from megarl.megatron.offload import Offloader
from megarl.megatron.optimizer import build_optimizer, guarded_step, learning_rate, loss_scale_of
from megarl.megatron.pipeline import Objective, configure, finish_param_gather, run_pipeline
from megarl.megatron.ranks import coordinates, gather, max_over_ranks, sum_metrics, sum_over_data_parallel
from megarl.megatron.reference import ReferencePolicy
from megarl.platform import Platform
from megarl.recipe.schema import Recipe

logger = logging.getLogger(__name__)


class Trainer:
    """Model and optimizer of one rank, for actor and critic. Every method that computes is collective.

    torch.distributed must be initialized and `platform.prepare()` must have run before this module is imported.
    All ranks with the same `coordinates.dp_rank` must receive the same micro batches. `weights_only`: load and export
    weights, without gradients or an optimizer.
    """

    role: str  # "actor" or "critic", the first part of metric names
    export_change = export.ExportChange()  # differences of `save_hf` from model.path

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
            # Without tensor values, commands/plan/count/parameters.py accounts for states on the host.
            config = recipe.actor.optimizer
            config = config if platform.holds_values else dataclasses.replace(config, extra={})
            distributed = recipe.megatron.distributed_optimizer
            self.optimizer = build_optimizer(config, self.model.chunks, dtype=self.model.dtype, distributed=distributed)
            if (scale := loss_scale_of(self.optimizer)) is not None:
                self.model.config.grad_scale_func = scale.scaled
        self.coordinates = coordinates()
        self.step = 0  # optimizer steps, skipped ones included
        self.norms: GradNorms | None = None  # with train.on_spike: skip or rollback; each update adds its norm
        self.reference: ReferencePolicy | None = None
        self._offloader = Offloader(self.model.chunks, self.optimizer)
        self._logged_no_offload = False

    def describe(self) -> dict[str, Any]:
        """Return facts for the log: the layout and this rank's parameter counts."""
        device, experts = self.platform.device(), bool(self.model.config.num_moe_experts)
        native = self.platform.uses_native_layers
        return {
            **self._layout(),
            "dtype": self.recipe.model.dtype,
            "parameters_on_rank": parameters_on_rank(self.model),
            "trained_parameters_on_rank": parameters_on_rank(self.model, trained=True),
            "can_offload": self.platform.can_offload,
            "kernels": description(device, self.model.dtype, experts=experts) if native else "",
        }

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every weight once, in full, under its Hugging Face name, on every rank, with adapters merged.

        Collective: exhaust the iterator on every rank.
        """
        yield from self._exported(self.model.merged_chunks)

    def _exported(self, chunks: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
        seen = set()
        self.finish_param_gather()
        for name, weight in export.without_gradients(self.model.bridge.export_weights(chunks)):
            # A tied embedding is on the first and the last pipeline stage, and is exported by both.
            if name not in seen:
                seen.add(name)
                yield name, weight

    def export_adapters(self, *, with_base: bool, check: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every adapter matrix under PEFT's names, on rank 0's host. Collective: exhaust it on every rank.

        `with_base`: yield the base weights first, without adapters. `check`: raise RuntimeError on rank 0 if the
        adapters differ from `export_weights`.
        """
        lora = self.model.lora
        assert lora is not None, "adapters need lora.rank > 0"
        if with_base:
            yield from self._exported(lora.base())
        with torch.no_grad():
            matrices = gather_adapters(lora)
        if check:
            verify_merge(lora, self._exported, matrices)
        yield from matrices.items()

    def save_hf(self, directory: Path) -> None:
        """Write a Hugging Face directory with the model's configuration and tokenizer."""
        export.save_hf(directory, Path(self.recipe.model.path), self.export_weights(), self.export_change)

    def compare_with_hf(self, directory: Path) -> export.ExportComparison:
        """Compare a directory that `save_hf` wrote with the current weights; see `export.compare_with_hf`."""
        source = Path(self.recipe.model.path)
        return export.compare_with_hf(directory, self.export_weights(), source, self.export_change)

    def stage_save(self, directory: Path, *, copy: bool) -> rank_part.Save:
        """Return this rank's part of a checkpoint, not yet started (`rank_part.Save`). The caller makes it atomic."""
        self.finish_param_gather()
        return rank_part.Save(
            directory,
            self.model,
            self.optimizer,
            step=self.step,
            layout=self._layout(),
            reference=self.reference,
            copy=copy,
        )

    def load(self, directory: Path) -> str | None:
        """Continue from a checkpoint: bit-identical in the same layout, else with the deviations in the returned notice.

        Raises ValueError for the checkpoint of another model.
        """
        self.finish_param_gather()
        if self.optimizer is None:
            rank_part.load_weights(directory, self.model)
            return None
        layout, seed = self._layout(), self.recipe.train.seed
        self.step, notice = rank_part.load(directory, self.model, self.optimizer, layout=layout, seed=seed)
        if self.reference is not None:
            rank_part.load_reference(directory, self.model, self.reference)
        return notice

    def offload_optimizer(self) -> None:
        """Free the device memory of gradients and optimizer states. Weights can still be exported."""
        if self._can_offload():
            self.finish_param_gather()
            self._offloader.offload_optimizer()
            self.platform.empty_cache()

    def offload_weights(self) -> None:
        """Free the device memory of the weights, after `offload_optimizer`. Call `onload` before any computation."""
        if self._can_offload():
            self._offloader.offload_weights()
            self.platform.empty_cache()

    def onload(self) -> None:
        """Undo `offload_optimizer` and `offload_weights`, if either was called."""
        if self.platform.can_offload:
            self._offloader.onload()

    def finish_param_gather(self) -> None:
        """Gather the full weights on every rank, before any read other than a training forward. Collective."""
        finish_param_gather(self.model.chunks)

    def _can_offload(self) -> bool:
        if not self.platform.can_offload and not self._logged_no_offload:
            logger.info("offload: nothing to do, this device's memory is the host's")
            self._logged_no_offload = True
        return self.platform.can_offload

    def _forward(self, micro_batches: list[MicroBatch], keep: Any, head: OutputHead) -> list[Any] | None:
        """Return the result of `keep` per micro batch, without gradients; None except on the last pipeline stage."""
        self.finish_param_gather()
        for chunk in self.model.chunks:
            chunk.eval()
        with torch.no_grad():
            return self._run(micro_batches, keep, head, forward_only=True)

    def _update(self, micro_batches: list[MicroBatch], loss: Any, head: OutputHead) -> dict[str, float] | None:
        """Run one optimizer step. `loss(batch, *head(...))`: see `pipeline.run_pipeline`.

        Returns the summed metrics and the step's metrics (see `train_step`); None except on the last pipeline stage.
        """
        contributions = self.accumulate(micro_batches, loss, head)
        self.step += 1
        config, device = self.recipe.actor.optimizer, self.platform.device()
        lr = learning_rate(self.step, config, self.total_steps)
        done = guarded_step(self.optimizer, lr=lr, clip_grad=config.clip_grad, norms=self.norms, device=device)
        if not done.updated:
            level = logging.INFO if done.overflowed else logging.WARNING
            logger.log(level, "optimizer step %d skipped: %s", self.step, done.obstacle)
        peak = max_over_ranks(self.platform.peak_memory(), device)
        routers = self._router_losses.metrics(self.role)
        if contributions is None:
            return None
        step_metrics = {
            **done.metrics(self.role),
            f"{self.role}/lr": lr,
            **routers,
            "perf/max_memory_allocated_gb": peak,
        }
        return {**sum_metrics(contributions, device), **step_metrics}

    def accumulate(self, micro_batches: list[MicroBatch], loss: Any, head: OutputHead) -> list[Any] | None:
        """Run forward and backward of a mini batch; the gradient stays in the DDP buffers.

        Returns the second result of `loss` per micro batch; None except on the last pipeline stage.
        """
        assert torch.is_grad_enabled(), "without gradients an update would change nothing"
        for chunk in self.model.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._router_losses.begin(micro_batches, self.platform.device())
        return self._run(micro_batches, loss, head, forward_only=False)

    def _run(self, micro_batches: list[MicroBatch], loss: Any, head: OutputHead, *, forward_only: bool) -> Any:
        return run_pipeline(
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

    role = "actor"

    def log_probs(
        self,
        micro_batches: list[MicroBatch],
        *,
        temperature: float,
        reference: bool = False,
        with_entropy: bool = False,
        record: bool = True,
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]] | None:
        """Compute log-probs [T] (float32) of each micro batch at token index, without gradients.

        Each comes with its entropy [T] (None unless `with_entropy`). The first token of a sequence has no prediction:
        0. `reference`: use the weights that `keep_reference` stored, with free routing. Otherwise, with
        `megatron.routing_replay=old_log_probs`, the pass records its routing into the micro batches, or, without
        `record`, replays the recorded routing. Returns None except on the last pipeline stage.
        """

        head = self.head(temperature, with_entropy, with_candidates=False)
        if reference:
            assert self.reference is not None, "keep_reference() comes first"
            self.finish_param_gather()
            with self.reference.in_place():
                free = [dataclasses.replace(batch, routing=None) for batch in micro_batches]
                return self._scores(free, head, record=False)
        return self._scores(micro_batches, head, record=record)

    def log_probs_and_squares(
        self, micro_batches: list[MicroBatch], *, temperature: float
    ) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """Compute log-probs [T] as `log_probs`, and each position's sum of squared probabilities [T]: both float32."""
        head = SquaresHead(temperature, self.model.vocab_size, self.recipe.megatron.fp32_head)
        return self._scores(micro_batches, head)

    def _scores(self, micro_batches: list[MicroBatch], head: OutputHead, *, record: bool = True) -> list[Any] | None:
        """Return the first two results of `head` per micro batch, recording routing as `log_probs` describes."""

        def keep(_: MicroBatch, first: torch.Tensor, second: torch.Tensor | None, *__: Any) -> tuple[Any, Any]:
            return first.new_zeros(()), (first, second)

        if record and self.recipe.megatron.routing_replay == "old_log_probs":
            for batch in micro_batches:
                batch.routing = Routing(recording=True)
        results = self._forward(micro_batches, keep, head)
        for batch in micro_batches:
            if batch.routing is not None:
                batch.routing.recording = False
        return results

    def train_step(
        self,
        micro_batches: list[MicroBatch],
        objective: Objective,
        observe: Callable[[MicroBatch, LossInputs], None] = lambda batch, inputs: None,
        *,
        temperature: float,
        with_entropy: bool,
    ) -> dict[str, float] | None:
        """Run one optimizer step on this rank's part of a mini batch.

        `objective` receives the LossInputs of each micro batch; `MicroBatch.vectors` holds all its fields except
        log-probs and entropy. It returns a loss normalized over the whole mini batch, and metrics that are summed over it.
        `observe` receives the same inputs before. Returns these sums over micro batches and data-parallel ranks, with
        actor/lr, `StepOutcome.metrics` (skipped_updates is 1 if the gradient norm was not finite or above
        the limit of `norms`: the weights are unchanged) and perf/max_memory_allocated_gb (`Platform.peak_memory`, maximum over
        ranks); None except on the last stage.
        """

        def loss(batch: MicroBatch, *head_outputs: torch.Tensor | None) -> tuple[torch.Tensor, Any]:
            inputs = self.loss_inputs(batch, *head_outputs)
            observe(batch, inputs)
            return objective(inputs)

        return self._update(micro_batches, loss, self.head(temperature, with_entropy, with_candidates=True))

    def loss_inputs(
        self,
        batch: MicroBatch,
        log_probs: torch.Tensor | None,
        entropy: torch.Tensor | None = None,
        top_log_probs: torch.Tensor | None = None,
    ) -> LossInputs:
        """Return the loss inputs of `batch`, with its vectors on the device."""
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
        """Gather `value` over data parallel (`ranks.gather`), on ranks of the last stage."""
        return gather(value)

    def sum_over_data_parallel(self, numbers: np.ndarray) -> np.ndarray:
        """Sum an array over data parallel (`ranks.sum_over_data_parallel`), on ranks of the last stage."""
        return sum_over_data_parallel(numbers)

    def keep_reference(self, step: int = 0) -> None:
        """Make the current weights, those after `step`, the reference policy. 0: before training."""
        self.finish_param_gather()
        if step == 0:
            self.reference = ReferencePolicy(self.model)
        else:
            assert self.reference is not None, "a run without a reference policy has nothing to refresh"
            self.reference.keep(step)

    def save_adapter(self, directory: Path) -> None:
        """Write the adapters as a PEFT directory (`lora.peft.save_adapter`)."""
        assert self.model.lora is not None, "adapters need lora.rank > 0"
        save_adapter(directory, self.model.lora, self.recipe.model.path)

    def head(self, temperature: float, with_entropy: bool, *, with_candidates: bool) -> PolicyHead:
        """Return the output head for log-probs, and optionally entropy and candidates."""
        shape, fp32 = (self.model.vocab_size, self.recipe.megatron.keep_logits), self.recipe.megatron.fp32_head
        return PolicyHead(temperature, with_entropy, with_candidates, *shape, fp32=fp32)
