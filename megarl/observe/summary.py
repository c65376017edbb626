"""summary.json: the figures of a run that a person quotes, worked out from its metrics. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Lines = Sequence[dict[str, float]]

_EVALUATED = {"accuracy": "eval/pass@1", "accuracy_greedy": "eval/greedy", "eval_loss": "eval/loss"}


def summarise(lines: Lines, start: dict[str, float]) -> dict[str, Any]:
    """The key figures of metrics.jsonl's `lines`; `start` holds the seconds before the first step.

    ``accuracy_before`` and ``accuracy_after`` (sampled; ``accuracy_greedy_*``: greedy; ``eval_loss_*``: the loss on
    held-out rows) are the first and the last evaluation's, null where there was none. ``seconds`` are by phase over the whole run, ``step`` being
    the steps' total. ``tokens_per_second`` counts prompt and response tokens of what was trained on, over all
    devices, over the time of the steps. ``logprob_gap_max`` is the largest in any step, NaN where one is.
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


def _by_phase(lines: Lines) -> dict[str, float]:
    totals: dict[str, float] = {}
    for line in lines:
        for name, value in line.items():
            if name.startswith("timing_s/"):
                phase = name.removeprefix("timing_s/")
                totals[phase] = totals.get(phase, 0.0) + value
    return totals
