"""Histories of metrics made for tests of advice: healthy ones, and what to change in them for a fault."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from megarl.observe.advice.facts import Facts
from megarl.recipe.schema import Recipe

Curve = Callable[[float], float]
"""A metric by progress, from 0 in the first step to 1 in the last."""


def line(first: float, last: float) -> Curve:
    return lambda t: first + (last - first) * t


def constant(value: float) -> Curve:
    return lambda t: value


def only_in(steps: set[int], of: int, value: float, otherwise: float) -> Curve:
    """`value` in these steps of `of`, else `otherwise`."""
    return lambda t: value if round(t * (of - 1)) + 1 in steps else otherwise


TIMES = {
    "timing_s/gen": constant(60),
    "timing_s/old_log_prob": constant(12),
    "timing_s/update_actor": constant(40),
    "timing_s/weight_sync": constant(4),
    "timing_s/step": constant(118),
}

RL: dict[str, Curve] = {
    "rollout/rewards/mean": lambda t: 0.2 + 0.5 * t**0.5,
    "critic/rewards/mean": lambda t: 0.2 + 0.5 * t**0.5,
    "critic/rewards/min": constant(0.0),
    "critic/rewards/max": constant(1.0),
    "critic/score/accuracy/mean": lambda t: 0.2 + 0.5 * t**0.5,
    "critic/advantages/max": constant(2.0),
    "critic/advantages/min": constant(-2.0),
    "actor/entropy": line(0.6, 0.25),
    "actor/pg_loss": constant(0.01),
    "actor/loss": constant(0.01),
    "actor/grad_norm": line(0.4, 0.3),
    "actor/pg_clipfrac": constant(0.002),
    "actor/ppo_kl": constant(0.0005),
    "actor/lr": constant(1e-6),
    "actor/skipped_updates": constant(0),
    "actor/micro_batches": constant(8),
    "response_length/mean": line(600, 900),
    "response_length/clip_ratio": constant(0.03),
    "rollout/truncated": constant(0.03),
    "rollout/prompts_tried": constant(32),
    "rollout/groups_unscored": constant(0),
    "rollout/scoring_failed": constant(0),
    "rollout/logprob_gap_mean": constant(0.006),
    "rollout/logprob_gap_k1": constant(0.0005),
    "rollout/mismatch_ess": constant(0.98),
    "rollout/engines_idle": constant(0.1),
    "rollout/wait_seconds/engines": constant(15),
    "rollout/wait_seconds/scorers": constant(2),
    "rollout/wait_seconds/window": constant(1),
    "perf/micro_batch_share": constant(0.9),
    "perf/micro_batch_imbalance": constant(1.1),
    "perf/total_num_tokens": constant(256 * 900),
    "data/epochs/train": line(0.02, 1.2),
    **TIMES,
}

SFT: dict[str, Curve] = {
    "actor/loss": lambda t: 0.8 + 1.2 * np.exp(-5 * t),
    "actor/pg_loss": lambda t: 0.8 + 1.2 * np.exp(-5 * t),
    "actor/grad_norm": line(1.0, 0.5),
    "actor/lr": lambda t: 1e-5 * (1 - t),
    "actor/skipped_updates": constant(0),
    "actor/micro_batches": constant(2),
    "response_length/mean": constant(300),
    "response_length/clip_ratio": constant(0.0),
    "perf/micro_batch_share": constant(0.9),
    "perf/total_num_tokens": constant(32 * 400),
    "data/epochs/train": line(0.02, 1.5),
    "timing_s/data": constant(0.1),
    "timing_s/update_actor": constant(5),
    "timing_s/step": constant(5.2),
}

DPO: dict[str, Curve] = {
    **SFT,
    "actor/dpo_accuracy": line(0.5, 0.85),
    "actor/dpo_margin": line(0.0, 1.5),
    "actor/dpo_reward_chosen": line(0.0, -0.3),
    "actor/dpo_reward_rejected": line(0.0, -1.8),
}


def lines(
    curves: Mapping[str, Curve | None], steps: int = 60, seed: int = 0, noise: float = 0.05
) -> list[dict[str, float]]:
    """Return a line per step: each curve's value with a relative noise. A curve of None is left out."""
    random = np.random.default_rng(seed)
    result = []
    for step in range(1, steps + 1):
        t = (step - 1) / max(1, steps - 1)
        values = {name: float(curve(t)) for name, curve in curves.items() if curve is not None}
        for name, value in values.items():
            if value not in (0.0, 1.0) and not name.startswith(
                ("timing_s/", "data/", "actor/lr", "actor/micro_batches")
            ):
                values[name] = value * (1 + noise * float(random.standard_normal()))
        result.append({"step": step, **values})
    return result


def with_evaluations(history: list[dict[str, float]], name: str, values: list[float]) -> list[dict[str, float]]:
    """Add evaluations: before the first step, then spread evenly up to the last one."""
    history = copy.deepcopy(history)
    for number, value in enumerate(values):
        if number == 0:
            history.insert(0, {"step": 0, name: value, "timing_s/eval": 20.0, "timing_s/step": 20.0})
        else:
            history[number * (len(history) - 1) // (len(values) - 1)][name] = value
    return history


def recipe(**settings: Any) -> dict[str, Any]:
    """Return a recipe as its file has it. `settings`: two underscores stand for a dot: ``algorithm__loss="gspo"``."""
    result = Recipe()
    result.model.path = "Qwen/Qwen3-1.7B"
    for key, value in settings.items():
        section: Any = result
        *path, name = key.split("__")
        for part in path:
            section = getattr(section, part)
        assert hasattr(section, name), key
        setattr(section, name, value)
    return dataclasses.asdict(result)


def facts(history: list[dict[str, float]], settings: dict[str, Any] | None = None, **more: Any) -> Facts:
    return Facts(lines=history, settings=settings or recipe(), **more)


def samples(groups: list[list[float]], text: str = "x = 3, so 2 x = 6", finish: str = "stop") -> list[dict[str, Any]]:
    """Return records of samples with these rewards."""
    return [
        {"group": group, "index": index, "reward": reward, "response": text, "finish_reason": finish}
        for group, rewards in enumerate(groups)
        for index, reward in enumerate(rewards)
    ]
