"""How long samples are assumed to be, and the micro batches that the trainers' own schedule makes of such ones. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megarl.batching.flops import ModelFlops
from megarl.batching.plan import plan_mini_batch
from megarl.hf.shape import ModelShape
from megarl.recipe.schema import Recipe

_SAMPLES = 256  # of a rank's mini batch that are laid out; more are taken to be as these


@dataclass(frozen=True)
class Lengths:
    """In tokens. Responses are spread evenly between `shortest` and `longest`; every prompt is as long as the others."""

    prompt: float
    shortest: float
    longest: float
    assumed: str

    @classmethod
    def of(cls, recipe: Recipe, response: float | None = None) -> Lengths:
        """`response`: their mean; None: half of the longest. Raises ValueError for one that cannot be."""
        limit = recipe.rollout.max_response_length
        if response is not None and not 1 <= response <= limit:
            raise ValueError(
                f"a mean response of {response:g} tokens is not between 1 and rollout.max_response_length={limit}"
            )
        mean = limit / 2 if response is None else response
        said = "half of the longest" if response is None else "as asked"
        prompt = recipe.data.max_prompt_length / 2
        return cls.around(prompt, mean, limit, f"mean response {mean:g} tokens, {said}; prompts {prompt:g}")

    @classmethod
    def around(cls, prompt: float, mean: float, limit: float, assumed: str) -> Lengths:
        """As far around the mean as `limit` allows, on both sides alike; a response has a token at least."""
        reach = min(mean - 1, limit - mean)
        return cls(prompt, mean - reach, mean + reach, assumed)

    @property
    def response(self) -> float:
        """The mean."""
        return (self.shortest + self.longest) / 2

    @property
    def tokens(self) -> float:
        """Of a sample, in the mean."""
        return self.prompt + self.response

    def longer(self, tokens: float) -> float:
        """Share of responses that are longer than so many tokens."""
        if self.longest <= self.shortest:
            return float(tokens < self.longest)
        return min(1.0, max(0.0, (self.longest - tokens) / (self.longest - self.shortest)))

    @property
    def age(self) -> float:
        """Tokens that a response has, in the mean over its own steps and over responses: E[l^2] / 2 E[l]."""
        low, high = self.shortest, self.longest
        return (low * low + low * high + high * high) / 3 / (2 * self.response)

    def samples(self, count: int) -> np.ndarray:
        """Lengths of `count` whole samples, int64."""
        places = (np.arange(count) + 0.5) / count
        return np.rint(self.prompt + self.shortest + (self.longest - self.shortest) * places).astype(np.int64)


@dataclass(frozen=True)
class MicroBatches:
    """Of one mini batch of one data-parallel rank; tokens and pairs of a micro batch in the mean, padding included."""

    count: int
    tokens: float
    pairs: float  # (query, key) of causal attention


def micro_batches(
    recipe: Recipe, shape: ModelShape, lengths: Lengths, samples: float, data_parallel: int, together: int = 1
) -> MicroBatches:
    """Lay out `samples` of one mini batch over `data_parallel` ranks, as `megarl/batching/packing.py` does. `together`: so many
    neighbours stay in one micro batch."""
    megatron = recipe.megatron
    own = max(together, math.ceil(samples / data_parallel))
    looked_at = max(1, min(own, _SAMPLES) // together) * together
    sizes = lengths.samples(looked_at)
    costs = ModelFlops(2 * shape.active, 2 * shape.layers * shape.attention.per_pair).of(sizes)
    multiple_of = megatron.pipeline_parallel if megatron.virtual_pipeline else 1
    every = 1 if own > looked_at else multiple_of
    plan = plan_mini_batch(sizes, costs, [together] * (looked_at // together), recipe, 1, every)[0]
    count = math.ceil(len(plan) * own / looked_at / multiple_of) * multiple_of
    tokens = pairs = 0.0
    for micro_batch in plan:
        members = np.array([sizes[slot.sample] for slot in micro_batch], dtype=np.float64)
        if not megatron.packing:  # each is computed as the longest
            members[:] = members.max()
        tokens += float(members.sum())
        pairs += float((members * (members + 1) / 2).sum())
    share = own / looked_at / count
    return MicroBatches(count, tokens * share, pairs * share)
