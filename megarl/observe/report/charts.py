"""Which curves report.html draws, and in what order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

MAX_LABEL = 40  # characters: what a legend has room for


@dataclass(frozen=True)
class Chart:
    """One chart. ``series`` are (metric or pattern, label), where a label's ``*`` is what the pattern's stands for; an
    empty label is ``*``.

    ``band``: the metrics of a shaded range. ``tick``: a d3 format of the axis. ``log``: logarithmic.
    ``needs``: a metric without which there is no chart. ``several``: so that there is none of a single curve.
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
        "Means; with dynamic sampling only the first shows learning. Shaded: least to greatest that was trained on.",
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
        "Mean over the held-out rows: of a token in SFT, of a pair in DPO. Trained on: of each step's batch.",
        needs="eval/loss",
    ),
    Chart(
        "Preferences: chosen ahead",
        (("eval/dpo_accuracy", "held out"), ("actor/dpo_accuracy", "trained on")),
        "Share of pairs in which the chosen answer has gained more than the rejected one.",
        tick=".0%",
    ),
    Chart(
        "Preferences: margin",
        (("eval/dpo_margin", "held out"), ("actor/dpo_margin", "trained on")),
        "Reward of the chosen answer less that of the rejected, mean.",
    ),
    Chart("Evaluation: response length", (("eval/response_length/mean", "mean"),), "Tokens."),
    Chart(
        "Reward by data source",
        (("source/*/rewards/mean", ""),),
        "Mean of everything sampled.",
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
    Chart("Turns", (("agent/turns/mean", "mean"), ("agent/turns/max", "most")), "Of the policy, a sample."),
    Chart("Tool calls", (("agent/calls/mean", "mean"),), "A sample."),
    Chart(
        "Tool calls that failed",
        (("agent/failed_calls", "failed"), ("agent/tool_timeouts", "of these too slow")),
        "In the step.",
    ),
    Chart(
        "Seconds in tools",
        (("agent/tool_seconds/mean", "mean"), ("agent/tool_seconds/max", "longest")),
        "A sample.",
    ),
    Chart("Entropy", (("actor/entropy", "entropy"),), "Of the policy, mean a token, in nats."),
    Chart("Policy loss", (("actor/pg_loss", "loss"),)),
    Chart("Gradient norm", (("actor/grad_norm", "norm"),), "Before clipping."),
    Chart("Clip fraction", (("actor/clipfrac", "share"), ("actor/pg_clipfrac", "share")), tick=".2~%"),
    Chart("KL to the reference", (("actor/kl_loss", "KL"),)),
    Chart("Learning rate", (("actor/lr", "actor"), ("critic/lr", "critic")), tick=".1e"),
    Chart("Value loss", (("critic/vf_loss", "loss"),), "Of the critic."),
    Chart(
        "Explained variance",
        (("critic/vf_explained_var", "share"),),
        "Share of the returns' variance that the critic's values explain; 1 is all of it.",
    ),
    Chart(
        "Values and returns",
        (("critic/values/mean", "values"), ("critic/returns/mean", "returns")),
        "Means over tokens; shaded: least to greatest value.",
        band=("critic/values/min", "critic/values/max"),
    ),
    Chart(
        "Expert load",
        (("actor/moe_load/max", "busiest expert"), ("actor/moe_load/mean", "mean of layers")),
        "1 is even.",
    ),
    Chart(
        "Train/rollout gap",
        (
            ("rollout/logprob_gap_mean", "mean"),
            ("rollout/logprob_gap_max", "largest"),
            ("rollout/logprob_gap_k3", "KL (k3)"),
        ),
        "Difference of the trainer's and the engine's log-probs of the same tokens; log scale.",
        tick=".0e",
        log=True,
    ),
    Chart("Staleness", (("rollout/staleness_mean", "mean"), ("rollout/staleness_max", "most")), "Versions behind."),
    Chart(
        "Dynamic sampling",
        (
            ("rollout/prompts_tried", "prompts tried"),
            ("rollout/groups_filtered", "groups filtered"),
            ("rollout/groups_missing", "groups missing"),
        ),
    ),
    Chart("Throughput", (("perf/throughput", "tokens/s"),), "Tokens a second and device, prompts included."),
    Chart("Model FLOPs utilisation", (("perf/mfu/*", ""),), "Of a device's peak.", tick=".1%"),
    Chart("TFLOP/s a device", (("perf/tflops_per_device/*", ""),), "Of the model's FLOPs: nothing counts twice."),
    Chart("Tokens a step", (("perf/total_num_tokens", "tokens"),)),
)


def present(metrics: Iterable[str]) -> list[dict[str, object]]:
    """The charts that the run has metrics for, as the page draws them."""
    names = sorted(metrics)
    drawn: list[dict[str, object]] = []
    for chart in CHARTS:
        if chart.needs and chart.needs not in names:
            continue
        found = [
            (name, _short((label or "*").replace("*", _star(name, pattern))))
            for pattern, label in chart.series
            for name in _match(names, pattern)
        ]
        if len(found) > chart.several:
            band = chart.band if chart.band and set(chart.band) <= set(names) else None
            drawn.append(
                {
                    "title": chart.title,
                    "note": chart.note if band or not chart.band else chart.note.split(";")[0],
                    "series": found[:8],
                    "band": band,
                    "tick": chart.tick,
                    "log": chart.log,
                }
            )
    return drawn


def _match(names: list[str], pattern: str) -> list[str]:
    return [name for name in names if fnmatchcase(name, pattern)]


def _short(label: str) -> str:
    return label if len(label) <= MAX_LABEL else label[: MAX_LABEL - 1] + "…"


def _star(name: str, pattern: str) -> str:
    """What the pattern's stars stand for, with what lies between them."""
    before, after = pattern.partition("*")[0], pattern.rpartition("*")[2]
    return name[len(before) : len(name) - len(after)]
