"""Demonstrations as a source of samples: SFT is the same loop with answers that nobody had to sample."""

from __future__ import annotations

from typing import Any

import numpy as np

from megarl.config.schema import Recipe
from megarl.data.sampler import Sampler
from megarl.data.sft import Example, SFTDataset
from megarl.rollout.source import Batch
from megarl.types import Group, InlineData, Sample, SampleTokens


class SFTSource:
    """A Source over a data set. Each example is a group of one, always of the current version."""

    def __init__(self, recipe: Recipe, examples: SFTDataset):
        self.examples = examples
        self.sampler = Sampler(len(examples), recipe.train.seed, recipe.data.shuffle)
        self.consumed = 0
        self.version = 0

    def admit(self, version: int) -> None:
        self.version = version

    def take(self, count: int) -> Batch:
        numbers = range(self.consumed, self.consumed + count)
        self.consumed += count
        return Batch([_group(number, self.examples[self.sampler.at(number)], self.version) for number in numbers])

    def drain(self) -> None:
        """Nothing is ever under way."""

    def state(self) -> dict[str, Any]:
        return {"counters": {"consumed": self.consumed}, "gathered": []}

    def restore(self, state: dict[str, Any]) -> None:
        self.consumed = state["counters"]["consumed"]

    def close(self) -> None:
        """Nothing to stop."""


def _group(number: int, example: Example, version: int) -> Group:
    vectors = SampleTokens(
        tokens=example.tokens,
        loss_mask=example.loss_mask,
        rollout_log_probs=np.zeros(len(example.tokens), dtype=np.float32),
        text=example.text,
    )
    sample = Sample(
        group=number,
        index=0,
        data=InlineData([vectors]),
        prompt_length=example.prompt_length,
        response_length=len(example.tokens) - example.prompt_length,
        loss_tokens=int(example.loss_mask.sum()),
        version=version,
    )
    return Group(number, example.uid, example.data_source, version, [sample])
