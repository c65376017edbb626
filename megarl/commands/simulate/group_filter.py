"""Groups that dynamic sampling filters: their share, from an option or from a run, and the draw of each group. Pure but for reading."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megarl.errors import InputError
from megarl.observe.metrics import read_metrics
from megarl.observe.run_dir import RunDirectory
from megarl.observe.samples import read_samples, sample_steps
from megarl.recipe.algorithm import DynamicSamplingConfig

ASSUMED_SHARE = 0.5  # of the groups, without an option and without a run
_STREAM = 7  # separates these draws from those of the lengths
_FEWEST = 20  # groups of a run, for a share


@dataclass(frozen=True)
class FilteredShare:
    """Share of the groups that dynamic sampling filters, at least 0 and below 1. `assumed`: its source, for the reader."""

    share: float
    assumed: str


class DrawnFilter:
    """The filtered groups, by number. They depend on the seed and the number alone, not on the lengths of the responses."""

    def __init__(self, share: float, seed: int) -> None:
        self._share, self._seed = share, seed
        self._drawn: list[float] = []

    def passes(self, group: int) -> bool:
        """Return whether a batch may take a group."""
        while group >= len(self._drawn):
            self._drawn.append(np.random.default_rng([_STREAM + self._seed, len(self._drawn)]).random())
        return self._drawn[group] >= self._share


def parse_filtered(text: str | None, lengths: str | None, dynamic: DynamicSamplingConfig) -> FilteredShare | None:
    """Return the share of the option ``--filtered`` (`text`); None if the recipe filters no group.

    Without the option, a run that is named by ``--lengths`` (`lengths`) gives the share, else `ASSUMED_SHARE` is assumed. Raises
    InputError for a share outside of [0, 1), a recipe without dynamic sampling, and a run of ``--filtered`` without enough groups.
    """
    if not dynamic.enabled:
        if text is not None:
            raise InputError(
                f"--filtered {text}: the recipe filters no group. Leave the option out, or set "
                "algorithm.dynamic_sampling.enabled=true."
            )
        return None
    if text is None and lengths is not None and "," not in lengths:
        try:
            return recorded_share(Path(lengths), dynamic.metric, "--lengths")
        except InputError as error:  # the run has lengths all the same
            return FilteredShare(
                ASSUMED_SHARE, f"{ASSUMED_SHARE:.0%} of the groups are filtered (assumed, because {error})"
            )
    if text is None:
        return FilteredShare(
            ASSUMED_SHARE, f"{ASSUMED_SHARE:.0%} of the groups are filtered (assumed: give --filtered SHARE or a run)"
        )
    try:
        share = float(text)
    except ValueError:
        return recorded_share(Path(text), dynamic.metric, "--filtered")
    if not 0 <= share < 1:
        raise InputError(f"--filtered {text}: expected a share of the groups, at least 0 and below 1, e.g. 0.5.")
    return FilteredShare(share, f"{share:.0%} of the groups are filtered")


def recorded_share(run: Path, metric: str, option: str) -> FilteredShare:
    """Return the share of a run's groups that have equal values of `metric`, for the command-line option `option`.

    A run with dynamic sampling has counted them; otherwise the share is that of the groups in samples/. Raises InputError for a
    directory without enough groups, or without the metric.
    """
    if not run.is_dir():
        raise InputError(f"{option} {run}: no such directory. Name a run's directory, or give --filtered 0.5.")
    run_dir = RunDirectory(run)
    if _has_filter(run_dir):
        lines = read_metrics(run_dir.metrics)
        names = ("rollout/prompts_tried", "rollout/groups_unscored")
        tried, unscored = (sum(line.get(name, 0.0) for line in lines) for name in names)
        tried -= unscored  # the filter has not seen these
        equal = sum(line.get("rollout/groups_filtered", 0.0) for line in lines)
        source = f"{tried:,.0f} groups in {run_dir.metrics}"
    else:
        tried, equal = _equal_groups(run_dir, metric, option)
        source = f"{tried:,.0f} groups in {run_dir.samples}, with equal values of '{metric}'"
    if tried < _FEWEST:
        raise InputError(
            f"{option} {run}: {source}, and a share needs at least {_FEWEST}. Name a run with more groups, or give --filtered 0.5."
        )
    if equal == tried:
        raise InputError(
            f"{option} {run}: all of {source}, so no batch would be complete. Name another run, or give --filtered 0.5."
        )
    return FilteredShare(equal / tried, f"{equal / tried:.0%} of the groups are filtered, as of {source}")


def _has_filter(run_dir: RunDirectory) -> bool:
    """Return whether the run used dynamic sampling; False without its recipe."""
    content: Any = yaml.safe_load(run_dir.recipe.read_text()) if run_dir.recipe.is_file() else {}
    for name in ("algorithm", "dynamic_sampling", "enabled"):
        content = content.get(name, {}) if isinstance(content, dict) else {}
    return content is True


def _equal_groups(run_dir: RunDirectory, metric: str, option: str) -> tuple[int, int]:
    """Return the number of groups with several samples in samples/, and of those with equal values of `metric`."""
    groups: dict[tuple[int, Any], list[float]] = {}
    for step in sample_steps(run_dir):
        for record in read_samples(run_dir, step):
            value = record.get("reward") if metric == "reward" else record.get("parts", {}).get(metric)
            if not isinstance(value, (int, float)):
                raise InputError(
                    f"{option} {run_dir.path}: step {step} in {run_dir.samples} has a sample without '{metric}' "
                    "(algorithm.dynamic_sampling.metric). Name a run whose scorer reports it, or give --filtered 0.5."
                )
            groups.setdefault((step, record.get("group")), []).append(value)
    several = [values for values in groups.values() if len(values) > 1]
    return len(several), sum(len(set(values)) == 1 for values in several)
