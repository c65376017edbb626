"""Rules of advice: devices that wait."""

from __future__ import annotations

from megarl.errors import pluralize
from megarl.observe.advice.facts import Facts
from megarl.observe.advice.rule import RuleFinding, rule

_SCORERS, _WINDOW, _ENGINES, _IDLE = 0.2, 0.1, 0.4, 0.4
_SYNC, _SAVE, _EVALUATION, _UNTIMED = 0.2, 0.1, 0.3, 0.3
_FILLED, _SAMPLES, _TOKENS, _UNEVEN = 0.6, 1.5, 4096, 1.5


@rule(
    "speed",
    f"the trainers waited for scorers for more than {_SCORERS:.0%} of the time",
    "scoring runs on the hosts' cores: more processes are cheaper than devices that wait",
)
def scorers_slow(run: Facts) -> RuleFinding | None:
    if (share := run.share("rollout/wait_seconds/scorers")) <= _SCORERS:
        return None
    judge = run.setting("judge.path") is not None
    changes = (
        run.scale("judge.engines", 2)
        if judge
        else (*run.scale("reward.processes", 2), *run.scale("reward.concurrent", 2))
    )
    note = (
        "" if judge else "`reward.processes` is per engine, `reward.concurrent` is for async scorers; docs/rewards.md."
    )
    return RuleFinding(
        "the trainers wait for scorers", _of_time(run, "rollout/wait_seconds/scorers", share), changes, note
    )


@rule(
    "speed",
    f"disaggregated: engines had no group for more than {_IDLE:.0%} of the time",
    "two fifths of the engines' devices are then unused",
)
def engines_idle(run: Facts) -> RuleFinding | None:
    curve = run.curve("rollout/engines_idle", steps=run.timed_steps)
    if run.setting("cluster.placement") != "disaggregated" or curve is None or curve.last <= _IDLE:
        return None
    staleness = run.setting("rollout.max_staleness")
    changes = run.set("rollout.max_staleness", 1.0) if staleness < 1 else run.scale("rollout.engines", 0.5)
    note = "Engines then sample while the trainers compute." if staleness < 1 else "Give the devices to the trainers."
    return RuleFinding(
        "the engines are idle", f"rollout/engines_idle {curve.last_text('.0%')}", changes, f"{note} docs/asynchrony.md."
    )


@rule(
    "speed",
    f"disaggregated: the trainers waited for samples for more than {_ENGINES:.0%} of the time",
    "the engines are the bottleneck; `megarl plan` and `megarl simulate` compare layouts",
)
def trainers_wait(run: Facts) -> RuleFinding | None:
    share = run.share("rollout/wait_seconds/engines")
    if run.setting("cluster.placement") != "disaggregated" or share <= _ENGINES:
        return None
    ahead = run.set("rollout.max_staleness", 1.0) if run.setting("rollout.max_staleness") < 1 else ()
    evidence = _of_time(run, "rollout/wait_seconds/engines", share)
    return RuleFinding("the trainers wait for the engines", evidence, (*ahead, *run.scale("rollout.engines", 2)))


@rule(
    "speed",
    f"the trainers waited for the oldest groups for more than {_WINDOW:.0%} of the time, although enough others were finished",
    "a larger window takes these others; the lag of the oldest rises",
)
def window_small(run: Facts) -> RuleFinding | None:
    if (share := run.share("rollout/wait_seconds/window")) <= _WINDOW:
        return None
    wider = run.scale("rollout.window", 2) or run.set("rollout.window", 0.3)
    return RuleFinding(
        "the trainers wait for the slowest groups", _of_time(run, "rollout/wait_seconds/window", share), wider
    )


@rule(
    "speed",
    f"weight sync took more than {_SYNC:.0%} of the time",
    "sharded sync sends each slice once, adapters alone are a hundredth of the model",
)
def weight_sync_slow(run: Facts) -> RuleFinding | None:
    if (share := run.share("timing_s/weight_sync")) <= _SYNC:
        return None
    if run.setting("lora.rank"):
        changes = run.set("weight_sync.adapters", "only")
    else:
        changes = run.set("weight_sync.route", "auto") if run.setting("weight_sync.route") == "full" else ()
    larger = run.scale("weight_sync.bucket_mb", 4) if run.setting("weight_sync.bucket_mb") < 256 else ()
    note = "`weight_sync/seconds/...` has the phases; docs/weight_sync.md."
    return RuleFinding(
        "weight sync takes long", _of_time(run, "timing_s/weight_sync", share), (*changes, *larger), note
    )


@rule(
    "speed",
    f"checkpoints took more than {_SAVE:.0%} of the time",
    "a write in the background costs only the copy to host memory",
)
def checkpoints_slow(run: Facts) -> RuleFinding | None:
    if (share := run.share("timing_s/save")) <= _SAVE:
        return None
    changes = (*run.set("train.save_in_background", True), *run.scale("train.save_every", 2))
    return RuleFinding("checkpoints take long", _of_time(run, "timing_s/save", share), changes)


@rule("speed", f"evaluations during the run took more than {_EVALUATION:.0%} of the time", "fewer show the same curve")
def evaluations_slow(run: Facts) -> RuleFinding | None:
    share = run.share("timing_s/eval")
    if not run.setting("evaluation.every") or share <= _EVALUATION:
        return None
    return RuleFinding("evaluations take long", _of_time(run, "timing_s/eval", share), run.scale("evaluation.every", 2))


@rule(
    "speed",
    f"without packing, less than {_FILLED:.0%} of the micro batches' tokens are tokens of samples",
    "the rest is padding",
)
def padding(run: Facts) -> RuleFinding | None:
    curve = run.curve("perf/micro_batch_share")
    if run.setting("megatron.packing") or curve is None or curve.last >= _FILLED:
        return None
    evidence = f"perf/micro_batch_share {curve.last_text('.0%')}"
    return RuleFinding("the trainers compute padding", evidence, run.set("megatron.packing", True))


@rule(
    "speed",
    f"a micro batch has less than {_SAMPLES:g} samples and less than {_TOKENS:,} tokens",
    "matrix products of few tokens do not fill a device; packed samples are computed together",
)
def micro_batches_small(run: Facts) -> RuleFinding | None:
    batches, tokens = run.curve("actor/micro_batches"), run.curve("perf/total_num_tokens")
    layout = [run.setting(f"megatron.{size}_parallel") for size in ("tensor", "pipeline", "context")]
    replicas = run.setting("cluster.trainers") / (layout[0] * layout[1] * layout[2])
    if batches is None or tokens is None or batches.last <= 0 or replicas < 1:
        return None
    passes = batches.last * replicas / run.setting("actor.epochs")
    samples = run.setting("data.prompts_per_step") * _samples_per_prompt(run) / passes
    per_device = tokens.last / passes / layout[2]
    if samples >= _SAMPLES or per_device >= _TOKENS:
        return None
    return RuleFinding(
        "the trainers compute samples one by one",
        f"{samples:.1f} samples and {per_device:,.0f} tokens per micro batch (median of the last {batches.width} steps)",
        run.scale("actor.max_tokens_per_micro_batch", 4),
        "`megarl plan` says whether the memory is enough.",
    )


def _samples_per_prompt(run: Facts) -> int:
    return {"rollout": run.setting("rollout.samples_per_prompt"), "sft": 1, "preferences": 2}[
        run.setting("train.source")
    ]


@rule(
    "speed",
    f"with pipeline or expert parallelism, the largest micro batch has more than {_UNEVEN:g} times the mean FLOPs",
    "all ranks wait for the largest",
)
def micro_batches_uneven(run: Facts) -> RuleFinding | None:
    curve = run.curve("perf/micro_batch_imbalance")
    parallel = max(run.setting(f"megatron.{name}") for name in ("pipeline_parallel", "expert_parallel"))
    if parallel == 1 or curve is None or curve.last <= _UNEVEN:
        return None
    evidence = f"perf/micro_batch_imbalance {curve.last_text()}"
    return RuleFinding("micro batches are uneven", evidence, run.scale("actor.max_tokens_per_micro_batch", 2))


@rule(
    "speed",
    f"more than {_UNTIMED:.0%} of the time is outside all phases, in steps of 1 s and more",
    "the controller is busy on its host while all devices wait",
)
def controller_slow(run: Facts) -> RuleFinding | None:
    steps = run.timed_steps
    whole = sum(line.get("timing_s/step", 0.0) for line in steps)
    phases = sum(
        value
        for line in steps
        for name, value in line.items()
        if name.startswith("timing_s/") and name != "timing_s/step"
    )
    if len(steps) < 10 or not phases or whole < len(steps) or 1 - phases / whole <= _UNTIMED:
        return None
    return RuleFinding(
        "the controller is slow",
        f"{1 - phases / whole:.0%} of {whole:,.0f} s in steps {steps[0]['step']:,} to {steps[-1]['step']:,}",
        run.set("observe.samples_per_step", 8) if run.setting("observe.samples_per_step") > 8 else (),
        "trace.json has the controller's calls; check the host's load and the file system of the run's directory.",
    )


def _of_time(run: Facts, name: str, share: float) -> str:
    last = [line["step"] for line in run.timed_steps if name in line][-1]
    without = len([step for step in run.death_steps if step <= last])
    left_out = f", without {pluralize(without, 'step')} in which workers died or restarted" if without else ""
    return f"{name} is {share:.0%} of the time up to step {last:,}{left_out}"
