"""A history with one fault yields that finding first, with a change that the recipe accepts."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megarl.observe.advice.advise import advise, rules
from megarl.observe.advice.facts import Silence
from megarl.recipe.load import read_recipe
from tests.observe.advice.histories import (
    DPO,
    RL,
    SFT,
    Curve,
    constant,
    facts,
    line,
    lines,
    only_in,
    recipe,
    samples,
    with_evaluations,
)

EARLIER = [0.0, 1.0, 0.0, 1.0]


@dataclass
class Fault:
    """Curves that differ from healthy RL, settings, the rest of the facts, and the first change that is expected (None: none)."""

    rule: str
    change: str | None
    curves: dict[str, Curve | None] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Curve] = field(default_factory=lambda: RL)
    evaluations: tuple[str, list[float]] | None = None


SPIKES = only_in({31, 44, 58}, 60, 9.0, 0.3)
ASYNC: dict[str, Any] = {"cluster__placement": "disaggregated", "rollout__max_staleness": 1.0}

FAULTS = {
    "engines silent": Fault("silent", "rollout.timeout=600.0", more={"silence": Silence(700, None)}),
    "trainers silent": Fault("silent", None, more={"silence": Silence(700, "gen")}),
    "weights silent": Fault("silent", None, more={"silence": Silence(700, "update_actor")}),
    "no first step": Fault("silent", None, {name: None for name in RL}, more={"silence": Silence(2000, None)}),
    "scorer times out": Fault(
        "scoring_fails",
        "reward.timeout=30.0",
        {"rollout/groups_unscored": constant(8), "rollout/scoring_timeouts": constant(9)},
    ),
    "work lost": Fault(
        "work_lost", "train.save_every=10", more={"ettr": {"wall": 7200.0, "repeated": 1500.0, "dropped": 0.0}}
    ),
    "nan": Fault("not_finite", "actor.optimizer.lr=5e-07", {"actor/grad_norm": only_in({40}, 60, math.nan, 0.3)}),
    "skipped": Fault(
        "updates_skipped",
        "actor.optimizer.lr=5e-07",
        {"actor/skipped_updates": only_in({45, 48, 50, 53, 58}, 60, 1, 0)},
    ),
    "no learning rate": Fault(
        "no_learning_rate", "actor.optimizer.lr=1e-06", {"actor/lr": constant(0)}, {"actor__optimizer__lr": 0.0}
    ),
    "spikes": Fault("gradient_spikes", "train.on_spike=skip", {"actor/grad_norm": SPIKES}),
    "ess": Fault("gap_large", "megatron.fp32_head=true", {"rollout/mismatch_ess": line(0.9, 0.1)}),
    "k1": Fault("gap_large", "megatron.fp32_head=true", {"rollout/logprob_gap_k1": line(0.01, 0.2)}),
    "gap grows": Fault("gap_grows", "megatron.fp32_head=true", {"rollout/logprob_gap_mean": lambda t: 0.006 * 10**t}),
    "gap of experts grows": Fault(
        "gap_grows",
        "megatron.routing_replay=rollout",
        {"rollout/logprob_gap_by_lag/0": lambda t: 0.006 * 10**t, "actor/moe_load/max": constant(1.5)},
        ASYNC,
    ),
    "clipped": Fault("update_too_large", "actor.optimizer.lr=5e-07", {"actor/pg_clipfrac": line(0.05, 0.35)}),
    "large KL of a step": Fault("update_too_large", "actor.optimizer.lr=5e-07", {"actor/ppo_kl": constant(0.3)}),
    "KL runs away": Fault(
        "kl_runs_away",
        "algorithm.kl_coef=0.004",
        {"actor/kl": lambda t: 0.01 + 2 * t**4},
        {"algorithm__kl_coef": 0.001},
    ),
    "critic": Fault("critic_useless", "critic.optimizer.lr=5e-06", {"critic/vf_explained_var": constant(-0.3)}),
    "experts": Fault("experts_uneven", "megatron.moe_aux_loss_coef=0.0001", {"actor/moe_load/max": line(1.5, 9)}),
    "all filtered": Fault(
        "rewards_equal",
        "rollout.samples_per_prompt=16",
        {"rollout/groups_filtered": constant(29), "rollout/rewards/mean": constant(0.02)},
        {"algorithm__dynamic_sampling__enabled": True},
    ),
    "too easy": Fault(
        "rewards_equal",
        "algorithm.dynamic_sampling.enabled=true",
        {"rollout/rewards/mean": constant(0.97)},
        more={"samples": samples([[1.0] * 4] * 11 + [EARLIER])},
    ),
    "constant reward": Fault(
        "rewards_equal",
        None,
        {
            **{f"critic/rewards/{name}": constant(0) for name in ("mean", "min", "max")},
            **{f"critic/advantages/{name}": constant(0) for name in ("min", "max")},
            "rollout/rewards/mean": constant(0),
        },
    ),
    "batches incomplete": Fault(
        "batches_incomplete",
        "algorithm.dynamic_sampling.max_attempts=6",
        {"rollout/groups_missing": constant(12), "rollout/groups_filtered": constant(20)},
        {"algorithm__dynamic_sampling__enabled": True},
    ),
    "entropy collapsed": Fault(
        "entropy_collapsed",
        "algorithm.clip_high=0.28",
        {"actor/entropy": lambda t: 0.6 * 0.02**t, "rollout/rewards/mean": lambda t: min(0.5, 0.2 + 2 * t)},
    ),
    "entropy explodes": Fault(
        "entropy_explodes",
        "algorithm.entropy_coef=0.0",
        {"actor/entropy": line(0.6, 5), "rollout/rewards/mean": constant(0.3)},
        {"algorithm__entropy_coef": 0.05},
    ),
    "reward falls": Fault(
        "reward_falls",
        "actor.optimizer.lr=5e-07",
        {"rollout/rewards/mean": lambda t: 0.2 + 0.5 * min(2 * t, 2 * (1 - t))},
    ),
    "loops": Fault(
        "responses_loop",
        "actor.optimizer.lr=5e-07",
        {"rollout/truncated": constant(0.5)},
        more={"samples": samples([EARLIER] * 4, "and so on, " * 400, "length")},
    ),
    "truncated": Fault(
        "responses_truncated", "rollout.max_response_length=2048", {"rollout/truncated": line(0.1, 0.5)}
    ),
    "hacked by length": Fault(
        "reward_hacked",
        "algorithm.overlong.penalty_buffer=512",
        {"response_length/mean": line(300, 900), "critic/score/accuracy/mean": constant(0.4)},
    ),
    "hacked by format": Fault(
        "reward_hacked",
        "algorithm.kl_coef=0.001",
        {"response_length/mean": constant(500), "critic/score/accuracy/mean": line(0.5, 0.3)},
    ),
    "evaluation falls": Fault(
        "evaluation_falls", "algorithm.kl_coef=0.001", evaluations=("eval/pass@1", [0.3, 0.5, 0.42, 0.4])
    ),
    "overfits": Fault(
        "evaluation_falls",
        "train.steps=20",
        settings={"train__source": "sft", "train__steps": 60},
        base=SFT,
        evaluations=("eval/loss", [2.0, 1.0, 1.2, 1.4]),
    ),
    "tools fail": Fault(
        "tools_fail",
        "agent.tool_timeout=60.0",
        {"agent/calls/mean": constant(2.0), "agent/failed_calls": constant(400), "agent/tool_timeouts": constant(390)},
    ),
    "turns run out": Fault("turns_run_out", "agent.max_turns=16", {"agent/ended/turns": constant(0.6)}),
    "scorers slow": Fault("scorers_slow", "reward.processes=8", {"rollout/wait_seconds/scorers": constant(45)}),
    "engines idle": Fault(
        "engines_idle",
        "rollout.max_staleness=1.0",
        {"rollout/engines_idle": constant(0.55)},
        {"cluster__placement": "disaggregated"},
    ),
    "trainers wait": Fault("trainers_wait", "rollout.engines=2", {"rollout/wait_seconds/engines": constant(80)}, ASYNC),
    "window": Fault("window_small", "rollout.window=0.6", {"rollout/wait_seconds/window": constant(30)}, ASYNC),
    "weight sync": Fault(
        "weight_sync_slow",
        "weight_sync.route=auto",
        {"timing_s/weight_sync": constant(60), "timing_s/step": constant(175)},
        {"weight_sync__route": "full"},
    ),
    "checkpoints": Fault(
        "checkpoints_slow",
        "train.save_in_background=true",
        {"timing_s/save": constant(30), "timing_s/step": constant(148)},
    ),
    "evaluations": Fault(
        "evaluations_slow",
        "evaluation.every=4",
        {"timing_s/eval": constant(90), "timing_s/step": constant(208)},
        {"evaluation__every": 2},
    ),
    "padding": Fault(
        "padding", "megatron.packing=true", {"perf/micro_batch_share": constant(0.3)}, {"megatron__packing": False}
    ),
    "one sample each": Fault(
        "micro_batches_small",
        "actor.max_tokens_per_micro_batch=4096",
        {"actor/micro_batches": constant(256)},
        {"actor__max_tokens_per_micro_batch": 1024},
    ),
    "uneven": Fault(
        "micro_batches_uneven",
        "actor.max_tokens_per_micro_batch=32768",
        {"perf/micro_batch_imbalance": constant(2.5)},
        {"megatron__pipeline_parallel": 2, "cluster__trainers": 2},
    ),
    "controller": Fault("controller_slow", "observe.samples_per_step=8", {"timing_s/step": constant(200)}),
}


def lines_of(fault: Fault) -> list[dict[str, float]]:
    curves = {**fault.base, **fault.curves}
    history = lines(curves) if any(curve is not None for curve in curves.values()) else []
    return with_evaluations(history, *fault.evaluations) if fault.evaluations else history


@functools.cache
def findings_of(name: str) -> list[dict[str, Any]]:
    fault = FAULTS[name]
    return advise(facts(lines_of(fault), recipe(**fault.settings), **fault.more))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_the_first_finding(name: str) -> None:
    fault, findings = FAULTS[name], findings_of(name)
    first = findings[0]
    assert first["rule"] == fault.rule, findings
    assert next(iter(first["changes"]), None) == fault.change
    assert any(character.isdigit() for character in first["evidence"] + first["what"])


@pytest.mark.parametrize("name", sorted(FAULTS.keys() - {"loops"}))
def test_a_fault_is_the_only_finding(name: str) -> None:
    """A cause is not reported again under other names. Loops are truncated, too."""
    assert [finding["rule"] for finding in findings_of(name)] == [FAULTS[name].rule]


def test_every_change_is_a_setting_with_a_value_of_its_type(tmp_path: Path) -> None:
    changes = {change for name in FAULTS for finding in findings_of(name) for change in finding["changes"]}
    (tmp_path / "recipe.yaml").write_text("name: mine\n")
    for values in zip_by_key(changes):
        assert not read_recipe(tmp_path / "recipe.yaml", values).errors


def zip_by_key(changes: set[str]) -> list[list[str]]:
    """Return lists of changes with each key once: of one key there may be several values."""
    left, lists = sorted(changes), []
    while left:
        lists.append(list({change.split("=")[0]: change for change in left}.values()))
        left = [change for change in left if change not in lists[-1]]
    return lists


def test_every_rule_has_a_fault() -> None:
    assert {fault.rule for fault in FAULTS.values()} == {rule.name for rule in rules()}


def test_the_evidence_has_numbers_and_steps() -> None:
    history = lines({**RL, "actor/pg_clipfrac": line(0.3, 0.3)}, noise=0.0)
    (finding,) = advise(facts(history))
    assert finding["evidence"] == "actor/pg_clipfrac 30% in steps 55 to 60"
    assert finding["kind"] == "learning"


def test_dpo_that_overfits() -> None:
    history = with_evaluations(lines(DPO), "eval/loss", [0.69, 0.5, 0.6, 0.7])
    (finding,) = advise(facts(history, recipe(train__source="preferences", train__steps=60)))
    assert finding["rule"] == "evaluation_falls" and "step 20" in finding["note"]


DEATHS = {12, 25, 26, 41, 58}
DEATH_NOTICES = [{"step": step, "event": "death", "text": "service engine1 on host died: killed"} for step in DEATHS]


@pytest.mark.parametrize(
    ("rule", "curves"),
    [
        (
            "trainers_wait",
            {
                "rollout/wait_seconds/engines": only_in(DEATHS, 60, 2000, 15),
                "timing_s/gen": only_in(DEATHS, 60, 2060, 60),
            },
        ),
        ("weight_sync_slow", {"timing_s/weight_sync": only_in(DEATHS, 60, 2000, 4)}),
        ("controller_slow", {}),
    ],
)
def test_steps_in_which_a_worker_died_are_not_judged_for_speed(rule: str, curves: dict[str, Curve]) -> None:
    history = lines({**RL, **curves, "timing_s/step": only_in(DEATHS, 60, 2120, 118)})
    settings = recipe(**ASYNC, weight_sync__route="full")
    (finding,) = advise(facts(history, settings))
    assert finding["rule"] == rule, "each is found if no death explains it"
    assert advise(facts(history, settings, notices=DEATH_NOTICES)) == []


def test_engines_that_idle_in_steps_with_a_death_are_not_idle() -> None:
    last = set(range(56, 61))
    history = lines({**RL, "rollout/engines_idle": only_in(last, 60, 0.7, 0.1)})
    notices = [{"step": step, "event": "death", "text": "killed"} for step in last]
    assert [each["rule"] for each in advise(facts(history, recipe(**ASYNC)))] == ["engines_idle"]
    assert advise(facts(history, recipe(**ASYNC), notices=notices)) == []


@pytest.mark.parametrize("name", ["timing_s/recovery", "fleet/restart_seconds"])
def test_steps_that_waited_for_a_restart_are_not_judged_for_speed(name: str) -> None:
    """Runs whose notices are lost have the waits in their metrics."""
    history = lines({**RL, "timing_s/weight_sync": only_in(DEATHS, 60, 500, 4), "timing_s/step": constant(118)})
    assert [each["rule"] for each in advise(facts(history))] == ["weight_sync_slow"]
    for step in DEATHS:
        history[step - 1][name] = 490.0
    assert advise(facts(history)) == []


def test_the_evidence_counts_the_steps_that_are_left_out() -> None:
    history = lines({**RL, "rollout/wait_seconds/engines": constant(80)}, noise=0.0)
    (finding,) = advise(facts(history, recipe(**ASYNC), notices=DEATH_NOTICES))
    assert finding["evidence"] == (
        "rollout/wait_seconds/engines is 68% of the time up to step 60, without 5 steps in which workers died or restarted"
    )
