"""Assumed lengths of samples, and the micro batches that the trainers' packing makes from them. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megarl.batching.flops import shape_flops, visible_pairs
from megarl.batching.limits import samples_together
from megarl.batching.plan import plan_mini_batch
from megarl.hf.shape import ModelShape
from megarl.recipe.schema import Recipe

_SAMPLES = 256  # samples of a rank's mini batch that are packed; larger mini batches are extrapolated


@dataclass(frozen=True)
class Lengths:
    """Lengths in tokens. Responses are spread evenly between `shortest` and `longest`; all prompts are equally long."""

    prompt: float
    shortest: float
    longest: float
    assumed: str

    @classmethod
    def of(cls, recipe: Recipe, response: float | None = None) -> Lengths:
        """Return lengths with the mean `response`; None: half of the longest. Raises ValueError for an impossible mean."""
        limit = recipe.rollout.max_response_length
        if response is not None and not 1 <= response <= limit:
            raise ValueError(
                f"a mean response of {response:g} tokens is not between 1 and rollout.max_response_length={limit}"
            )
        mean = limit / 2 if response is None else response
        origin = "half of the longest" if response is None else "as given"
        prompt = recipe.data.max_prompt_length / 2
        return cls.around(prompt, mean, limit, f"mean response {mean:g} tokens, {origin}; prompts {prompt:g}")

    @classmethod
    def around(cls, prompt: float, mean: float, limit: float, assumed: str) -> Lengths:
        """Return a symmetric range around the mean, as wide as 1 token and `limit` allow."""
        reach = min(mean - 1, limit - mean)
        return cls(prompt, mean - reach, mean + reach, assumed)

    @property
    def response(self) -> float:
        """Mean tokens of a response."""
        return (self.shortest + self.longest) / 2

    @property
    def tokens(self) -> float:
        """Mean tokens of a sample."""
        return self.prompt + self.response

    def longer(self, tokens: float) -> float:
        """Return the share of responses that are longer than `tokens`."""
        if self.longest <= self.shortest:
            return float(tokens < self.longest)
        return min(1.0, max(0.0, (self.longest - tokens) / (self.longest - self.shortest)))

    @property
    def age(self) -> float:
        """Mean tokens of a response during decoding, over its steps and over responses: E[l^2] / 2 E[l]."""
        low, high = self.shortest, self.longest
        return (low * low + low * high + high * high) / 3 / (2 * self.response)

    def samples(self, count: int) -> np.ndarray:
        """Return the lengths of `count` whole samples, int64."""
        places = (np.arange(count) + 0.5) / count
        return np.rint(self.prompt + self.shortest + (self.longest - self.shortest) * places).astype(np.int64)


@dataclass(frozen=True)
class MicroBatches:
    """Micro batches of one mini batch on one data-parallel rank; mean tokens and pairs, with padding."""

    count: int
    tokens: float
    pairs: float  # (query, key) of causal attention, as the mean over layers


def micro_batches(
    recipe: Recipe, shape: ModelShape, lengths: Lengths, samples: float, data_parallel: int
) -> MicroBatches:
    """Pack `samples` of a mini batch over `data_parallel` ranks, as `megarl/batching/packing.py` does."""
    megatron, together = recipe.megatron, samples_together(recipe)
    per_rank = max(together, math.ceil(samples / data_parallel))
    looked_at = max(1, min(per_rank, _SAMPLES) // together) * together
    sizes = lengths.samples(looked_at)
    costs = shape_flops(shape).of(sizes)
    multiple_of = megatron.pipeline_parallel if megatron.virtual_pipeline else 1
    every = 1 if per_rank > looked_at else multiple_of
    plan = plan_mini_batch(sizes, costs, [together] * (looked_at // together), recipe, 1, every)[0]
    count = math.ceil(len(plan) * per_rank / looked_at / multiple_of) * multiple_of
    tokens = pairs = 0.0
    for micro_batch in plan:
        members = np.array([sizes[slot.sample] for slot in micro_batch], dtype=np.float64)
        if not megatron.packing:  # padded: each sample is computed with the longest length
            members[:] = members.max()
        tokens += float(members.sum())
        pairs += float(visible_pairs(shape.attention, members).sum())
    share = per_rank / looked_at / count
    return MicroBatches(count, tokens * share, pairs * share)
