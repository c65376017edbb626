"""Rules of advice: parts of a run that do not answer or fail."""

from __future__ import annotations

from megarl.observe.advice.facts import Facts
from megarl.observe.advice.rule import RuleFinding, rule

_LONGEST_STEPS, _LEAST_SECONDS = 3, 60
_UNSCORED = 0.1
_LOST, _LEAST_WALL = 0.1, 3600

# The last phase of the controller that has ended in the running step -> who works since then.
_TRAINERS = ("gen", "data", "teacher", "old_log_prob", "reference", "values", "adv", "update_critic")
_WEIGHTS = ("update_actor", "save", "drain", "journal")


@rule(
    "liveness",
    f"nothing was written for {_LONGEST_STEPS} times the longest step so far, at least {_LEAST_SECONDS} s; before the first "
    "step for `rollout.start_timeout`",
    "a step varies, but seldom by this factor; only of live runs",
)
def silent(run: Facts) -> RuleFinding | None:
    if run.silence is None:
        return None
    seconds, phase = run.silence.seconds, run.silence.phase
    longest = max((line.get("timing_s/step", 0.0) for line in run.lines), default=0.0)
    limit = max(_LONGEST_STEPS * longest, _LEAST_SECONDS) if longest else run.setting("rollout.start_timeout")
    if seconds <= limit:
        return None
    who, key = _who(run, phase)
    evidence = f"the longest step so far took {longest:.0f} s" if longest else "no step is finished"
    evidence += f"; the last phase that ended is {phase}" if phase else "; no phase of the running step has ended"
    last = run.lines[-1]["step"] if run.lines else 0
    for notice in run.notices:
        if notice.get("event") in ("outage", "death") and (notice.get("step") or 0) > last:
            evidence += f"; step {notice['step']}: {str(notice['text']).splitlines()[0]}"
    sooner = round(max(5 * longest, 10 * _LEAST_SECONDS))
    changes = run.set(key, float(sooner)) if longest and sooner < run.setting(key) else ()
    note = "`megarl doctor RUN` shows what each process does now, and who waits for whom."
    if changes:
        note += " The change ends such a wait sooner, with the names of the silent processes."
    return RuleFinding(f"nothing has arrived for {seconds:.0f} s: {who}", evidence, changes, note)


def _who(run: Facts, phase: str | None) -> tuple[str, str]:
    """Return who works, and the key of the time limit."""
    if run.setting("train.source") != "rollout" and phase is None:
        return "the controller reads data", "cluster.stall"
    if phase in _TRAINERS:
        return "the trainers compute", "cluster.stall"
    if phase in _WEIGHTS:
        return "trainers write a checkpoint, or send weights to the engines", "weight_sync.timeout"
    if phase is None and run.share("rollout/wait_seconds/scorers") > run.share("rollout/wait_seconds/engines"):
        return "groups are sampled and scored, and in the steps before the scorers took longest", "rollout.timeout"
    return "the engines sample, or their samples are scored", "rollout.timeout"


@rule(
    "liveness",
    f"more than {_UNSCORED:.0%} of the sampled groups were dropped, because a sample could not be scored (last 20 steps)",
    "each such group was sampled in vain, and rows that fail are missing in training",
)
def scoring_fails(run: Facts) -> RuleFinding | None:
    recent = run.steps[-20:]
    tried, unscored = (
        sum(line.get(f"rollout/{name}", 0) for line in recent) for name in ("prompts_tried", "groups_unscored")
    )
    if not tried or unscored / tried <= _UNSCORED:
        return None
    causes = {
        name: sum(line.get(f"rollout/scoring_{name}", 0) for line in recent)
        for name in ("timeouts", "crashes", "errors", "unavailable")
    }
    worst = max(causes, key=lambda name: causes[name])
    changes = {
        "timeouts": (*run.scale("reward.timeout", 3), *run.scale("reward.processes", 2)),
        "crashes": run.scale("reward.memory_mb", 2),
        "errors": (),
        "unavailable": run.scale("reward.retries", 3),
    }[worst]
    return RuleFinding(
        "samples cannot be scored",
        f"{unscored:,.0f} of {tried:,.0f} groups in steps {recent[0]['step']:,} to {recent[-1]['step']:,}; failed samples: "
        + ", ".join(f"{name} {count:,.0f}" for name, count in causes.items() if count),
        changes,
        "The run's notices and docs/rewards.md name the errors and the rows.",
    )


@rule(
    "liveness",
    f"more than {_LOST:.0%} of a run of over an hour went into steps that were repeated or undone",
    "a smaller interval between checkpoints costs less than it saves then",
)
def work_lost(run: Facts) -> RuleFinding | None:
    wall = run.ettr.get("wall") or 0.0
    lost = run.ettr.get("repeated", 0.0) + run.ettr.get("dropped", 0.0)
    if wall < _LEAST_WALL or lost / wall <= _LOST:
        return None
    every = run.setting("train.save_every")
    changes = run.scale("train.save_every", 0.5) if every > 1 else run.set("train.save_every", every or 10)
    return RuleFinding(
        "faults cost much work",
        f"{lost / 3600:.1f} of {wall / 3600:.1f} hours, in {len(run.sessions)} starts",
        (*changes, *run.set("train.journal", True)),
        "The faults are in summary.json and in the report.",
    )
