"""Activations of pipeline stages that are alike, from two of them. Pure.

1F1B has one micro batch more under way for each stage from the last to the first (Narayanan et al. 2021, section 2.2.1), and
each keeps as much as any other; so stages with the same layers differ by a multiple of what one keeps. Running two of them
tells the rest, which is most of what a plan of a deep pipeline takes.
"""

from __future__ import annotations

from collections.abc import Mapping

from megarl.commands.plan.count.counts import Activations
from megarl.recipe.training import MegatronConfig


def may_be_alike(megatron: MegatronConfig) -> list[int]:
    """Stages that have neither the embedding nor the head. None with interleaving, where chunks take turns."""
    return [] if megatron.virtual_pipeline else list(range(1, megatron.pipeline_parallel - 1))


def ends(held: Mapping[int, object]) -> tuple[int, int]:
    """The first and the last of the stages that hold what the last one holds. `held`: of `may_be_alike`."""
    last = max(held)
    return min(stage for stage, one in held.items() if one == held[last]), last


def on_the_line(stage: int, ends: tuple[int, int], first: Activations, last: Activations) -> Activations:
    """Of a stage between the two `ends`, of which `first` and `last` are."""

    def at(name: str) -> int:
        one, other = getattr(first, name), getattr(last, name)
        return round(one + (other - one) * (stage - ends[0]) / (ends[1] - ends[0]))

    return Activations(**{name: at(name) for name in Activations.__dataclass_fields__})
