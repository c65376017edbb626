"""Data set rows as samples: SFT and DPO run the same loop as RL, with the rows' answers instead of sampled ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from megarl.data.dataset import sampler_of
from megarl.data.preferences import Pair, PreferenceDataset
from megarl.data.sft import Example, SFTDataset
from megarl.recipe.schema import Recipe
from megarl.rollout.source import Batch
from megarl.types import Group, InlineData, Sample, SampleTokens, Span


class DatasetSource:
    """A `SampleSource` over a data set. Groups carry the current weight version, so their staleness is 0."""

    def __init__(self, recipe: Recipe, examples: SFTDataset | PreferenceDataset):
        self.examples = examples
        self.sampler = sampler_of(examples, recipe.data, recipe.train.seed)
        self.consumed = 0
        self.version = 0

    def admit(self, version: int) -> None:
        self.version = version

    def take(self, count: int) -> Batch:
        numbers = range(self.consumed, self.consumed + count)
        self.consumed += count
        groups = [group_of(number, self.examples[self.sampler.at(number)], self.version) for number in numbers]
        return Batch(groups, self.sampler.metrics(numbers))

    def drain(self) -> None:
        """Return at once: rows are read when a batch is taken."""

    def load_newest(self, version: int) -> None:
        """Do nothing: there are no engines."""

    def state(self, *, interrupted: bool = False) -> dict[str, Any]:
        return {"counters": {"consumed": self.consumed}, "gathered": []}

    def restore(self, state: dict[str, Any]) -> None:
        self.consumed = state["counters"]["consumed"]

    def close(self) -> None:
        """Do nothing: no thread or process is running."""


def group_of(number: int, row: Example | Pair, version: int) -> Group:
    """Return a demonstration as a group of 1 sample, or a preference as a group of 2, the chosen answer first."""
    examples = row if isinstance(row, tuple) else (row,)
    vectors = [
        SampleTokens(
            tokens=example.tokens,
            loss_mask=example.loss_mask,
            rollout_log_probs=np.zeros(len(example.tokens), dtype=np.float32),
            text=example.text,
        )
        for example in examples
    ]
    data = InlineData(vectors)
    samples = [
        Sample(
            group=number,
            index=index,
            data=data,
            prompt_length=example.prompt_length,
            response_length=len(example.tokens) - example.prompt_length,
            loss_tokens=int(example.loss_mask.sum()),
            spans=(Span(0, version),),
        )
        for index, example in enumerate(examples)
    ]
    return Group(number, examples[0].uid, examples[0].data_source, samples)
