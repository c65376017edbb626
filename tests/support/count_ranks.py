"""Memory that a planner's counting process counts, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megarl.commands.plan.count.rank_client import TRAINERS, EngineRequest, RankClient, RankRequest
from megarl.commands.plan.count.stages import counted
from megarl.commands.plan.count.types import PipelineStage
from megarl.recipe.schema import Recipe


def count_ranks(questions: Sequence[RankRequest | EngineRequest], child: str = TRAINERS) -> list[dict[str, Any]]:
    """Return the results in the order of the requests."""
    with RankClient(child=child) as client:
        return [future.result() for future in [client.submit(question) for question in questions]]


def count_stages(recipe: Recipe, actor_model: dict[str, Any], critic_model: dict[str, Any]) -> list[PipelineStage]:
    """Count every stage of the actor, then of the critic if there is one. `..._model`: config.json."""
    with RankClient() as client:
        return counted(recipe, actor_model, critic_model, client).stages
