"""Metrics of a batch, metrics by data source (of a step and of an evaluation), and metrics of agent loops. Pure functions.

A step has metrics by source even if all its groups have the same source; otherwise the metrics would be missing at such
steps. An evaluation has the same problems each time, so it has metrics by source only if its problems have several.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from megarl.recipe.algorithm import DynamicSamplingConfig
from megarl.rollout.admission import TriedGroup, UnusedGroups, accepted_groups
from megarl.rollout.source import Batch
from megarl.rollout.unscored_groups import sampled_again_counts, scoring_counts, scoring_notice
from megarl.types import Group, Metrics, Sample

# Names of sources may contain slashes, so the patterns match the end of a metric's name.
_FIGURES = r"rewards/mean|response_length/\w+|scoring_\w+|agent/.+"
_SAMPLED = re.compile(rf"source/(?P<source>.*)/(?P<figure>groups_\w+|samples|accuracy|truncated|{_FIGURES})", re.DOTALL)
_EVALUATED = re.compile(rf"eval/(?P<source>.*)/(?P<figure>problems|greedy|pass@\d+|maj@\d+|{_FIGURES})", re.DOTALL)

T = TypeVar("T")


def sampled_figures(tried: Sequence[TriedGroup]) -> Metrics:
    """Return the rollout metrics of a batch by data source, over all tried groups (filtered groups included).

    Means of rewards and accuracies are over the samples that have one. ``rewards/mean`` is missing for a source without
    scored samples, ``accuracy`` if the source's scorer reports none.
    """
    metrics: Metrics = {}
    for data_source, items in _parted(tried, lambda item: item.group.data_source).items():
        groups = [item.group for item in items]
        samples = [sample for group in groups for sample in group.samples]
        rewards = [sample.reward for sample in samples if not math.isnan(sample.reward)]
        accuracies = [sample.reward_parts["accuracy"] for sample in samples if "accuracy" in sample.reward_parts]
        lengths = [sample.response_length for sample in samples]
        metrics |= {
            f"source/{data_source}/groups_tried": float(len(groups)),
            f"source/{data_source}/groups_accepted": float(len(accepted_groups(items))),
            f"source/{data_source}/samples": float(len(samples)),
            **({f"source/{data_source}/rewards/mean": float(np.mean(rewards))} if rewards else {}),
            **({f"source/{data_source}/accuracy": float(np.mean(accuracies))} if accuracies else {}),
            f"source/{data_source}/response_length/mean": float(np.mean(lengths)),
            f"source/{data_source}/response_length/max": float(np.max(lengths)),
            f"source/{data_source}/truncated": float(np.mean([sample.truncated for sample in samples])),
        }
        metrics |= scoring_counts(groups, f"source/{data_source}")
        metrics |= {f"source/{data_source}/{metric}": value for metric, value in agent_figures(samples).items()}
    return metrics


def agent_figures(samples: Iterable[Sample]) -> Metrics:
    """Return the metrics of agent loops: means and shares over samples, counts over all their calls.

    Empty if no sample comes from an agent loop.
    """
    looped = [(sample, sample.tool_use) for sample in samples if sample.tool_use is not None]
    if not looped:
        return {}
    uses = [use for _, use in looped]
    return {
        "agent/turns/mean": float(np.mean([use.turns for use in uses])),
        "agent/turns/max": float(np.max([use.turns for use in uses])),
        "agent/calls/mean": float(np.mean([use.calls for use in uses])),
        "agent/failed_calls": float(sum(use.failures for use in uses)),
        "agent/tool_timeouts": float(sum(use.timeouts for use in uses)),
        "agent/tool_seconds/mean": float(np.mean([use.seconds for use in uses])),
        "agent/tool_seconds/max": float(np.max([use.seconds for use in uses])),
        "agent/ended/turns": float(np.mean([sample.finish_reason == "turns" for sample, _ in looped])),
        "agent/ended/tool_time": float(np.mean([sample.finish_reason == "tool_time" for sample, _ in looped])),
    }


def groups_by_source(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """Return the groups of each data source, sorted by the sources' names."""
    return _parted(groups, lambda group: group.data_source)


def of_sampled(metrics: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """Return the rollout metrics of a metrics line by data source: ``{"openai/gsm8k": {"rewards/mean": 0.5, ...}}``."""
    return _read(metrics, _SAMPLED)


def of_evaluated(metrics: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """Return the evaluation metrics of a metrics line by data source: ``{"openai/gsm8k": {"pass@1": 0.5, ...}}``."""
    return _read(metrics, _EVALUATED)


def source_of(metric: str) -> str | None:
    """Return the data source of `metric`; None if it is not a metric of a single source."""
    match = _SAMPLED.fullmatch(metric) or _EVALUATED.fullmatch(metric)
    return match["source"] if match else None


def _read(metrics: Mapping[str, T], pattern: re.Pattern[str]) -> dict[str, dict[str, T]]:
    figures: dict[str, dict[str, T]] = {}
    for name, value in metrics.items():
        if match := pattern.fullmatch(name):
            figures.setdefault(match["source"], {})[match["figure"]] = value
    return dict(sorted(figures.items()))


def _parted(items: Sequence[T], source_of_item: Callable[[T], str]) -> dict[str, list[T]]:
    parts: dict[str, list[T]] = {}
    for item in items:
        parts.setdefault(source_of_item(item), []).append(item)
    return dict(sorted(parts.items()))


def batch_metrics(tried: list[TriedGroup], count: int) -> dict[str, float]:
    """Return the rollout metrics of a batch, over all tried groups (filtered groups included)."""
    samples = [sample for item in tried for sample in item.group.samples]
    greedy = [item.group.greedy for item in tried if item.group.greedy is not None]
    rewards = [sample.reward for sample in samples if not math.isnan(sample.reward)]
    waits = [item.group.judge_seconds for item in tried if item.group.judge_seconds]
    accepted, unscored = len(accepted_groups(tried)), sum(bool(item.group.failures) for item in tried)
    return {
        "rollout/prompts_tried": float(len(tried)),
        "rollout/groups_filtered": float(len(tried) - accepted - unscored),
        "rollout/groups_missing": float(count - accepted),
        "rollout/groups_unscored": float(unscored),
        **scoring_counts([item.group for item in tried], "rollout"),
        **(sampled_again_counts([item.group for item in tried]) if any(sample.tool_use for sample in samples) else {}),
        **({"rollout/judge_seconds": float(np.mean(waits))} if waits else {}),
        **({"rollout/rewards/mean": float(np.mean(rewards))} if rewards else {}),
        "rollout/truncated": float(np.mean([sample.truncated for sample in samples])),
        "rollout/total_num_tokens": float(sum(sample.length for sample in [*samples, *greedy])),
        **_draft_figures(samples),
        **agent_figures(samples),
        **sampled_figures(tried),
    }


def unused_metrics(unused: UnusedGroups) -> Metrics:
    """Return the metrics of over-sampled groups that no batch took."""
    return {"rollout/groups_unused": float(unused.groups), "rollout/tokens_unused": float(unused.tokens)}


def _draft_figures(samples: Iterable[Sample]) -> Metrics:
    """Return the share of the drafts' tokens that became tokens of samples; {} without speculative decoding."""
    counts = [sample.drafts for sample in samples if sample.drafts is not None]
    proposed = sum(count.proposed for count in counts)
    return {"rollout/drafts_accepted": sum(count.accepted for count in counts) / proposed} if proposed else {}


def batch_of(
    tried: list[TriedGroup], count: int, dynamic: DynamicSamplingConfig, metrics: Metrics, notice: str | None
) -> Batch:
    """Return the batch of the accepted groups in `tried`. `metrics`, `notice`: additional ones of the batch.

    Raises RuntimeError if fewer than `count` are accepted and `when_exhausted` is fail.
    """
    groups = accepted_groups(tried)
    unscored = scoring_notice(
        [item.group for item in tried], "groups", "These groups were left out, and others sampled in their place."
    )
    notices = [text for text in (notice, unscored) if text is not None]
    if len(groups) < count:
        text = f"dynamic sampling found {len(groups)} of {count} groups with spread in {len(tried)} tries"
        if dynamic.when_exhausted == "fail":
            raise RuntimeError(
                f"{text}. The prompts may be too easy or too hard for the model: raise "
                "algorithm.dynamic_sampling.max_attempts, set when_exhausted=smaller, or change the data."
            )
        notices.append(f"{text}: this step trains on {len(groups)}")
    return Batch(groups, {**batch_metrics(tried, count), **metrics}, notices)
