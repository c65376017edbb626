"""Distributions of response lengths: from three figures, from the samples of a run, or as `plan` assumes. Pure but for reading."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Protocol

import numpy as np

from megarl.commands.plan.time.lengths import Lengths
from megarl.errors import InputError
from megarl.observe.run_dir import RunDirectory
from megarl.observe.samples import read_samples, sample_steps
from megarl.recipe.schema import Recipe

_P99 = 2.3263  # standard deviations from the median to the 99th percentile of a normal distribution
_CHUNK = 256  # groups that are drawn together
_FEWEST = 100  # samples of a run, for a tail


class LengthDistribution(Protocol):
    """Lengths of responses, group by group."""

    @property
    def assumed(self) -> str:
        """Description for the reader."""
        ...

    @property
    def prompt(self) -> float:
        """Mean tokens of a prompt."""
        ...

    def draw(self, rng: np.random.Generator, groups: int, samples: int) -> np.ndarray:
        """Return lengths in tokens, int64 [groups, samples]."""
        ...


@dataclass(frozen=True)
class LogNormal:
    """Lengths exp(a + b + c) of which a is common to all, b to a group; b and c are normal. Limited to `longest`.

    Both parts have the same variance: prompts differ as much as the samples of a prompt do.
    """

    median: float
    p99: float
    longest: int
    prompt: float = 0.0

    @property
    def assumed(self) -> str:
        return (
            f"responses: log-normal, median {self.median:,.0f}, 99th percentile {self.p99:,.0f}, at most {self.longest:,} "
            "tokens; half of the variance is between prompts"
        )

    def draw(self, rng: np.random.Generator, groups: int, samples: int) -> np.ndarray:
        spread = math.log(self.p99 / self.median) / _P99 / math.sqrt(2)
        logs = math.log(self.median) + rng.normal(0, spread, (groups, 1)) + rng.normal(0, spread, (groups, samples))
        return np.clip(np.rint(np.exp(logs)), 1, self.longest).astype(np.int64)


@dataclass(frozen=True)
class Uniform:
    """Lengths spread evenly, as `plan` assumes."""

    lengths: Lengths

    @property
    def assumed(self) -> str:
        return f"responses: spread evenly from {self.lengths.shortest:,.0f} to {self.lengths.longest:,.0f} tokens"

    @property
    def prompt(self) -> float:
        return self.lengths.prompt

    def draw(self, rng: np.random.Generator, groups: int, samples: int) -> np.ndarray:
        drawn = rng.uniform(self.lengths.shortest, self.lengths.longest, (groups, samples))
        return np.maximum(1, np.rint(drawn)).astype(np.int64)


@dataclass(frozen=True)
class Recorded:
    """Lengths of a run's groups: a group is drawn, then its samples, both with replacement."""

    groups: tuple[tuple[int, ...], ...]
    prompt: float
    origin: str

    @property
    def assumed(self) -> str:
        every = np.concatenate([np.array(group) for group in self.groups])
        median, p99, longest = np.quantile(every, [0.5, 0.99, 1.0])
        return (
            f"responses: drawn from {len(every):,} samples of {len(self.groups):,} groups in {self.origin} (median "
            f"{median:,.0f}, 99th percentile {p99:,.0f}, longest {longest:,.0f} tokens)"
        )

    def draw(self, rng: np.random.Generator, groups: int, samples: int) -> np.ndarray:
        chosen = rng.integers(len(self.groups), size=groups)
        return np.stack([rng.choice(self.groups[index], samples) for index in chosen]).astype(np.int64)


class DrawnLengths:
    """Lengths of groups by number. They depend on the seed and the number alone, so all schedules sample the same groups."""

    def __init__(self, distribution: LengthDistribution, samples: int, seed: int) -> None:
        self._distribution, self._samples, self._seed = distribution, samples, seed
        self._chunks: list[list[list[int]]] = []

    def of(self, group: int) -> list[int]:
        """Return the response lengths of a group."""
        chunk, row = divmod(group, _CHUNK)
        while chunk >= len(self._chunks):
            rng = np.random.default_rng([self._seed, len(self._chunks)])
            self._chunks.append(self._distribution.draw(rng, _CHUNK, self._samples).tolist())
        return self._chunks[chunk][row]


def moments(distribution: LengthDistribution, seed: int, groups: int = 4096) -> tuple[float, float]:
    """Return the mean length of a response, and the mean tokens that a running response has: E[l^2] / 2 E[l]."""
    drawn = distribution.draw(np.random.default_rng(seed), groups, 4).astype(np.float64)
    return float(drawn.mean()), float((drawn**2).mean() / (2 * drawn.mean()))


def parse_lengths(text: str | None, response: float | None, recipe: Recipe) -> LengthDistribution:
    """Return the distribution of the options ``--lengths`` (`text`) and ``--response``; see docs/simulate.md.

    Raises InputError for options that contradict each other or the recipe, and for a run without enough samples.
    """
    if text is not None and response is not None:
        raise InputError("--lengths and --response both set the lengths of responses. Leave one of them out.")
    if text is None:
        try:
            return Uniform(Lengths.of(recipe, response))
        except ValueError as error:
            raise InputError(f"--response: {error}.") from error
    if "," not in text:
        distribution = recorded(Path(text))
        longest_sample = max(map(max, distribution.groups))
        if longest_sample > recipe.rollout.max_response_length:
            raise InputError(
                f"--lengths {text}: its longest response has {longest_sample:,} tokens, and rollout.max_response_length is "
                f"{recipe.rollout.max_response_length:,}. Raise it, or name a run with this limit."
            )
        return distribution
    try:
        median, p99, longest = (float(part) for part in text.split(","))
    except ValueError as error:
        raise InputError(
            f"--lengths {text}: expected MEDIAN,P99,MAX in tokens, e.g. 3000,30000,32768, or a run's directory."
        ) from error
    limit = recipe.rollout.max_response_length
    if not 1 <= median < p99 or not median < longest <= limit:
        raise InputError(
            f"--lengths {text}: expected 1 <= MEDIAN < P99 and MEDIAN < MAX <= rollout.max_response_length = {limit}."
        )
    return LogNormal(median, p99, int(longest), recipe.data.max_prompt_length / 2)


def recorded(run: Path) -> Recorded:
    """Return the lengths of a run's samples. Raises InputError for a directory without enough of them."""
    if not run.is_dir():
        raise InputError(
            f"--lengths {run}: no such directory. Name a run's directory, or give MEDIAN,P99,MAX, e.g. 3000,30000,32768."
        )
    run_dir = RunDirectory(run)
    groups: dict[tuple[int, object], list[int]] = {}
    prompts: list[int] = []
    steps = sample_steps(run_dir)
    for step in steps:
        for record in read_samples(run_dir, step):
            length = record.get("response_length")
            if isinstance(length, int) and length >= 1:
                groups.setdefault((step, record.get("group")), []).append(length)
                prompts.append(int(record.get("prompt_length", 0)))
    if len(prompts) < _FEWEST:
        raise InputError(
            f"--lengths {run}: {len(prompts)} samples in {run_dir.samples}, and a distribution needs at least {_FEWEST}. Name a "
            "run with more samples (observe.samples_per_step), or give MEDIAN,P99,MAX."
        )
    return Recorded(tuple(map(tuple, groups.values())), fmean(prompts), str(run))
