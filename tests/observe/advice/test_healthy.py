"""Healthy histories yield no finding, and histories with missing metrics never raise."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megarl.observe.advice.advise import advise, rules
from megarl.observe.advice.facts import Facts, Silence
from megarl.observe.metrics import restore_non_finite
from tests.observe.advice.histories import (
    DPO,
    RL,
    SFT,
    Curve,
    constant,
    facts,
    line,
    lines,
    recipe,
    samples,
    with_evaluations,
)
from tests.observe.advice.test_faults import FAULTS

RECORDED = Path(__file__).parent / "recorded"
GROUPS = [[0.0, 1.0, 0.0, 1.0], [1.0] * 4, [0.0] * 4, [0.0, 0.0, 0.0, 1.0]] * 3

COLOCATED: dict[str, Curve] = {
    "rollout/engines_idle": constant(0.55),
    "rollout/wait_seconds/engines": constant(75),
    "timing_s/gen": constant(76),
    "timing_s/step": constant(134),
}
LAGS: dict[str, Curve] = {
    "rollout/logprob_gap_by_lag/0": constant(0.006),
    "rollout/logprob_gap_by_lag/1": line(0.01, 0.03),
    "rollout/logprob_gap_mean": line(0.008, 0.03),
    "rollout/staleness_mean": constant(0.8),
}
HEALTHY: dict[str, tuple[dict[str, Curve], dict[str, Any], dict[str, Any]]] = {
    "GRPO": ({}, {}, {"samples": samples(GROUPS)}),
    "GRPO of 400 steps": ({}, {}, {"steps": 400}),
    "colocated": (COLOCATED, {"cluster__placement": "colocated"}, {}),
    "fully asynchronous": (
        LAGS,
        {"cluster__placement": "disaggregated", "rollout__max_staleness": 2.0},
        {"noise": 0.1},
    ),
    "DAPO": (
        {
            "rollout/groups_filtered": line(16, 24),
            "rollout/prompts_tried": constant(56),
            "rollout/groups_missing": constant(0),
        },
        {"algorithm__dynamic_sampling__enabled": True, "algorithm__clip_high": 0.28},
        {},
    ),
    "PPO": (
        {"critic/vf_explained_var": lambda t: 0.7 - math.exp(-12 * t), "critic/grad_norm": constant(2.0)},
        {"algorithm__advantage": "gae"},
        {},
    ),
    "KL that settles": (
        {"actor/kl": lambda t: 0.4 * (1 - math.exp(-3 * t))},
        {"algorithm__kl_coef": 0.001},
        {},
    ),
    "experts": ({"actor/moe_load/max": line(2.2, 2.6)}, {}, {}),
    "long reasoning": ({"response_length/mean": line(1000, 6000)}, {}, {}),
    "solved, with little entropy": (
        {
            "actor/entropy": lambda t: 0.4 * 0.03**t,
            "rollout/rewards/mean": lambda t: 0.97 - 0.8 * math.exp(-8 * t),
            "critic/score/accuracy/mean": lambda t: 0.97 - 0.8 * math.exp(-8 * t),
        },
        {},
        {},
    ),
    "little entropy, still learning": (
        {"actor/entropy": lambda t: 0.4 * 0.03**t, "rollout/rewards/mean": line(0.2, 0.7)},
        {},
        {},
    ),
    "noisy": ({}, {}, {"noise": 0.25}),
    "no progress on hard rows": (
        {"rollout/rewards/mean": constant(0.3), "critic/score/accuracy/mean": constant(0.3)},
        {},
        {"noise": 0.2},
    ),
    "agents": (
        {"agent/calls/mean": line(1, 3), "agent/failed_calls": constant(80), "agent/ended/turns": constant(0.05)},
        {},
        {},
    ),
    "distillation, with a reward that is not trained on": (
        {
            "rollout/rewards/mean": line(0.6, 0.1),
            "critic/rewards/mean": line(0.6, 0.1),
            "critic/score/accuracy/mean": line(0.6, 0.1),
        },
        {"algorithm__advantage": "on_policy_distillation"},
        {},
    ),
    "one spike": ({"actor/grad_norm": lambda t: 30.0 if round(t * 59) == 40 else 0.4}, {}, {}),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_rl_has_no_findings(name: str, seed: int) -> None:
    curves, settings, more = HEALTHY[name]
    how = {key: more[key] for key in ("steps", "noise") if key in more}
    history = with_evaluations(lines({**RL, **curves}, seed=seed, **how), "eval/pass@1", [0.2, 0.35, 0.5, 0.49])
    assert advise(facts(history, recipe(**settings), samples=more.get("samples", ()))) == []


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("source", "curves"), [("sft", SFT), ("preferences", DPO)])
def test_healthy_sft_and_dpo_have_no_findings(source: str, curves: dict[str, Curve], seed: int) -> None:
    history = with_evaluations(lines(curves, seed=seed), "eval/loss", [2.0, 1.1, 0.95, 0.96])
    assert advise(facts(history, recipe(train__source=source, train__steps=60))) == []


@pytest.mark.parametrize("path", sorted(RECORDED.glob("*.json")), ids=lambda path: path.stem)
def test_recorded_runs(path: Path) -> None:
    """Real runs of tiny models on a CPU. The ones with a limit of 16 tokens have truncated responses, and nothing else."""
    record = json.loads(path.read_text())
    history = [restore_non_finite(line) for line in record["lines"]]
    findings = advise(Facts(lines=history, settings=record["settings"], samples=record["samples"]))
    expected = ["responses_truncated"] if path.stem.endswith("_short_limit") else []
    assert [finding["rule"] for finding in findings] == expected


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 9])
def test_early_steps_of_a_healthy_run_have_no_findings(steps: int) -> None:
    for curves, source in ((RL, "rollout"), (SFT, "sft"), (DPO, "preferences")):
        assert advise(facts(lines(curves, steps=60)[:steps], recipe(train__source=source))) == []


def test_a_live_run_that_writes_is_not_silent() -> None:
    for phase in (None, "gen", "update_actor", "weight_sync"):
        assert advise(facts(lines(RL), silence=Silence(300, phase))) == [], "the longest step takes 118 s"
    assert advise(facts([], silence=Silence(1000, None))) == [], "starting may take long"


def test_missing_metrics_never_raise() -> None:
    """Each metric is absent, NaN or infinite, alone and with the others, under the settings of each fault."""
    everything = {
        name: curve for fault in FAULTS.values() for name, curve in {**fault.base, **fault.curves}.items() if curve
    }
    for name in everything:
        history = lines({**everything, name: None}, steps=12)
        for broken in (
            history,
            [{**step, name: math.nan} for step in history],
            [{**step, name: math.inf} for step in history],
        ):
            advise(facts(broken))
    for name, curve in everything.items():
        advise(facts(lines({name: curve}, steps=12)))
    for fault in FAULTS.values():
        for history in ([], [{"step": 0.0, "eval/pass@1": 0.5}], [{"step": 1.0}], lines(DPO, steps=12)):
            advise(facts(history, recipe(**fault.settings), **fault.more))


def test_samples_of_any_kind_never_raise() -> None:
    records: list[dict[str, Any]] = [
        {},
        {"reward": None, "response": None},
        {"group": 1, "reward": "NaN", "response": "\ud800" * 900},
    ]
    records.append({"group": None, "reward": 1.0, "finish_reason": "length", "response": ""})
    assert advise(facts(lines(RL), samples=records * 4)) == []


def test_without_settings_there_is_no_advice() -> None:
    assert advise(Facts(lines=lines({**RL, "actor/pg_clipfrac": constant(0.5)}))) == []


def test_a_recipe_of_an_older_version_has_defaults_for_newer_keys() -> None:
    settings = {"rollout": {"samples_per_prompt": 4}, "exchange": {"route": "full"}}
    run = Facts(lines=[], settings=settings)
    assert run.setting("rollout.samples_per_prompt") == 4 and run.setting("rollout.window") == 0.3
    assert run.setting("weight_sync.route") == "full", "a former name"
    with pytest.raises(AssertionError):
        run.setting("rollout.no_such_key")


def test_conditions_and_reasons_are_sentences_for_the_table() -> None:
    for rule in rules():
        assert "|" not in rule.condition + rule.reason and rule.condition and rule.reason
