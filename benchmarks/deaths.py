"""Inject faults into one run that goes on, and check that it trains each group exactly once and leaves nothing behind.

    python -m benchmarks.deaths [--faults 20] [--minutes 600] [--victims all] [--kinds ...] [--moments ...] [--rule refresh]
        [--seed 0] [--limit 900] [--out runs/deaths]

A tiny model trains with two trainers and three engines. Whatever dies starts again while the run goes on: engines
(`rollout.min_engines`), trainers (`train.trainer_restarts`), and all of it after the death of the controller (`train.restarts`,
`train.journal`). Kinds and moments of the faults are drawn in turns, so that each appears about equally often:

- kinds: SIGKILL; SIGSTOP; a process that hangs without being stopped; TCP connections of a process that are shut down; a full disk
  below the run's directory; a full /dev/shm. The last two need private file systems, so root (`benchmarks/injection.py`).
- moments: an engine's prefill or decode, scoring, training, an update of the weights, a save, the start of the new process after
  another fault. Engines of such a run never sleep, since they have separate devices.
- victims: engines, trainers, the controller (which is only killed), or all of them. One in five faults of processes hits a second one.

Each fault waits until the run is whole again: it has new steps, with all engines. A full disk may end the run, with its cause: the
script then starts the command again. After the last fault SIGTERM ends the run, and a last start trains a few steps more. The script ends
with status 1 if the run ends otherwise, a process, file or piece of shared memory is left, a step is missing, a group was trained twice or
left out, a step that was trained again had another gradient norm, more than 5 % of the steps have no gradient, or the last start does
not end with status 0. With `--rule drain` it then trains as many steps without a fault, and ends with status 1 if a number of
metrics.jsonl differs: all but times, memory, and `OF_FAULTS`. Each engine samples one sequence at a time there, because rounding
may depend on the other sequences of a step. OUT/faults.jsonl has a line per fault, OUT/result.json the summary, which is also printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from benchmarks.fault_schedule import KINDS, MOMENTS, Fault, schedule, summary
from benchmarks.faults import END_SECONDS, ROOT, Violation, check, lines_of, pid_of
from benchmarks.faults import settings as settings_of
from benchmarks.injection import fill, mount_private, strike
from megarl.cluster.stacks.channel import read_stacks
from megarl.commands.data.quickstart import prepare_quickstart
from megarl.observe.metrics import without_times

ENGINES, TRAINERS = 3, 2
MOMENT_SECONDS = 20.0  # until a moment comes; then the fault hits any other
OF_FAULTS = (
    "fleet/",
    "weight_sync/received_bytes",
    "rollout/waiting",
    "rollout/tokens_taken_over",
)  # metrics that faults change
MARK = "MEGARL_FAULTS"  # in the environment of every process of the run
PROCESSES = {
    "engines": [f"engine{number}" for number in range(ENGINES)],
    "trainers": [f"trainer-{number}" for number in range(TRAINERS)],
    "controller": ["controller"],
}
PROCESSES["all"] = [name for names in PROCESSES.values() for name in names]
# Moments that a process's stack shows: the process, and a function of it.
STACKS = {
    "decode": ("engine", r"model_executor/|execute_model|llm_engine"),
    "training": ("trainer-0", r"train_step|update_actor"),
    "update": ("trainer-0", r"megarl/weight_sync/"),
}


def settings(out: Path, rule: str) -> list[str]:
    more: dict[str, object] = {
        "rollout.engines": ENGINES, "rollout.min_engines": 1, "rollout.step_timeout": 60, "train.save_every": 20,
        "train.grace_seconds": 60, "cluster.trainers": TRAINERS, "cluster.stall": 60, "train.trainer_restarts": 3, "train.restarts": 8,
        "train.journal": "true", "reward.function": "benchmarks.injection:slow_letters",
        "actor.optimizer.lr": 1e-5,  # so slow that all steps have a gradient: equal gradient norms of 0 would show nothing
    }  # fmt: skip
    if rule == "drain":
        more["rollout.engine_args.max_num_seqs"] = 1
    base_settings = [each for each in settings_of(out, rule) if each.partition("=")[0] not in more]
    return [*base_settings, *(f"{key}={value}" for key, value in more.items())]


class Run:
    """The run that is hit. `disk`: holds its directory, and nothing else."""

    def __init__(self, out: Path, rule: str, limit: float) -> None:
        self.disk, self.scoring, self.rule, self.limit = out / "disk", out / "scoring", rule, limit
        self.scoring.mkdir()
        self.log, self.mark = out / "output.log", uuid.uuid4().hex
        self.environment = {
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", MARK: self.mark, "MEGARL_SCORING": str(self.scoring),
        }  # fmt: skip

    def command(self, out: Path) -> list[str]:
        return [sys.executable, "-m", "megarl", "train", "recipes/quickstart.yaml", *settings(out, self.rule)]

    def start(self, *more: str) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.command(self.disk), *more], cwd=ROOT, env=os.environ | self.environment, stdout=log, stderr=log
            )

    def lines(self) -> list[dict[str, float]]:
        return lines_of(self.disk)

    def pid(self, name: str) -> int:
        """Return the process id of an engine, a trainer or the controller; 0 if it has none yet."""
        if name == "controller":
            children = psutil.Process(self.process.pid).children()
            return next((child.pid for child in children if "megarl" in child.cmdline()), 0)
        with contextlib.suppress(FileNotFoundError, IndexError):
            return pid_of(self.disk, name)
        return 0

    def output(self, begin: int) -> str:
        """Return the output of the command from this byte on."""
        with self.log.open("rb") as log:
            log.seek(begin)
            return log.read().decode(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the run that live, in whatever session."""
        living = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    living.append(process)
        return living

    def wait(self, state: str, reached: Callable[[], bool], seconds: float | None = None) -> None:
        """Raises Violation if the command ends or the state is not reached."""
        seconds = seconds or self.limit
        deadline = time.monotonic() + seconds
        while not reached():
            if self.process.poll() is not None:
                raise Violation(f"the command has ended with status {self.process.poll()}, not {state}; see {self.log}")
            if time.monotonic() > deadline:
                raise Violation(f"the run is not {state} within {seconds:.0f} s; see {self.log}")
            time.sleep(0.05)

    def is_at(self, moment: str, victim: str) -> bool:
        """Return whether the run is at a moment now, in the victim if several processes could be."""
        if moment == "save":
            return any((self.disk / "run" / "checkpoints").glob(".step_*.partial"))
        if moment == "scoring":
            scorers = [int(path.name) for path in self.scoring.iterdir()]
            engine = self.pid(victim) if victim.startswith("engine") else 0
            return any(not engine or engine in ancestors(pid) for pid in scorers if psutil.pid_exists(pid))
        name, function = STACKS[moment]
        name = name if name != "engine" else victim if victim.startswith("engine") else "engine0"
        threads = read_stacks([self.pid(name)], True)[0].get("threads", [])
        return any(re.search(function, frame) for thread in threads for frame in thread["frames"])

    def wait_for_moment(self, moment: str, victim: str) -> bool:
        """Return False if the moment does not come in time."""
        with contextlib.suppress(Violation):
            self.wait(moment, lambda: self.is_at("update" if moment == "prefill" else moment, victim), MOMENT_SECONDS)
            if moment == "prefill":  # the groups that an update admits come first after it
                self.wait(moment, lambda: not self.is_at("update", victim), MOMENT_SECONDS)
            return True
        return False


def ancestors(pid: int) -> list[int]:
    with contextlib.suppress(psutil.Error):
        return [parent.pid for parent in psutil.Process(pid).parents()]
    return []


def inject(run: Run, fault: Fault) -> tuple[dict[str, int], str]:
    """Hit the run, and return the processes that were hit, and the moment that it was."""
    first = fault.victims[0] if fault.victims else "engine0"
    hit: dict[str, int] = {}

    def hit_now(names: Sequence[str], kind: str) -> None:
        for name in names:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # another fault has ended it
                if pid := run.pid(name):
                    strike(pid, kind)
                    hit[name] = pid

    if fault.moment == "start":
        victim, old = first, run.pid(first)
        hit_now([victim], "kill")
        run.wait("starting again", lambda: run.pid(victim) not in (0, old))
        time.sleep(fault.seconds)
    is_met = fault.moment == "start" or run.wait_for_moment(fault.moment, first)
    if fault.kind in ("disk", "shm"):
        fill(run.disk if fault.kind == "disk" else Path("/dev/shm"), fault.seconds)
    else:
        hit_now(fault.victims, fault.kind)
    return hit, fault.moment if is_met else "any"


class Naming:
    """Notes when the output of the run names a fault for the first time. before: bytes of the output before the fault."""

    def __init__(self, run: Run, fault: Fault, hit: Mapping[str, int], before: int) -> None:
        self.run, self.before, self.began = run, before, time.monotonic()
        words = [rf"\((?:pid|process) {pid}\b" for pid in hit.values()]
        words += ["the controller: "] if "controller" in hit else []
        words += ["disk is full|No space left"] if fault.kind in ("disk", "shm") else []
        self.words = re.compile("|".join(words))
        self.seconds: float | None = None

    def look(self) -> None:
        if self.seconds is None and self.words.search(self.run.output(self.before)):
            self.seconds = round(time.monotonic() - self.began, 1)


def wait_until_whole(run: Run, fault: Fault, hit: dict[str, int], naming: Naming) -> str:
    """Wait until the run has new steps, with all engines and without the processes that were hit. Returns how it got there."""
    before, ends = naming.before, fault.kind in ("kill", "stop", "hang")
    started_again = False

    def is_replaced() -> bool:
        naming.look()
        return not ends or all(
            not psutil.pid_exists(pid) and run.pid(name) not in (0, pid) for name, pid in hit.items()
        )

    def has_steps() -> bool:
        naming.look()
        lines = run.lines()
        return len(lines) > begin + 1 and lines[-1]["fleet/serving"] == ENGINES

    while True:
        try:
            run.wait("whole", is_replaced)
            begin = len(run.lines())
            run.wait("whole", has_steps)
            break
        except Violation:
            names_disk = re.search("disk is full|No space left", run.output(before))
            if fault.kind != "disk" or run.process.poll() != 1 or not names_disk or started_again:
                raise
            run.start()
            started_again = True
    if started_again:
        return "command started again"
    if "the run is started again" not in run.output(before):
        return "went on"
    if ends and "controller" not in hit:
        raise Violation(f"the run has started again after {fault}; see {run.log}")
    return "run started again"


def check_end(run: Run) -> dict[str, float]:
    """End the run, let a last start finish it, and return figures of all steps."""
    run.process.send_signal(signal.SIGTERM)
    for status, more in ((143, None), (0, f"train.steps={len(run.lines()) + 4}")):
        if more is not None:
            run.start(more)
        try:
            ended = run.process.wait(run.limit)
        except subprocess.TimeoutExpired as error:
            raise Violation(f"the run does not end; see {run.log}") from error
        _, alive = psutil.wait_procs(run.processes(), END_SECONDS)
        if ended != status or alive:
            raise Violation(f"the end: status {ended} instead of {status}, {len(alive)} processes live: {alive[:3]}")
    trained, run_directory = check(run.disk), run.disk / "run"
    if "gradient norms differ" in (run_directory / "notices.jsonl").read_text():
        raise Violation("a step that was trained again had another gradient norm; see notices.jsonl")
    without_gradient = sum(line["actor/grad_norm"] == 0 for line in run.lines())
    if without_gradient > 0.05 * len(run.lines()):
        raise Violation(f"{without_gradient} of {len(run.lines())} steps have no gradient: equal norms show nothing")
    left = [*run_directory.glob("checkpoints/.*"), *(Path("/dev/shm").iterdir() if os.path.ismount(run.disk) else [])]
    if left:
        raise Violation(f"files are left: {left[:5]}")
    if run.rule == "drain":
        compare_undisturbed(run)
    return {
        "steps": len(run.lines()), "groups": len(trained),
        "sampled_again": sum(line["fleet/sampled_again"] for line in run.lines()),
    }  # fmt: skip


def compare_undisturbed(run: Run) -> None:
    """Train as many steps without a fault. Raises Violation if the numbers differ."""
    undisturbed = run.disk.parent / "undisturbed"
    shutil.copytree(run.disk / "quickstart", undisturbed / "quickstart")
    command = [*run.command(undisturbed), f"train.steps={len(run.lines())}"]
    with (run.disk.parent / "undisturbed.log").open("wb") as log:
        environment = os.environ | run.environment
        status = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log).returncode
    if status:
        raise Violation(f"the run without a fault ends with status {status}; see {log.name}")
    ours, theirs = (without_times(lines) for lines in (run.lines(), lines_of(undisturbed)))
    for mine, other in zip(ours, theirs, strict=True):
        names = [
            name for name in {*mine, *other} if not name.startswith(OF_FAULTS) and mine.get(name) != other.get(name)
        ]
        if names:
            raise Violation(f"step {mine['step']:.0f} differs from the run without a fault in {sorted(names)[:9]}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=600.0, help="after which no further fault is injected")
    parser.add_argument("--victims", choices=PROCESSES, default="all")
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--moments", choices=MOMENTS, nargs="+", default=list(MOMENTS))
    parser.add_argument("--rule", choices=("drain", "refresh", "keep"), default="refresh")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=900.0, help="seconds until the run is whole again")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "deaths")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the run, too
    out = options.out.absolute()
    out.mkdir(parents=True)
    if {"disk", "shm"} & {*options.kinds}:
        mount_private((out / "disk", "1g"), (Path("/dev/shm"), "1g"))
    run = Run(out, options.rule, options.limit)
    prepare_quickstart(run.disk / "quickstart", seed=0)
    faults: list[dict[str, Any]] = []
    try:
        run.start()
        run.wait("begun", lambda: bool(run.lines()) and run.lines()[-1]["fleet/serving"] == ENGINES)
        order, last = random.Random(options.seed), time.monotonic() + options.minutes * 60
        for fault in schedule(order, options.kinds, options.moments, PROCESSES[options.victims]):
            if len(faults) >= options.faults or time.monotonic() > last:
                break
            step = len(run.lines()) + 1
            before = run.log.stat().st_size
            hit, moment = inject(run, fault)
            print(f"step {step}: {fault}, at {moment}: {hit}", flush=True)
            naming = Naming(run, fault, hit, before)
            outcome = wait_until_whole(run, fault, hit, naming)
            seconds = round(time.monotonic() - naming.began, 1)
            figures = {"named_after": naming.seconds, "whole_after": seconds}
            faults.append({"step": step, **asdict(fault), "moment": moment, "hit": hit, "outcome": outcome, **figures})
            print(f"  {outcome} after {seconds:.1f} s, named after {naming.seconds} s", flush=True)
            with (out / "faults.jsonl").open("a") as log:
                log.write(json.dumps(faults[-1]) + "\n")
        result = {
            "rule": options.rule,
            "seed": options.seed,
            "faults": len(faults),
            **summary(faults),
            **check_end(run),
        }
        (out / "result.json").write_text(json.dumps(result))
        print(json.dumps(result))
    except Violation as violation:
        sys.exit(f"violation after {len(faults)} faults (seed {options.seed}): {violation}")
    finally:
        for process in run.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        if os.path.ismount(run.disk):  # it ends with this process
            shutil.copytree(run.disk / "run", out / "run", ignore=shutil.ignore_patterns("checkpoints", "batches"))


if __name__ == "__main__":
    main()
