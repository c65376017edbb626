"""The critic's trainer on one rank: values and value-loss updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megarl.algorithms.values import ValueInputs
from megarl.megatron.batch import MicroBatch
from megarl.megatron.export import ExportChange
from megarl.megatron.heads.value_head import BIAS, WEIGHT, ValueHead
from megarl.megatron.trainer import Trainer
from megarl.platform import Platform
from megarl.recipe.schema import Recipe

ValueObjective = Callable[[ValueInputs], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""From loss inputs to a loss (scalar, normalized over the whole mini batch) and metrics (scalars to be summed)."""

_INPUTS = [field.name for field in dataclasses.fields(ValueInputs) if field.name != "values"]


def _as_token_classifier(config: dict[str, Any]) -> dict[str, Any]:
    """Convert a causal language model's config.json to a critic's."""
    architectures = [
        name.replace("ForCausalLM", "ForTokenClassification") for name in config.get("architectures") or []
    ]
    return {**config, "architectures": architectures, "id2label": {"0": "value"}, "label2id": {"value": 0}}


class CriticTrainer(Trainer):
    """Trainer of a model with a value head. `recipe`: the critic's view of the recipe (recipe/derived/critic_view.py)."""

    role = "critic"
    # A token classification model with one label, the value.
    export_change = ExportChange(removed=("lm_head.weight",), added=(WEIGHT, BIAS), config=_as_token_classifier)

    def __init__(
        self, recipe: Recipe, platform: Platform, total_optimizer_steps: int, *, weights_only: bool = False
    ) -> None:
        super().__init__(recipe, platform, total_optimizer_steps, value_head=True, weights_only=weights_only)

    def values(self, micro_batches: list[MicroBatch]) -> list[torch.Tensor] | None:
        """Compute values [T] (float32) of each micro batch at token index, without gradients.

        Entry t is the value of the state in which token t was chosen; the first token of a sequence has 0. Returns
        None except on the last pipeline stage.
        """

        def keep(_: MicroBatch, values: torch.Tensor) -> tuple[torch.Tensor, Any]:
            return values.new_zeros(()), values

        return self._forward(micro_batches, keep, ValueHead())

    def train_step(self, micro_batches: list[MicroBatch], objective: ValueObjective) -> dict[str, float] | None:
        """Run one optimizer step on this rank's part of a mini batch.

        `objective` receives the ValueInputs of each micro batch; `MicroBatch.vectors` holds all its fields except
        `values`. Normalization and result: see `PolicyTrainer.train_step`; metric names start with `critic/`.
        """

        def loss(batch: MicroBatch, values: torch.Tensor) -> tuple[torch.Tensor, Any]:
            vectors = self._on_device({name: batch.vectors[name] for name in _INPUTS})
            return objective(ValueInputs(values=values, **vectors))

        return self._update(micro_batches, loss, ValueHead())

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights of a token classification model; its head also has a bias: zero."""
        for name, weight in super().export_weights():
            yield name, weight
            if name == WEIGHT:
                yield BIAS, weight.new_zeros(1)
