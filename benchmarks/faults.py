"""Kill a run at random moments for some time, resume it each time, and check that every group was trained exactly once.

    python -m benchmarks.faults [--minutes 60] [--seed 0] [--out runs/faults]

A tiny model trains with two engines that sample two batches ahead. Each start draws the rule of running requests at an update
(`rollout.at_update`), the moment of its end and the signal: SIGKILL, SIGTERM or SIGINT to the controller, or SIGKILL to an
engine or a trainer. The next start resumes from the newest checkpoint. The script ends with status 1 at the first violation:

- a process of the run lives on 60 s after its end;
- a start ends before it was killed;
- a step is missing from the metrics;
- a trained group appears twice, or more groups before it are missing than the window allows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

from megarl.commands.data.quickstart import prepare_quickstart

ROOT = Path(__file__).parent.parent
RULES = ("drain", "finish", "refresh", "keep")
PROMPTS, STALENESS = 4, 2
OVERTAKING = (
    PROMPTS  # later groups that may enter a batch before a group: the default of rollout.window, in whole batches
)
END_SECONDS = 60.0
START_SECONDS = 400.0
CONTROLLER = ("controller SIGKILL", "controller SIGTERM", "controller SIGINT")
VICTIMS = (*CONTROLLER, "engine0", "engine1", "trainer-0")


@dataclass(frozen=True)
class Kill:
    """A start of the run and its end: `seconds` after `steps` further steps. Without a step, while it starts."""

    rule: str
    victim: str
    steps: int
    seconds: float

    @classmethod
    def draw(cls, order: random.Random) -> Kill:
        rule, steps = order.choice(RULES), order.choice([0, 1, 1, 2, 3])
        if steps == 0:  # engines and trainers may not have started
            return cls(rule, order.choice(CONTROLLER), 0, order.random() * 40)
        return cls(rule, order.choice(VICTIMS), steps, order.random() * 3)


class Violation(Exception):
    """The run broke a rule of the module's docstring."""


def settings(out: Path, rule: str) -> list[str]:
    return [
        f"model.path={out}/quickstart/model", f"data.train_files=[{out}/quickstart/data/train.parquet]", "data.eval_files=[]",
        f"runs_dir={out}", "name=run", "cluster.placement=disaggregated", "cluster.trainers=1", "megatron.expert_parallel=1",
        "rollout.engines=2", f"rollout.max_staleness={STALENESS}", f"rollout.at_update={rule}",
        f"data.prompts_per_step={PROMPTS}", "rollout.samples_per_prompt=4", "rollout.max_response_length=48",
        "rollout.engine_args.max_num_seqs=8", "reward.function=tests.support.scorers:letters",
        "algorithm.dynamic_sampling.enabled=false", "algorithm.overlong.penalty_buffer=0", "evaluation.at_start=false",
        "evaluation.at_end=false", "observe.samples_per_step=1000", "train.steps=1000000", "train.save_every=1",
        "train.keep_checkpoints=3", "train.export_at_end=false", "train.resume=auto",
    ]  # fmt: skip


def lines_of(out: Path) -> list[dict[str, float]]:
    """Return the metrics of the run's steps so far, without a line that is being written."""
    path = out / "run" / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def pid_of(out: Path, log: str) -> int:
    """Return the process id in the last header of a process's log."""
    text = (out / "run" / "logs" / f"{log}.log").read_text()
    return int(re.findall(r"^=== megarl: .*, pid (\d+) on ", text, re.MULTILINE)[-1])


def end(process: subprocess.Popen[bytes], out: Path, kill: Kill) -> None:
    if kill.victim.startswith("controller"):
        os.kill(process.pid, getattr(signal, kill.victim.split()[1]))
    else:
        os.kill(pid_of(out, kill.victim), signal.SIGKILL)


def run_until(out: Path, kill: Kill) -> None:
    """Start or resume the run and end it as `kill` says. Raises Violation."""
    before = len(lines_of(out))
    command = [sys.executable, "-m", "megarl", "train", "recipes/quickstart.yaml", *settings(out, kill.rule)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (out / "output.log").open("ab") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
    deadline = time.monotonic() + START_SECONDS
    while len(lines_of(out)) < before + kill.steps:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise Violation(f"the start ended with {process.poll()} before it was killed; see {log.name}")
        time.sleep(0.05)
    time.sleep(kill.seconds)
    started = psutil.Process(process.pid).children(recursive=True)
    end(process, out, kill)
    _, alive = psutil.wait_procs(
        [psutil.Process(process.pid), *started] if process.poll() is None else started, END_SECONDS
    )
    process.poll()
    if alive:
        raise Violation(f"{len(alive)} processes live {END_SECONDS:.0f} s after the end: {alive[:3]}")


def check(out: Path) -> Counter[int]:
    """Return how often each group was trained. Raises Violation."""
    steps = [int(line["step"]) for line in lines_of(out)]
    if steps != list(range(1, len(steps) + 1)):
        raise Violation(f"the steps are not in order: {steps[-20:]}")
    trained: Counter[int] = Counter()
    for step in steps:
        records = [json.loads(line) for line in (out / "run" / "samples" / f"step_{step:06}.jsonl").open()]
        groups = {record["group"] for record in records}
        if len(groups) != PROMPTS:
            raise Violation(f"step {step} trained on {len(groups)} groups: {sorted(groups)}")
        trained.update(groups)
        early = step * PROMPTS - OVERTAKING
        if missing := set(range(early)) - trained.keys():
            raise Violation(f"after step {step}, groups {sorted(missing)[:5]} are missing")
    if twice := [group for group, times in trained.items() if times > 1]:
        raise Violation(f"groups {twice[:5]} were trained more than once")
    return trained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "faults")
    options = parser.parse_args()
    out = options.out.absolute()
    out.mkdir(parents=True)
    prepare_quickstart(out / "quickstart", seed=0)
    order, kills = random.Random(options.seed), Counter[str]()
    deadline = time.monotonic() + options.minutes * 60
    try:
        while time.monotonic() < deadline:
            kill = Kill.draw(order)
            run_until(out, kill)
            kills[f"{kill.rule}, {kill.victim}"] += 1
            trained = check(out)
            print(f"{kill}: {len(lines_of(out))} steps, {len(trained)} groups, each trained once", flush=True)
    except Violation as violation:
        sys.exit(f"{kill}: {violation}")
    print(
        f"{sum(kills.values())} starts were killed (seed {options.seed}); {len(lines_of(out))} steps, each group trained once"
    )
    for text, count in sorted(kills.items()):
        print(f"  {text}: {count}")


if __name__ == "__main__":
    main()
