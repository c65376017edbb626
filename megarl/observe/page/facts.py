"""Facts about a run for its page: status, key figures, phases, waits, timeline. The run may be live, crashed or without a finished step."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable
from statistics import median_high
from typing import Any

import yaml

from megarl.observe.advice.advise import Advice, advise
from megarl.observe.advice.facts import Facts
from megarl.observe.advice.of_run import newest_samples, silence_of
from megarl.observe.console import clock, short
from megarl.observe.json_lines import read_lines
from megarl.observe.page.curves import rounded
from megarl.observe.run_dir import RunDirectory
from megarl.observe.sessions import effective_time, time_text

MAX_BARS = 120  # in the chart of phase times
MAX_SPANS = 1500  # in the timeline
TIMELINE_STEPS = 5
RECENT_STEPS = 20  # in the columns "last N steps" of the table of waits
_SILENT_SECONDS = 3600.0

_ACCURACIES = ("eval/greedy", "eval/dpo_accuracy")  # in addition to pass@k and maj@k
_LABELS = {"eval/loss": "Evaluation loss", "eval/dpo_accuracy": "Evaluation: chosen ahead"}

_WAITS = (
    ("Trainers wait for engines to sample", ("rollout/wait_seconds/engines",)),
    ("Trainers wait for scorers and judges", ("rollout/wait_seconds/scorers",)),
    ("Trainers wait for older groups (rollout.window)", ("rollout/wait_seconds/window",)),
    ("Trainers wait for a batch, in total", ("timing_s/gen",)),
    ("Trainers wait for running groups before an update", ("timing_s/drain",)),
    ("Trainers and loading engines wait for weight sync", ("timing_s/weight_sync",)),
    ("Trainers wait for a checkpoint", ("timing_s/save",)),
    ("Trainers wait for an evaluation", ("timing_s/eval",)),
    ("Trainers wait for restarts", ("timing_s/recovery", "fleet/restart_seconds")),
)
"""(text of the row, metrics with seconds, which are added)"""
_IDLE = "rollout/engines_idle"  # a share of the time
WAIT_METRICS = ("timing_s/step", _IDLE, *(name for _, names in _WAITS for name in names))

STATUS_TEXTS = {
    "running": ("running", "in progress"),
    "finished": ("good", "finished"),
    "failed": ("bad", "failed"),
    "stopped": ("warn", "stopped"),
    "killed": ("bad", "ended without closing (killed, or the machine went down)"),
    "unknown": ("warn", "status unknown"),
}


def advice_of(
    run_dir: RunDirectory,
    lines: list[dict[str, float]],
    settings: dict[str, Any],
    sessions: list[dict[str, Any]],
    notices: list[dict[str, Any]],
    status: str,
    spans: list[dict[str, Any]],
) -> list[Advice]:
    """Return the findings about a run. status: a key of `STATUS_TEXTS`. spans: the newest of its trace."""
    last = int(lines[-1]["step"]) if lines else 0
    silence = silence_of(run_dir, spans, last) if status == "running" else None
    ettr = _effective_time(run_dir, lines, sessions, status) or {}
    return advise(Facts(lines, settings, newest_samples(run_dir), sessions, notices, ettr, silence))


def read_summary(run_dir: RunDirectory, gaps: list[str]) -> dict[str, Any]:
    """Return the content of summary.json; {} and a sentence in `gaps` if it is missing or invalid."""
    if not run_dir.summary.exists():
        gaps.append("summary.json is missing: the run was not started by megarl's controller, or the file was removed.")
        return {}
    try:
        summary = json.loads(run_dir.summary.read_text())
    except ValueError:
        summary = None
    if not isinstance(summary, dict):
        gaps.append("summary.json could not be read.")
        return {}
    return summary


def parsed_settings(recipe: str | None) -> dict[str, Any]:
    """Return the settings of a resolved recipe's text; {} if it is missing or invalid."""
    try:
        settings = yaml.safe_load(recipe or "")
    except yaml.YAMLError:  # the page shows the recipe's text anyway
        return {}
    return settings if isinstance(settings, dict) else {}


def run_status(run_dir: RunDirectory, summary: dict[str, Any]) -> str:
    """Return the key of `STATUS_TEXTS` for the run. On a file system without locks a run that is silent for long may be dead."""
    status = summary.get("status", "unknown")
    if status == "running":
        holder = run_dir.holder()
        if holder is None:
            return "killed"
        if holder.get("unlocked") and time.time() - (run_dir.last_write() or 0.0) > _SILENT_SECONDS:
            return "unknown"
    return status if status in STATUS_TEXTS else "unknown"


def run_facts(
    lines: list[dict[str, float]], summary: dict[str, Any], settings: dict[str, Any], sessions: list[dict[str, Any]]
) -> list[tuple[str, str]]:
    """Return the facts under the title. Of `lines` it reads ``step`` and ``timing_s/step``."""
    last = int(lines[-1]["step"]) if lines else 0
    total = summary.get("total_steps") or (settings.get("train") or {}).get("steps")
    seconds = sum(line.get("timing_s/step", 0.0) for line in lines)
    model = summary.get("model") or (settings.get("model") or {}).get("path") or "unknown"
    facts = [("Model", str(model)), ("Steps", f"{last:,} of {total:,}" if total else f"{last:,}")]
    facts.append(("Time in steps", clock(seconds)))
    if start := sessions[-1].get("start") if sessions else None:
        facts.append(("Start took", clock(start["seconds"])))
    if len(sessions) > 1:
        facts.append(("Sessions", f"{len(sessions)} (resumed {len(sessions) - 1}×)"))
    return facts


def time_facts(
    run_dir: RunDirectory, lines: list[dict[str, float]], sessions: list[dict[str, Any]], status: str
) -> list[tuple[str, str]]:
    """Return the effective training time."""
    effective = _effective_time(run_dir, lines, sessions, status)
    return [("Effective time", time_text(effective))] if effective and effective["ratio"] is not None else []


def _effective_time(
    run_dir: RunDirectory, lines: list[dict[str, float]], sessions: list[dict[str, Any]], status: str
) -> dict[str, float | None] | None:
    """Return the effective training time; None if it is unknown. A killed run ends with its last line of metrics."""
    if not sessions or not lines:
        return None
    end = time.time() if status == "running" else run_dir.metrics.stat().st_mtime
    return effective_time(sessions, lines, read_lines(run_dir.discarded_metrics)[0], end)


def key_figures(lines: list[dict[str, float]]) -> list[dict[str, str]]:
    """Return the key figures at the top of the page."""
    figures = []
    names = {name for line in lines for name in line}
    accuracies = [name for name in names if name in _ACCURACIES or name.startswith(("eval/pass@", "eval/maj@"))]
    evaluations = sorted(accuracies, key=lambda name: (not name.endswith("pass@1"), name))[:3]
    for name in [name for name in ("eval/loss",) if name in names] + evaluations:
        values = [(int(line["step"]), line[name]) for line in lines if name in line]
        (first_step, first), (last_step, last) = values[0], values[-1]
        how = ".1%" if name in accuracies and all(0 <= value <= 1 for _, value in values) else ".4g"
        detail = f"at step {last_step:,}"
        if len(values) > 1:
            detail = f"from {first:{how}} (steps {first_step:,} to {last_step:,})"
        figures.append(
            {"label": _LABELS.get(name, name.removeprefix("eval/")), "value": f"{last:{how}}", "detail": detail}
        )
    # With filtered groups only the mean over all samples shows learning.
    reward = "rollout/rewards/mean" if "rollout/rewards/mean" in names else "critic/rewards/mean"
    for label, name, describe in (
        ("Reward", reward, _progress),
        ("Tokens/s/device", "perf/throughput", lambda values: (short(median_high(values)), "median step")),
        (
            "Step time",
            "timing_s/step",
            lambda values: (f"{median_high(values):.1f} s", f"median; longest {clock(max(values))}"),
        ),
        (
            "Train/rollout gap",
            "rollout/logprob_gap_mean",
            lambda values: (f"{median_high(values):.1e}", f"worst step {max(values):.1e}"),
        ),
    ):
        if name in names:
            value, detail = _describe_finite([line[name] for line in lines if name in line], describe)
            figures.append({"label": label, "value": value, "detail": detail})
    return figures


def _describe_finite(values: list[float], describe: Callable[[list[float]], tuple[str, str]]) -> tuple[str, str]:
    """Return (value, detail) from `describe` for the finite values, one per step; the detail counts the other steps."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "not finite", f"in all of {len(values):,} steps"
    value, detail = describe(finite)
    non_finite = len(values) - len(finite)
    return value, f"{detail}; not finite in {non_finite:,} of {len(values):,} steps" if non_finite else detail


def _progress(reward: list[float]) -> tuple[str, str]:
    width = max(1, min(10, len(reward) // 4))
    first, last = (sum(part) / len(part) for part in (reward[:width], reward[-width:]))
    ends = f"means of {width} steps" if width > 1 else f"{len(reward)} steps"
    return f"{last:.3f}", f"from {first:.3f} ({ends})" if len(reward) > 1 else "one step"


def phase_times(lines: list[dict[str, float]], nested: set[str]) -> dict[str, Any]:
    """Return the seconds of each phase by step, for stacked bars. In long runs a bar is the mean of several steps.

    Phases inside other phases (`nested`) are left out, because their time would count twice. "other" is the time of a step
    outside all phases.
    """
    timed = _timed(lines)
    per_bar = max(1, math.ceil(len(timed) / MAX_BARS))
    names = {name.removeprefix("timing_s/") for line in timed for name in line if name.startswith("timing_s/")}
    names -= {"step"} | nested
    bars = [timed[i : i + per_bar] for i in range(0, len(timed), per_bar)]
    seconds = {name: [_mean(bar, name) for bar in bars] for name in names}
    whole = [_mean(bar, "step") for bar in bars]
    other = [max(0.0, step - sum(column[i] for column in seconds.values())) for i, step in enumerate(whole)]
    totals = {name: _finite_sum(timed, f"timing_s/{name}") for name in names}
    ordered = sorted(names, key=lambda name: -totals[name])
    return {
        "x": [bar[0]["step"] if per_bar == 1 else (bar[0]["step"] + bar[-1]["step"]) / 2 for bar in bars],
        "names": [*ordered, "other"] if bars else [],
        "seconds": {name: [rounded(value) for value in column] for name, column in {**seconds, "other": other}.items()},
        "per_bar": per_bar,
    }


def _mean(bar: list[dict[str, float]], name: str) -> float:
    return sum(line.get(f"timing_s/{name}", 0.0) for line in bar) / len(bar)


def _timed(lines: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return the lines of training steps. Step 0 is the evaluation at the start."""
    return [line for line in lines if "timing_s/step" in line and line["step"] > 0]


def wait_times(lines: list[dict[str, float]]) -> dict[str, Any]:
    """Return who waits for whom: by row the mean seconds per step and their share of the steps' time, of the last steps and of all.

    ``steps``: how many steps count as the last; 0 before the first step. A metric that a line lacks is 0 in this step. Of `lines` it
    reads `WAIT_METRICS`.
    """
    timed = _timed(lines)
    recent = timed[-RECENT_STEPS:]
    names = {name for line in timed for name in line}
    rows = [
        {"text": text, "recent": _wait(recent, metrics), "all": _wait(timed, metrics)}
        for text, metrics in _WAITS
        if names & set(metrics)
    ]
    if _IDLE in names:
        text = "Engines without a group (rollout.max_staleness, loading, the end)"
        rows.append({"text": text, "recent": _idle(recent), "all": _idle(timed)})
    return {"steps": len(recent), "rows": rows}


def _wait(lines: list[dict[str, float]], names: tuple[str, ...]) -> dict[str, float | None]:
    seconds, whole = _finite_sum(lines, *names), _finite_sum(lines, "timing_s/step")
    return {"seconds": rounded(seconds / len(lines)), "share": rounded(seconds / whole) if whole else 0.0}


def _idle(lines: list[dict[str, float]]) -> dict[str, float | None]:
    shares = [line[_IDLE] for line in lines if math.isfinite(line.get(_IDLE, math.nan))]
    return {"seconds": None, "share": rounded(sum(shares) / len(shares)) if shares else None}


def _finite_sum(lines: list[dict[str, float]], *names: str) -> float:
    return sum(filter(math.isfinite, (line.get(name, 0.0) for line in lines for name in names)))


def nested_phases(spans: list[dict[str, Any]]) -> set[str]:
    """Return the phases that run only inside other phases. Training runs inside ``recovery`` too, which does not make it nested."""
    phases = [span for span in spans if span["process"] == "controller"]
    inside = {span["name"] for span in phases if "inside" in span["args"]}
    return inside - {span["name"] for span in phases if "inside" not in span["args"]}


def timeline(spans: list[dict[str, Any]], sessions: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the spans of the last steps: one row per phase of the controller, then one row per other track."""
    spans = _without_repeats(spans, sessions)
    steps = sorted({span["args"]["step"] for span in spans if "step" in span.get("args", {})})[-TIMELINE_STEPS:]
    if not steps:
        return {"rows": [], "spans": [], "steps": []}
    started = min(span["ts"] for span in spans if span.get("args", {}).get("step") in steps)
    recent = [span for span in spans if span["ts"] >= started][-MAX_SPANS:]
    rows: list[str] = []
    bars = []
    for span in sorted(recent, key=lambda span: (span["process"] != "controller", span["ts"])):
        is_phase = span["process"] == "controller"
        row = span["name"] if is_phase else f"{span['process']} / {span['thread']}"
        if row not in rows:
            rows.append(row)
        begin, seconds = (span["ts"] - started) / 1e6, span["dur"] / 1e6
        bars.append([rows.index(row), span["name"], round(begin, 4), round(seconds, 4), span["args"].get("step")])
    return {"rows": rows, "spans": bars, "steps": [steps[0], steps[-1]]}


def _without_repeats(spans: list[dict[str, Any]], sessions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the spans of the last session since it last went back to an earlier step, so that repeated steps are drawn once.

    If the last session has no spans of a step yet, those of earlier sessions count too.
    """
    recent = [span for span in spans if sessions and span["ts"] >= sessions[-1]["began"] * 1e6]
    if any("step" in span.get("args", {}) for span in recent):
        spans = recent
    phases = [s for s in spans if s["process"] == "controller" and "step" in s.get("args", {})]
    phases.sort(key=lambda span: span["ts"])
    begins = [
        after["ts"] for before, after in itertools.pairwise(phases) if after["args"]["step"] < before["args"]["step"]
    ]
    return [span for span in spans if span["ts"] >= begins[-1]] if begins else spans
