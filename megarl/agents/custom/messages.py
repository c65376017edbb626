"""Messages between a rollout process and the process of one sample's loop. Plain data: they are pickled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megarl.agents.custom.interface import Sampled
from megarl.agents.tool import Context
from megarl.types import Sampling


@dataclass(frozen=True)
class SampleFacts:
    """A new sample; see `LoopSample`."""

    prompt: tuple[int, ...]
    messages: tuple[dict[str, Any], ...]
    context: Context
    data_source: str
    sampling: Sampling


@dataclass(frozen=True)
class LoopRequest:
    """Begin a sample, continue it with the answers to its requests, by number, or end it."""

    step: Literal["begin", "continue", "end"]
    facts: SampleFacts | None = None
    answers: Mapping[int, Sampled] = field(default_factory=dict)


@dataclass(frozen=True)
class Wanted:
    """A request for the engine; the settings are as in `LoopSample.generate`."""

    number: int
    tokens: tuple[int, ...]
    max_tokens: int | None = None
    settings: Mapping[str, float] = field(default_factory=dict)  # temperature, top_p, top_k, if the loop sets them


@dataclass(frozen=True)
class Finished:
    """The loop's `Response`, checked: see there."""

    tokens: tuple[int, ...]
    mask: tuple[bool, ...]
    prompt: tuple[int, ...] | None
    reward: float | None
    extra_info: dict[str, Any]
