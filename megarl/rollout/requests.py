"""Requests of groups: functions of a group's number and the recipe."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.algorithms.catalogue import ADVANTAGES
from megarl.data.dataset import sampler_of
from megarl.data.prompts import PromptDataset
from megarl.recipe.derived.seeded import samples_are_seeded
from megarl.recipe.schema import Recipe
from megarl.rollout.begun_groups import BegunGroup, request_checksum
from megarl.types import GenerationRequest, Partial, Sampling, derived_seed


class Requests:
    """The requests of a run's training groups."""

    def __init__(self, recipe: Recipe, prompts: PromptDataset, stop_token_ids: Sequence[int]) -> None:
        self.recipe, self.prompts = recipe, prompts
        self.sampler = sampler_of(prompts, recipe.data, recipe.train.seed)
        rollout = recipe.rollout
        self._sampling = Sampling(
            n=rollout.samples_per_prompt,
            max_tokens=rollout.max_response_length,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop_token_ids=() if rollout.ignore_eos else tuple(stop_token_ids),
        )
        self._with_greedy = ADVANTAGES[recipe.algorithm.advantage].needs_greedy
        self._seeded = samples_are_seeded(recipe)

    def of(self, number: int) -> GenerationRequest:
        """Return the request of group `number`."""
        prompt = self.prompts[self.sampler.at(number)]
        seed = derived_seed(self.recipe.train.seed, number) if self._seeded else None
        return GenerationRequest(number, prompt, self._sampling, seed, with_greedy=self._with_greedy)

    def begun(self, number: int, partials: tuple[Partial, ...]) -> BegunGroup:
        """Return group `number` with its samples so far, for a checkpoint."""
        return BegunGroup(request_checksum(self.of(number)), partials)
