"""Handle on an engine that returns plain completions, and its start."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from megarl.cluster.base import Cluster
from megarl.engines.base import engine_name
from megarl.engines.specs import policy_spec
from megarl.recipe.schema import Recipe
from megarl.rollout.completions.server import CompletionServer
from megarl.rollout.engine_handle import EngineHandle
from megarl.rollout.start_engines import start_engine
from megarl.types import Completion, GenerationRequest

COMPLETION_SERVER = "megarl.rollout.completions.server:CompletionServer"
MOST_ALTERNATIVES = 20
"""Largest number of likely tokens that a request may ask for at each position of its prompt."""


class CompletionHandle(EngineHandle):
    """An engine of the policy (`CompletionServer`)."""

    def complete(self, requests: list[GenerationRequest]) -> Future[list[list[Completion]]]:
        """Sample `requests`; the result has each one's completions, in seed order."""
        return self._call(CompletionServer.complete, requests)


def start_completion_engines(recipe: Recipe, platform: Any, cluster: Cluster) -> list[CompletionHandle]:
    """Start the policy's engines; they load in the background, and get their weights from the first weight sync."""
    engines = []
    for number in range(recipe.rollout.engines):
        spec = policy_spec(recipe, engine_name(number), updated=True)
        spec = replace(spec, prompt_top_k=MOST_ALTERNATIVES)
        service = start_engine(recipe, spec, [], platform, cluster, server=COMPLETION_SERVER)
        engines.append(CompletionHandle(service))
    return engines
