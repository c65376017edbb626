"""Rules of advice: rewards, entropy, lengths and evaluations of a policy that learns nothing, or the wrong thing."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from megarl.observe.advice.facts import Curve, Facts
from megarl.observe.advice.rule import RuleFinding, rule

_EQUAL, _MISSING, _LEAST_GROUPS = 0.8, 0.2, 6
_ENTROPY, _ENTROPY_SHARE, _ENTROPY_HIGH, _ENTROPY_GROWTH = 0.05, 0.25, 1.0, 2
_SOLVED, _FALL, _FALL_ERRORS = 0.9, 0.5, 4
_LOOPS, _LOOP_RATIO, _LOOP_CHARACTERS, _LEAST_SAMPLES = 0.25, 10, 200, 8
_TRUNCATED, _LONGER = 0.2, 1.5
_ACCURACY_LOST, _LOSS_GAIN = 0.05, 1.05
_TOOLS, _TURNS = 0.5, 0.3
_LR = "actor.optimizer.lr"
FEWEST_EVALUATIONS = 3


def reward_of(run: Facts) -> Curve | None:
    """Return the reward of everything sampled: with filtered groups the trained batch shows no progress.

    None in distillation, which trains on no reward.
    """
    if run.setting("algorithm.advantage") in ("none", "on_policy_distillation"):
        return None
    return run.curve("rollout/rewards/mean") or run.curve("critic/rewards/mean")


def _place(run: Facts) -> float | None:
    """Return the newest mean reward between the lowest (0) and the highest (1) reward of a sample; None if all were equal."""
    reward, lowest, highest = reward_of(run), run.curve("critic/rewards/min"), run.curve("critic/rewards/max")
    if reward is None or lowest is None or highest is None or highest.values.max() == lowest.values.min():
        return None
    low, high = float(lowest.values.min()), float(highest.values.max())
    return (reward.last - low) / (high - low)


@rule(
    "learning",
    f"more than {_EQUAL:.0%} of the groups have equal rewards: filtered groups with dynamic sampling, else groups in samples/, else "
    "every advantage is 0",
    "such groups have no gradient (DAPO, arXiv 2503.14476), so at most a fifth of the samples is used",
)
def rewards_equal(run: Facts) -> RuleFinding | None:
    evidence = _equal_groups(run)
    if evidence is None or reward_of(run) is None:
        return None
    place = _place(run)
    sampling = (
        run.set("algorithm.dynamic_sampling.enabled", True) if run.setting("algorithm.advantage") == "grpo" else ()
    )
    if place is None:
        note = (
            "Every reward of the run is equal: look at samples/ and test the scorer (`megarl plan` scores one sample)."
        )
        return RuleFinding("all samples get the same reward", evidence, (), note)
    if place < 0.5:
        more = run.scale("rollout.samples_per_prompt", 2)
        note = "The rows are too hard: begin with easier ones (`data.curriculum`), or with SFT."
        return RuleFinding("most groups have only low rewards", evidence, (*more, *sampling), note)
    note = "The rows are too easy: the run has learned them, or needs harder ones (`data.train_files`)."
    return RuleFinding("most groups have only high rewards", evidence, sampling, note)


def _equal_groups(run: Facts) -> str | None:
    recent = run.steps[-20:]
    tried, filtered = (
        sum(line.get(f"rollout/{name}", 0) for line in recent) for name in ("prompts_tried", "groups_filtered")
    )
    if run.setting("algorithm.dynamic_sampling.enabled"):
        if len(recent) < 5 or not tried or filtered / tried <= _EQUAL:
            return None
        return f"{filtered:,.0f} of {tried:,.0f} groups were filtered in steps {recent[0]['step']:,} to {recent[-1]['step']:,}"
    groups: dict[Any, list[float]] = defaultdict(list)
    for record in run.samples:
        if isinstance(record.get("reward"), (int, float)):
            groups[record.get("group")].append(record["reward"])
    rewards = [group for group in groups.values() if len(group) > 1]
    equal = sum(len(set(group)) == 1 for group in rewards)
    if len(rewards) >= _LEAST_GROUPS:
        return f"{equal} of the newest {len(rewards)} groups in samples/" if equal / len(rewards) > _EQUAL else None
    most, least = run.curve("critic/advantages/max", fewest=5), run.curve("critic/advantages/min", fewest=5)
    if most is None or least is None or most.values[-5:].any() or least.values[-5:].any():
        return None
    return f"critic/advantages/max and min are 0 in steps {most.steps[-5]:,.0f} to {most.steps[-1]:,.0f}"


@rule(
    "learning",
    f"dynamic sampling: more than {_MISSING:.0%} of a step's groups are missing at its limit (last 20 steps)",
    "the batches are smaller than planned, so updates are noisier at the same learning rate",
)
def batches_incomplete(run: Facts) -> RuleFinding | None:
    curve, planned = run.curve("rollout/groups_missing", fewest=5), run.setting("data.prompts_per_step")
    if curve is None or (mean := float(curve.values[-20:].mean())) / planned <= _MISSING:
        return None
    changes = run.scale("algorithm.dynamic_sampling.max_attempts", 2)
    evidence = f"{mean:.1f} of {planned} groups, mean of steps {curve.steps[-20:][0]:,.0f} to {curve.steps[-1]:,.0f}"
    return RuleFinding("batches are incomplete", evidence, changes)


@rule(
    "learning",
    f"the entropy is below {_ENTROPY} nats and {_ENTROPY_SHARE:.0%} of its start, and the reward does not rise any more",
    "e^0.05: 1.05 choices per token. What entropy can buy is then spent (arXiv 2505.22617); a low entropy of a policy that "
    f"still learns, or that has {_SOLVED:.0%} of the highest reward, is healthy",
)
def entropy_collapsed(run: Facts) -> RuleFinding | None:
    entropy, reward = run.curve("actor/entropy"), reward_of(run)
    if entropy is None or reward is None or entropy.last >= min(_ENTROPY, _ENTROPY_SHARE * entropy.first):
        return None
    if reward.still(1) or (_place(run) or 0) >= _SOLVED:
        return None
    higher = run.setting("algorithm.loss") == "ppo_clip" and run.setting("algorithm.clip_high") < 0.28
    changes = run.set("algorithm.clip_high", 0.28) if higher else ()
    bonus = run.set("algorithm.entropy_coef", 0.001) if not run.setting("algorithm.entropy_coef") else ()
    evidence = f"actor/entropy {entropy.text()}; reward {reward.text()}"
    return RuleFinding("the entropy has collapsed", evidence, (*changes, *bonus, *run.scale(_LR, 0.5)))


@rule(
    "learning",
    f"the entropy is above {_ENTROPY_HIGH:g} nat and {_ENTROPY_GROWTH} times its start, and the reward does not rise",
    "the policy becomes random: a bonus that is too large, or updates that only push tokens down",
)
def entropy_explodes(run: Facts) -> RuleFinding | None:
    entropy, reward = run.curve("actor/entropy"), reward_of(run)
    if (
        entropy is None
        or reward is None
        or entropy.last <= max(_ENTROPY_HIGH, _ENTROPY_GROWTH * entropy.first)
        or reward.rises
    ):
        return None
    less = run.set("algorithm.entropy_coef", 0.0)
    evidence = f"actor/entropy {entropy.text()}; reward {reward.text()}"
    return RuleFinding("the entropy explodes", evidence, (*less, *run.scale(_LR, 0.5)))


@rule(
    "learning",
    f"the reward has fallen by more than {_FALL:.0%} of its gain and {_FALL_ERRORS} standard errors below the best part of the run",
    "half of the progress is lost; 4 errors, because the best of many parts is high by chance",
)
def reward_falls(run: Facts) -> RuleFinding | None:
    reward = reward_of(run)
    if reward is None:
        return None
    best, step = reward.best
    gain = best - reward.first
    if (
        reward.errors_below_best <= _FALL_ERRORS
        or best - reward.last <= _FALL * gain
        or not (reward.still(-1) or reward.falls)
    ):
        return None
    kl = run.scale("algorithm.kl_coef", 2) or run.set("algorithm.kl_coef", 0.001)
    note = f"A checkpoint of about step {step:,} is the best to go on from (`train.resume`)."
    evidence = f"reward {best:.3g} up to step {step:,}, {reward.last_text()}"
    return RuleFinding("the reward falls", evidence, (*run.scale(_LR, 0.5), *kl), note)


@rule(
    "learning",
    f"at least {_LOOPS:.0%} of the newest samples were truncated while they repeated themselves: the last half of the text "
    f"compresses by more than {_LOOP_RATIO}",
    "English text compresses by 2 to 4 (zlib); a higher length limit only makes loops longer",
)
def responses_loop(run: Facts) -> RuleFinding | None:
    texts = [record for record in run.samples if isinstance(record.get("response"), str)]
    loops = [record for record in texts if record.get("finish_reason") == "length" and _repeats(record)]
    if len(texts) < _LEAST_SAMPLES or len(loops) / len(texts) < _LOOPS:
        return None
    kl = run.set("algorithm.kl_coef", 0.001) if not run.setting("algorithm.kl_coef") else ()
    cooler = run.set("rollout.temperature", 1.0) if run.setting("rollout.temperature") > 1 else ()
    note = "Look at them in samples/: a missing end-of-text token in SFT data or chat template has the same effect."
    evidence = f"{len(loops)} of the newest {len(texts)} samples"
    return RuleFinding("responses run into loops", evidence, (*cooler, *run.scale(_LR, 0.5), *kl), note)


def _repeats(record: Mapping[str, Any]) -> bool:
    text = record["response"].encode("utf-8", "backslashreplace")
    half = text[len(text) // 2 :]
    return len(half) >= _LOOP_CHARACTERS and len(half) > _LOOP_RATIO * len(zlib.compress(half))


@rule(
    "learning",
    f"more than {_TRUNCATED:.0%} of the responses reach the length limit",
    "their reward says nothing about an answer; DAPO shapes or excludes them (arXiv 2503.14476, section 3.4)",
)
def responses_truncated(run: Facts) -> RuleFinding | None:
    curve = run.curve("rollout/truncated") or run.curve("response_length/clip_ratio")
    if (
        run.setting("train.source") != "rollout"
        or curve is None
        or curve.last <= _TRUNCATED
        or run.setting("rollout.ignore_eos")
    ):
        return None
    limit = run.setting("rollout.max_response_length")
    buffer = run.setting("algorithm.overlong.penalty_buffer")
    changes = (
        *run.scale("rollout.max_response_length", 2),
        *(run.set("algorithm.overlong.penalty_buffer", max(1, limit // 5)) if not buffer else ()),
        *run.set("algorithm.overlong.filter", True),
    )
    return RuleFinding("many responses are truncated", f"{curve.last_text('.0%')}, at {limit:,} tokens", changes)


@rule(
    "learning",
    f"the reward rises while the accuracy falls by more than noise, or while responses grow by {_LONGER} and the accuracy stays",
    "the policy earns other parts of the reward than right answers; needs `eval/pass@1` or a reward part `accuracy`",
)
def reward_hacked(run: Facts) -> RuleFinding | None:
    reward, length, accuracy = (
        reward_of(run),
        run.curve("response_length/mean"),
        run.curve("critic/score/accuracy/mean"),
    )
    evaluations = run.curve("eval/pass@1", fewest=FEWEST_EVALUATIONS)
    if accuracy is None or run.setting("algorithm.dynamic_sampling.enabled"):
        accuracy = None if evaluations is None or len(evaluations.values) < 10 else evaluations
    if reward is None or length is None or accuracy is None or not reward.rises:
        return None
    longer = length.last > _LONGER * length.first and length.rises
    if not accuracy.falls and not (longer and not accuracy.rises):
        return None
    buffer = run.setting("algorithm.overlong.penalty_buffer") or run.setting("rollout.max_response_length") // 2
    shape = run.set("algorithm.overlong.penalty_buffer", buffer) if longer else ()
    unbiased = (
        run.set("algorithm.normalize_by_std", False) if longer and run.setting("algorithm.advantage") == "grpo" else ()
    )
    kl = run.scale("algorithm.kl_coef", 2) or run.set("algorithm.kl_coef", 0.001)
    evidence = f"reward {reward.text()}; accuracy {accuracy.text()}; response length {length.text('.0f')}"
    note = "Look at samples/ with high rewards, and at the weights of the reward's parts."
    return RuleFinding("the reward rises without right answers", evidence, (*shape, *unbiased, *kl), note)


@rule(
    "learning",
    f"the last two evaluations are more than {_ACCURACY_LOST:.0%} below the best one while the training reward rises; SFT, DPO: "
    f"`eval/loss` is more than {_LOSS_GAIN - 1:.0%} above its lowest while the training loss falls",
    "two evaluations, since one may be chance: of 200 problems, one standard error is 3.5 % at most",
)
def evaluation_falls(run: Facts) -> RuleFinding | None:
    loss = run.setting("train.source") != "rollout"
    name, trained = ("eval/loss", run.curve("actor/loss")) if loss else ("eval/pass@1", reward_of(run))
    points = [(line["step"], line[name]) for line in run.lines if name in line and line[name] == line[name]]
    if len(points) < FEWEST_EVALUATIONS or trained is None:
        return None
    values = [value for _, value in points]
    best = min(values) if loss else max(values)
    step = points[values.index(best)][0]
    if loss:
        worse = all(value > _LOSS_GAIN * best for value in values[-2:]) and trained.falls
    else:
        worse = all(best - value > _ACCURACY_LOST for value in values[-2:]) and trained.rises
    if not worse:
        return None
    kl = () if loss else run.scale("algorithm.kl_coef", 2) or run.set("algorithm.kl_coef", 0.001)
    shorter = run.set("train.steps", step) if loss and step > 0 else ()
    epochs = max((v for k, v in run.steps[-1].items() if k.startswith("data/epochs/")), default=0)
    note = f"The checkpoint of step {step:,} is the best."
    note += f" The rows were drawn {epochs:.1f} times: more rows help most." if epochs > 2 else ""
    evidence = (
        f"{name} {best:.3g} in step {step:,}, {values[-1]:.3g} in step {points[-1][0]:,}; training {trained.text()}"
    )
    return RuleFinding(
        "the evaluation gets worse while training gets better", evidence, (*shorter, *kl, *run.scale(_LR, 0.5)), note
    )


@rule(
    "learning",
    f"more than {_TOOLS:.0%} of the tool calls fail (last 20 steps)",
    "the policy learns the tool's errors",
)
def tools_fail(run: Facts) -> RuleFinding | None:
    recent = [line for line in run.steps if "agent/calls/mean" in line][-20:]
    group = run.setting("rollout.samples_per_prompt")
    calls = sum(line["agent/calls/mean"] * line.get("rollout/prompts_tried", 0) * group for line in recent)
    failed, late = (sum(line.get(f"agent/{name}", 0) for line in recent) for name in ("failed_calls", "tool_timeouts"))
    if len(recent) < 5 or calls <= 0 or failed / calls <= _TOOLS:
        return None
    slower = (*run.scale("agent.tool_timeout", 2), *run.scale("agent.processes", 2)) if late > failed / 2 else ()
    evidence = f"{failed:,.0f} of {calls:,.0f} calls in steps {recent[0]['step']:,} to {recent[-1]['step']:,}, {late:,.0f} by time-out"
    return RuleFinding("tool calls fail", evidence, slower, "`megarl view` shows failed calls with their messages.")


@rule(
    "learning",
    f"more than {_TURNS:.0%} of the samples end at `agent.max_turns`",
    "their reward judges an unfinished solution",
)
def turns_run_out(run: Facts) -> RuleFinding | None:
    curve = run.curve("agent/ended/turns")
    if curve is None or curve.last <= _TURNS:
        return None
    return RuleFinding(
        "samples run out of turns", f"agent/ended/turns {curve.last_text('.0%')}", run.scale("agent.max_turns", 2)
    )
