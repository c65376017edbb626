"""Rules of advice: updates of the weights that are wrong, too large or without effect."""

from __future__ import annotations

import math

import numpy as np

from megarl.observe.advice.facts import Curve, Facts
from megarl.observe.advice.rule import RuleFinding, rule

_SKIPPED, _SPIKES, _SPIKE_FACTOR, _SPIKE_WINDOW, _NEWEST = 0.2, 3, 10, 16, 100
_ESS, _K1, _GAP, _GAP_GROWTH = 0.3, 0.1, 0.03, 3
_CLIPPED, _STEP_KL, _KL = 0.2, 0.1, 0.3
_BUSIEST, _BUSIEST_GROWTH = 4, 2
_LR = "actor.optimizer.lr"


@rule(
    "learning",
    "a loss or gradient norm is NaN or infinite in at least one step",
    "such updates are skipped; the values before them say where the run broke",
)
def not_finite(run: Facts) -> RuleFinding | None:
    names = ("actor/grad_norm", "actor/loss", "actor/pg_loss", "critic/grad_norm")
    for name in names:
        steps = [line["step"] for line in run.steps if not math.isfinite(line.get(name, 0.0))]
        if steps:
            role = name.split("/")[0]
            return RuleFinding(
                f"{name} is not finite",
                f"in {len(steps):,} of {len(run.steps):,} steps, first in step {steps[0]:,}",
                run.scale(f"{role}.optimizer.lr", 0.5),
                "Look at the gap, the gradient norm and the samples of the steps before it.",
            )
    return None


@rule(
    "learning",
    f"more than {_SKIPPED:.0%} of the last 20 steps skipped an update",
    "the run learns from fewer batches than it samples, and the cause of the large norms stays",
)
def updates_skipped(run: Facts) -> RuleFinding | None:
    recent = [line for line in run.steps if "actor/skipped_updates" in line][-20:]
    steps = [line["step"] for line in recent if line["actor/skipped_updates"] > 0]
    if len(recent) < 5 or len(steps) / len(recent) <= _SKIPPED:
        return None
    evidence = (
        f"in {len(steps)} of the {len(recent)} steps from {recent[0]['step']:,} on; the run's notices have the causes"
    )
    return RuleFinding("updates of the policy are skipped", evidence, run.scale(_LR, 0.5))


@rule(
    "learning",
    "the learning rate is 0 in all steps, at least 5",
    "nothing is learned, for example where the warm-up is longer than the run",
)
def no_learning_rate(run: Facts) -> RuleFinding | None:
    curve = run.curve("actor/lr", fewest=5)
    if curve is None or curve.values.any():
        return None
    changes = run.set("actor.optimizer.warmup_steps", 0) or run.set(_LR, 1e-6)
    return RuleFinding(
        "the learning rate is 0", f"actor/lr in steps {curve.steps[0]:,.0f} to {curve.steps[-1]:,.0f}", changes
    )


@rule(
    "learning",
    f"at least {_SPIKES} of the last {_NEWEST} gradient norms are above {_SPIKE_FACTOR} times the median of the "
    f"{_SPIKE_WINDOW} to 64 before",
    "the default of `train.spike_factor`; clipping makes one such update harmless, not many",
)
def gradient_spikes(run: Facts) -> RuleFinding | None:
    curve = run.curve("actor/grad_norm", fewest=_SPIKE_WINDOW + 1)
    if curve is None:
        return None
    norms = curve.values
    spikes = [
        i
        for i in range(max(_SPIKE_WINDOW, len(norms) - _NEWEST), len(norms))
        if norms[i] > _SPIKE_FACTOR * np.median(norms[max(0, i - 64) : i]) > 0
    ]
    if len(spikes) < _SPIKES:
        return None
    worst = max(spikes, key=lambda i: norms[i])
    clip = run.set("actor.optimizer.clip_grad", 1.0) if not run.setting("actor.optimizer.clip_grad") else ()
    skip = run.set("train.on_spike", "skip") if run.setting("train.on_spike") in (None, "warn") else ()
    return RuleFinding(
        "the gradient norm has spikes",
        f"{len(spikes)} up to step {curve.steps[spikes[-1]]:,.0f}; the largest: {norms[worst]:.3g} in step {curve.steps[worst]:,.0f}, "
        f"median {np.median(norms):.3g}",
        (*clip, *skip, *run.scale(_LR, 0.5)),
    )


@rule(
    "learning",
    f"the effective sample size of engine against trainer is below {_ESS}, or their KL (k1) above {_K1}",
    "verl's docs/algo/rollout_corr.md warns at these values",
)
def gap_large(run: Facts) -> RuleFinding | None:
    ess, k1 = run.curve("rollout/mismatch_ess"), run.curve("rollout/logprob_gap_k1")
    if ess is not None and ess.last < _ESS:
        evidence = f"rollout/mismatch_ess {ess.last_text()}"
    elif k1 is not None and abs(k1.last) > _K1:
        evidence = f"rollout/logprob_gap_k1 {k1.last_text()}"
    else:
        return None
    return RuleFinding(
        "engines and trainers disagree about the policy", evidence, _against_gap(run), "docs/numerics.md."
    )


@rule(
    "learning",
    f"the gap of log-probs (with staleness: at lag 0) is {_GAP_GROWTH} times as large as at the start, and above {_GAP}",
    "rounding to bfloat16 gives up to 0.03 (docs/numerics.md), but does not grow; a growing gap precedes collapse (IcePop, arXiv 2510.18855)",
)
def gap_grows(run: Facts) -> RuleFinding | None:
    name = "rollout/logprob_gap_by_lag/0"
    if (curve := run.curve(name)) is None:
        name = "rollout/logprob_gap_mean"
        curve = run.curve(name) if not run.setting("rollout.max_staleness") else None
    if curve is None or curve.last <= max(_GAP, _GAP_GROWTH * curve.first) or not curve.rises:
        return None
    return RuleFinding(
        "the gap between engines and trainers grows", f"{name} {curve.text()}", _against_gap(run), "docs/numerics.md."
    )


def _against_gap(run: Facts) -> tuple[str, ...]:
    low_precision = run.setting("model.dtype") == "bfloat16"
    experts = run.curve("actor/moe_load/max", fewest=1) is not None and run.setting("rollout.engine") == "vllm"
    return (
        *(run.set("megatron.routing_replay", "rollout") if experts else ()),
        *(run.set("megatron.fp32_head", True) if low_precision else ()),
        *(
            run.set("algorithm.correction.weights", "token")
            if run.setting("algorithm.correction.weights") == "none"
            else ()
        ),
        *(run.set("rollout.max_staleness", 1.0) if run.setting("rollout.max_staleness") > 1 else ()),
    )


@rule(
    "learning",
    f"ppo_clip: more than {_CLIPPED:.0%} of the tokens are clipped; any loss: the KL of a step's updates (`actor/ppo_kl`) is above "
    f"{_STEP_KL}",
    "clipped tokens teach nothing, GRPO clips 0.13 % (arXiv 2507.18071); implementations of PPO stop a step at a KL of 0.01 to 0.05 (Spinning Up)",
)
def update_too_large(run: Facts) -> RuleFinding | None:
    clipped = run.curve("actor/pg_clipfrac") if run.setting("algorithm.loss") == "ppo_clip" else None
    kl = run.curve("actor/ppo_kl")
    if clipped is not None and clipped.last > _CLIPPED:
        evidence = f"actor/pg_clipfrac {clipped.last_text('.0%')}"
    elif kl is not None and abs(kl.last) > _STEP_KL:
        evidence = f"actor/ppo_kl {kl.last_text()}"
    else:
        return None
    fewer = run.scale("actor.epochs", 0.5) if run.setting("actor.epochs") > 1 else ()
    fresher = run.set("rollout.max_staleness", 1.0) if run.setting("rollout.max_staleness") > 1 else ()
    return RuleFinding("a step changes the policy too much", evidence, (*run.scale(_LR, 0.5), *fewer, *fresher))


@rule(
    "learning",
    f"the KL to the reference is above {_KL} per token, and rises faster and faster",
    "a sampled token is then e^0.3 = 1.35 times less probable under the reference (geometric mean); a KL that settles is healthy",
)
def kl_runs_away(run: Facts) -> RuleFinding | None:
    for name in ("actor/kl", "actor/reward_kl_penalty"):
        curve = run.curve(name)
        if curve is not None and curve.last > _KL and curve.rises and _accelerates(curve):
            target = run.set("algorithm.kl_target", 0.05) if run.setting("algorithm.kl_target") is None else ()
            changes = (*run.scale("algorithm.kl_coef", 4), *target, *run.scale(_LR, 0.5))
            return RuleFinding("the policy runs away from the reference", f"{name} {curve.text()}", changes)
    return None


def _accelerates(curve: Curve) -> bool:
    middle = len(curve.values) // 2
    half = float(np.median(curve.values[max(0, middle - curve.width // 2) : middle + curve.width // 2 + 1]))
    return curve.last - half > 1.5 * (half - curve.first)


@rule(
    "learning",
    "the critic's explained variance is below 0 after its first 20 steps",
    "the mean of the returns would be a better baseline than its values",
)
def critic_useless(run: Facts) -> RuleFinding | None:
    curve = run.curve("critic/vf_explained_var", fewest=25)
    if curve is None or curve.last >= 0:
        return None
    longer = run.set("critic.warmup_steps", 20) if run.setting("critic.warmup_steps") < 20 else ()
    evidence = f"critic/vf_explained_var {curve.last_text()}"
    return RuleFinding("the critic explains nothing", evidence, (*run.scale("critic.optimizer.lr", 0.5), *longer))


@rule(
    "learning",
    f"the busiest expert gets more than {_BUSIEST} times the mean load, {_BUSIEST_GROWTH} times as much as at the start",
    "the others learn little, and expert-parallel ranks wait; the coefficient is small as in DeepSeek-V3 (arXiv 2412.19437)",
)
def experts_uneven(run: Facts) -> RuleFinding | None:
    curve = run.curve("actor/moe_load/max")
    if curve is None or curve.last <= max(_BUSIEST, _BUSIEST_GROWTH * curve.first):
        return None
    changes = run.scale("megatron.moe_aux_loss_coef", 4) or run.set("megatron.moe_aux_loss_coef", 0.0001)
    return RuleFinding("the routers prefer few experts", f"actor/moe_load/max {curve.text()}", changes)
