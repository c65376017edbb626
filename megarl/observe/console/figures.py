"""Text of a step's figures, times and remaining time."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from megarl.observe.sources import brief_table
from megarl.rollout.metrics import source_of

SOURCES_SHOWN = 8
_NOT_PHASES = ("timing_s/step",)
_EVERY_STEP_UP_TO = 100  # runs of at most this many steps print one line per step
_LINES = 20  # approximate number of lines of a longer run


class Pace:
    """Estimates the remaining time from the last 20 steps."""

    def __init__(self, steps_done: int, total_steps: int) -> None:
        self.step, self.total = steps_done, total_steps
        self._seconds: deque[float] = deque(maxlen=20)

    def done(self, step: int, seconds: float) -> None:
        """Record a finished step. Step 0 (the evaluation before training) does not count towards the step time."""
        self.step = step
        if step:
            self._seconds.append(seconds)

    @property
    def current(self) -> int:
        """The running step, counted from 1; after the end, the last step."""
        return min(self.step + 1, self.total)

    def left(self) -> float | None:
        """Return the estimated seconds until the run ends; None before the first step is done."""
        if not self._seconds:
            return None
        return (self.total - self.step) * sum(self._seconds) / len(self._seconds)


def clock(seconds: float | None) -> str:
    """``75 -> "1:15"``, ``3700 -> "1:01:40"``, ``100000 -> "1d 3:46:40"``, ``None -> "-"``."""
    if seconds is None:
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    day = f"{days}d " if days else ""
    return f"{day}{hour}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def short_seconds(seconds: float) -> str:
    """Format seconds with one decimal; times below half a second with two."""
    return f"{seconds:.1f}" if seconds >= 0.5 else f"{seconds:.2f}"


def short(value: float) -> str:
    """Format with at most four significant digits, and k / M / G for large numbers."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{value:.4g}"


_GAP_BY_LAG = "rollout/logprob_gap_by_lag/"
_TRAINED_REWARD, _SAMPLED_REWARD = "critic/rewards/mean", "rollout/rewards/mean"

# (label, metric, format) for reinforcement learning
_COLUMNS = (
    ("length", "response_length/mean", "{:.0f}"),
    ("cut", "response_length/clip_ratio", "{:.0%}"),
    ("turns", "agent/turns/mean", "{:.1f}"),
    ("loss", "actor/pg_loss", "{:.3g}"),
    ("entropy", "actor/entropy", "{:.3f}"),
    ("grad", "actor/grad_norm", "{:.3g}"),
    ("gap", "rollout/logprob_gap_mean", "{:.1e}"),
    ("value loss", "critic/vf_loss", "{:.3g}"),
)
# The same for SFT and DPO, which have no rewards.
_COLUMNS_WITHOUT_REWARD = (
    ("loss", "actor/loss", "{:.4g}"),
    ("chosen ahead", "actor/dpo_accuracy", "{:.0%}"),
    ("margin", "actor/dpo_margin", "{:.3g}"),
    ("grad", "actor/grad_norm", "{:.3g}"),
    ("lr", "actor/lr", "{:.3g}"),
    ("length", "response_length/mean", "{:.0f}"),
)


def figures(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return (label, text) of the step's key figures, evaluations first. Figures of single data sources are left out.

    `reward` is the mean over all samples. Dynamic sampling leaves groups out of the training batch: `trained on` is the
    mean over the batch, and is shown only if it differs. If engines sampled ahead, `lag` is the mean over tokens, and `gap` that
    of the smallest lag: the gap of larger ones contains the policy's change.
    """
    pairs = [
        (name, f"{value:.3f}")
        for name, value in sorted(metrics.items())
        if name.startswith("eval/") and source_of(name) is None
    ]
    rewards = [f"{metrics[name]:.3f}" for name in (_SAMPLED_REWARD, _TRAINED_REWARD) if name in metrics]
    pairs += zip(("reward", "trained on"), dict.fromkeys(rewards), strict=False)
    columns = _COLUMNS if rewards else _COLUMNS_WITHOUT_REWARD
    shown = [(label, form.format(metrics[name])) for label, name, form in columns if name in metrics]
    lags = sorted(int(name.removeprefix(_GAP_BY_LAG)) for name in metrics if name.startswith(_GAP_BY_LAG))
    if lags:
        gap = (
            ("lag", f"{metrics['rollout/staleness_mean']:.1f}"),
            (f"gap at lag {lags[0]}", f"{metrics[f'{_GAP_BY_LAG}{lags[0]}']:.1e}"),
        )
        shown = [pair for each in shown for pair in (gap if each[0] == "gap" else (each,))]
    pairs += shown
    if "perf/throughput" in metrics:
        pairs.append(("tok/s/device", short(metrics["perf/throughput"])))
    return pairs


def phase_times(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return (phase, seconds) of one step, longest first. Phases below a hundredth of the step are left out."""
    least = metrics.get("timing_s/step", 0.0) / 100
    times = [
        (name.removeprefix("timing_s/"), seconds)
        for name, seconds in metrics.items()
        if name.startswith("timing_s/") and name not in _NOT_PHASES and seconds >= least
    ]
    return sorted(times, key=lambda item: -item[1])


def line_interval(steps: int) -> int:
    """Return the number of steps between two lines in a log: 1 up to 100 steps, otherwise about a twentieth of `steps`,
    rounded.

    Example: 1200 steps -> 50.
    """
    if steps <= _EVERY_STEP_UP_TO:
        return 1
    power = 10 ** (len(str(steps // _LINES)) - 1)
    return max(size * power for size in (1, 2, 5) if size * power <= max(steps // _LINES, 1))


def source_lines(metrics: Mapping[str, float]) -> list[str]:
    """Return one line per data source: ``  openai/gsm8k: samples 64 | reward 0.512 | ...``."""
    table = brief_table(metrics, SOURCES_SHOWN)
    lines = []
    for source, cells in table.rows:
        parts = [f"{label} {cell}" for label, cell in zip(table.head, cells, strict=True) if cell]
        lines.append(f"  {source}: {' | '.join(parts)}")
    if table.left_out:
        lines.append(f"  and {table.left_out:,} more sources, in metrics.jsonl")
    return lines


def after(step: int) -> str:
    return f"after step {step}" if step else "before step 1"
