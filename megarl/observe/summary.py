"""summary.json: the key figures of a run, computed from its metrics. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Lines = Sequence[dict[str, float]]

_EVALUATED = {"accuracy": "eval/pass@1", "accuracy_greedy": "eval/greedy", "eval_loss": "eval/loss"}


def summarize(lines: Lines, start: dict[str, float]) -> dict[str, Any]:
    """Return the key figures of metrics.jsonl's `lines`. `start`: seconds before the first step, by session.

    ``accuracy_before`` and ``accuracy_after`` come from the first and the last evaluation, null without one:
    ``accuracy_*`` with sampling, ``accuracy_greedy_*`` greedy, ``eval_loss_*`` the loss on held-out rows. ``seconds`` are
    totals over the run by phase; ``step`` is the total of the steps. ``tokens_per_second`` is the number of prompt and
    response tokens trained on, over all devices, divided by the total time of the steps. ``logprob_gap_max`` is the
    largest of any step, or NaN if a step has NaN.
    """
    steps = [line for line in lines if line["step"] > 0]
    whole = sum(line.get("timing_s/step", 0.0) for line in steps)
    tokens = sum(line.get("perf/total_num_tokens", 0.0) for line in steps)
    gaps = [line["rollout/logprob_gap_max"] for line in steps if "rollout/logprob_gap_max" in line]
    figures: dict[str, Any] = {}
    for name, metric in _EVALUATED.items():
        values = [line[metric] for line in lines if metric in line]
        figures[f"{name}_before"] = values[0] if values else None
        figures[f"{name}_after"] = values[-1] if values else None
    return {
        **figures,
        "seconds": {"start": sum(start.values()), **_by_phase(lines)},
        "tokens_per_second": tokens / whole if whole else None,
        "logprob_gap_max": float(np.max(gaps)) if gaps else None,  # keeps a NaN, which max() may drop
    }


def before_and_after(lines: Lines) -> dict[str, dict[str, float]]:
    """Return the first and the last evaluation: ``{"first": {"step": 0, "eval/pass@1": 0.1}, "last": {...}}``."""
    evaluations = [
        {name: value for name, value in line.items() if name == "step" or name.startswith("eval/")}
        for line in lines
        if any(name.startswith("eval/") for name in line)
    ]
    return {"first": evaluations[0], "last": evaluations[-1]} if evaluations else {}


def _by_phase(lines: Lines) -> dict[str, float]:
    totals: dict[str, float] = {}
    for line in lines:
        for name, value in line.items():
            if name.startswith("timing_s/"):
                phase = name.removeprefix("timing_s/")
                totals[phase] = totals.get(phase, 0.0) + value
    return totals
