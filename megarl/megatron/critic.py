"""The critic's trainer on one rank: values and value updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megarl.algorithms.values import ValueInputs
from megarl.megatron import export
from megarl.megatron.batch import MicroBatch
from megarl.megatron.step import StepMetrics
from megarl.megatron.trainer import Trainer
from megarl.megatron.value_head import BIAS, WEIGHT, ValueHead
from megarl.platform import Platform
from megarl.recipe.schema import Recipe

ValueObjective = Callable[[ValueInputs], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""From loss inputs to a loss (scalar, already normalised over everything) and metrics (scalars to be summed)."""

_INPUTS = [field.name for field in dataclasses.fields(ValueInputs) if field.name != "values"]


def _as_token_classifier(config: dict[str, Any]) -> dict[str, Any]:
    """A causal language model's config.json, as that of the critic that came of it."""
    architectures = [
        name.replace("ForCausalLM", "ForTokenClassification") for name in config.get("architectures") or []
    ]
    return {**config, "architectures": architectures, "id2label": {"0": "value"}, "label2id": {"value": 0}}


_CHANGE = export.Change(without=("lm_head.weight",), beyond=(WEIGHT, BIAS), config=_as_token_classifier)


class CriticTrainer(Trainer):
    """A model with a value head. `recipe` is the critic's view of the recipe: see recipe/critic.py."""

    names = StepMetrics(
        "critic/grad_norm",
        "critic/lr",
        "critic/skipped_updates",
        "critic/moe_aux_loss",
        "critic/moe_z_loss",
        "critic/moe_load/max",
        "critic/moe_load/mean",
    )

    def __init__(
        self, recipe: Recipe, platform: Platform, total_optimizer_steps: int, *, weights_only: bool = False
    ) -> None:
        super().__init__(recipe, platform, total_optimizer_steps, value_head=True, weights_only=weights_only)

    def values(self, micro_batches: list[MicroBatch]) -> list[torch.Tensor] | None:
        """Values [T] of each micro batch at token index (float32), without gradients: entry t is the value of the
        state in which token t was chosen; the first of a sequence is 0. On ranks of the last pipeline stage;
        elsewhere None."""

        def keep(_: MicroBatch, values: torch.Tensor) -> tuple[torch.Tensor, Any]:
            return values.new_zeros(()), values

        return self._forward(micro_batches, keep, ValueHead())

    def train_step(self, micro_batches: list[MicroBatch], objective: ValueObjective) -> dict[str, float] | None:
        """One optimizer step on this rank's part of a mini batch.

        `objective` is given the ValueInputs of each micro batch, of whose fields `MicroBatch.vectors` holds all but
        `values`. Normalisation, what is returned and where: as `PolicyTrainer.train_step`, with `critic/` for
        `actor/`.
        """

        def loss(batch: MicroBatch, values: torch.Tensor) -> tuple[torch.Tensor, Any]:
            vectors = self._on_device({name: batch.vectors[name] for name in _INPUTS})
            return objective(ValueInputs(values=values, **vectors))

        return self._update(micro_batches, loss, ValueHead())

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As a token classification model's, whose head has a bias: zero."""
        for name, weight in super().export_weights():
            yield name, weight
            if name == WEIGHT:
                yield BIAS, weight.new_zeros(1)

    def save_hf(self, directory: Path) -> None:
        """Write a Hugging Face directory: a token classification model with one label, the value."""
        export.save_hf(directory, Path(self.recipe.model.path), self.export_weights(), _CHANGE)

    def compare_with_hf(self, directory: Path) -> export.Comparison:
        return export.compare_with_hf(directory, self.export_weights(), Path(self.recipe.model.path), _CHANGE)
