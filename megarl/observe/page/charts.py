"""Charts of report.html, in their order on the page."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

MAX_LABEL = 40  # characters in a legend
MAX_CURVES = 8  # in a chart


@dataclass(frozen=True)
class Chart:
    """One chart.

    ``series``: (metric or pattern, label). A ``*`` in the label becomes the text that the pattern's ``*`` matches; an empty
    label means ``*``. ``band``: two metrics, the bounds of a shaded range. ``tick``: d3 format of the y axis. ``log``:
    logarithmic y axis. ``needs``: a metric the chart requires. ``several``: the chart requires at least two curves.
    """

    title: str
    series: tuple[tuple[str, str], ...]
    note: str = ""
    band: tuple[str, str] | None = None
    tick: str = ""
    log: bool = False
    needs: str = ""
    several: bool = False


CHARTS = (
    Chart(
        "Reward",
        (("rollout/rewards/mean", "everything sampled"), ("critic/rewards/mean", "trained on")),
        'Means; with dynamic sampling only "everything sampled" shows learning. Shaded: range of the rewards trained on.',
        band=("critic/rewards/min", "critic/rewards/max"),
    ),
    Chart(
        "Evaluation",
        (("eval/pass@*", "pass@*"), ("eval/maj@*", "maj@*"), ("eval/greedy", "greedy")),
        "Accuracy on the held-out problems.",
    ),
    Chart(
        "Evaluation: loss",
        (("eval/loss", "held out"), ("actor/pg_loss", "trained on")),
        "SFT: mean per token. DPO: mean per pair. Held out: over the held-out rows. Trained on: over each step's batch.",
        needs="eval/loss",
    ),
    Chart(
        "Preferences: chosen ahead",
        (("eval/dpo_accuracy", "held out"), ("actor/dpo_accuracy", "trained on")),
        "Share of pairs in which the chosen answer gained more log-probability than the rejected answer.",
        tick=".0%",
    ),
    Chart(
        "Preferences: margin",
        (("eval/dpo_margin", "held out"), ("actor/dpo_margin", "trained on")),
        "Mean reward of the chosen minus the rejected answer.",
    ),
    Chart("Evaluation: response length", (("eval/response_length/mean", "mean"),), "Tokens."),
    Chart(
        "Reward by data source",
        (("source/*/rewards/mean", ""),),
        "Mean over all samples.",
        several=True,
    ),
    Chart("Evaluation by data source", (("eval/*/pass@1", ""),), "pass@1.", several=True),
    Chart("Response length by data source", (("source/*/response_length/mean", ""),), "Tokens, mean.", several=True),
    Chart("Reward parts", (("critic/score/*/mean", ""),), "Mean of each part of the reward."),
    Chart("Response length", (("response_length/mean", "mean"), ("response_length/max", "longest")), "Tokens."),
    Chart(
        "Truncated responses",
        (("response_length/clip_ratio", "share"),),
        "Share of samples that reached the length limit.",
        tick=".0%",
    ),
    Chart("Turns", (("agent/turns/mean", "mean"), ("agent/turns/max", "most")), "Turns of the policy per sample."),
    Chart("Tool calls", (("agent/calls/mean", "mean"),), "Per sample."),
    Chart(
        "Tool calls that failed",
        (("agent/failed_calls", "failed"), ("agent/tool_timeouts", "timed out")),
        "Per step; failed calls include time-outs.",
    ),
    Chart(
        "Seconds in tools",
        (("agent/tool_seconds/mean", "mean"), ("agent/tool_seconds/max", "longest")),
        "Per sample.",
    ),
    Chart("Entropy", (("actor/entropy", "entropy"),), "Entropy of the policy, mean per token, in nats."),
    Chart("Policy loss", (("actor/pg_loss", "loss"),)),
    Chart("Gradient norm", (("actor/grad_norm", "norm"),), "Before clipping."),
    Chart("Clip fraction", (("actor/clipfrac", "share"), ("actor/pg_clipfrac", "share")), tick=".2~%"),
    Chart("KL to the reference", (("actor/kl_loss", "KL"),)),
    Chart("Learning rate", (("actor/lr", "actor"), ("critic/lr", "critic")), tick=".1e"),
    Chart("Value loss", (("critic/vf_loss", "loss"),), "Loss of the critic."),
    Chart(
        "Explained variance",
        (("critic/vf_explained_var", "share"),),
        "Share of the returns' variance that the critic's values explain (at most 1).",
    ),
    Chart(
        "Values and returns",
        (("critic/values/mean", "values"), ("critic/returns/mean", "returns")),
        "Means over tokens; shaded: range of the values.",
        band=("critic/values/min", "critic/values/max"),
    ),
    Chart(
        "Expert load",
        (("actor/moe_load/max", "busiest expert"), ("actor/moe_load/mean", "mean of layers")),
        "1 is an even load.",
    ),
    Chart(
        "Train/rollout gap",
        (
            ("rollout/logprob_gap_mean", "mean"),
            ("rollout/logprob_gap_max", "largest"),
            ("rollout/logprob_gap_k3", "KL (k3)"),
        ),
        "Difference of the trainer's and the engine's log-probs of the same tokens; with old tokens, the policy's change too. Log scale.",
        tick=".0e",
        log=True,
    ),
    Chart(
        "Train/rollout gap by lag",
        (("rollout/logprob_gap_by_lag/*", "lag *"),),
        "Mean over the tokens that are this many versions old; lag 0 has the same weights (with at_update=keep, over an older KV cache). Log scale.",
        tick=".0e",
        log=True,
        several=True,
    ),
    Chart(
        "Who waits",
        (
            ("rollout/wait_seconds/engines", "trainers for engines"),
            ("rollout/wait_seconds/scorers", "trainers for scorers"),
            ("rollout/wait_seconds/window", "trainers for older groups"),
        ),
        "Seconds per step in which the trainers had no batch, because groups were being sampled, were being scored, or had to wait for older ones (rollout.window).",
    ),
    Chart(
        "Idle engines",
        (("rollout/engines_idle", "engines without a group"),),
        "Share of the time in which an engine had nothing to sample, because rollout.max_staleness allowed no further group.",
        tick=".0%",
    ),
    Chart(
        "Lag",
        (("rollout/staleness_mean", "mean"), ("rollout/staleness_max", "most")),
        "Weight versions behind the trainer.",
    ),
    Chart(
        "Dynamic sampling",
        (
            ("rollout/prompts_tried", "prompts tried"),
            ("rollout/groups_filtered", "groups filtered"),
            ("rollout/groups_missing", "groups missing"),
        ),
    ),
    Chart("Throughput", (("perf/throughput", "tokens/s"),), "Tokens per second and device, prompts included."),
    Chart("Model FLOPs utilisation", (("perf/mfu/*", ""),), "Share of a device's peak.", tick=".1%"),
    Chart("TFLOP/s per device", (("perf/tflops_per_device/*", ""),), "Model FLOPs, without recomputation."),
    Chart("Tokens per step", (("perf/total_num_tokens", "tokens"),)),
    Chart("CPU", (("host/cpu/*", "*"),), "Share of the machine's cores in use.", tick=".0%"),
    Chart("Memory", (("host/memory/*", "*"),), "Share of the machine's memory in use.", tick=".0%"),
    Chart("Devices in use", (("host/device_utilization/*", "*"),), "Mean over the trainers' devices.", tick=".0%"),
    Chart("Device memory", (("host/device_memory/*", "*"),), "Share in use, of the fullest device.", tick=".0%"),
    Chart("Network: received", (("host/received_per_second/*", "*"),), "Bytes per second."),
    Chart("Network: sent", (("host/sent_per_second/*", "*"),), "Bytes per second."),
    Chart(
        "Disk of the run",
        (("host/run_disk", "in use"),),
        "Share of the file system of the run's directory.",
        tick=".0%",
    ),
)


def present(metrics: Iterable[str]) -> list[dict[str, object]]:
    """Return the charts for which the run has metrics, in the format of the page's script."""
    names = sorted(metrics)
    drawn: list[dict[str, object]] = []
    for chart in CHARTS:
        if chart.needs and chart.needs not in names:
            continue
        curves = _curves(chart, names)
        if len(curves) > chart.several:
            band = chart.band if chart.band and set(chart.band) <= set(names) else None
            note = chart.note if band or not chart.band else chart.note.split(";")[0]
            if len(curves) > MAX_CURVES:
                note = f"{note} {MAX_CURVES} of {len(curves)} curves; All metrics has the others.".strip()
            drawn.append(
                {
                    "title": chart.title,
                    "note": note,
                    "series": curves[:MAX_CURVES],
                    "band": band,
                    "tick": chart.tick,
                    "log": chart.log,
                }
            )
    return drawn


def _curves(chart: Chart, names: list[str]) -> list[tuple[str, str]]:
    """Return the metrics of the chart's curves, with their labels."""
    curves = []
    for pattern, label in chart.series:
        matched = [(name, _matched_text(name, pattern)) for name in names if fnmatchcase(name, pattern)]
        matched.sort(key=lambda pair: _order(pair[1]))
        curves += [(name, _short((label or "*").replace("*", text))) for name, text in matched]
    return curves


def _order(text: str) -> tuple[int, list[tuple[str, int]]]:
    """Return the key by which curves are sorted: ``max`` and ``mean`` first, numbers by their value."""
    parts = re.findall(r"(\D*)(\d*)", text)
    return 0 if text in ("max", "mean") else 1, [(word, int(digits or -1)) for word, digits in parts]


def _short(label: str) -> str:
    return label if len(label) <= MAX_LABEL else label[: MAX_LABEL - 1] + "…"


def _matched_text(name: str, pattern: str) -> str:
    """Return the part of `name` from the pattern's first star to its last."""
    before, after = pattern.partition("*")[0], pattern.rpartition("*")[2]
    return name[len(before) : len(name) - len(after)]
