"""Kill or stop engines and trainers of one run at random moments, and check that it goes on and trains each group exactly once.

    python -m benchmarks.deaths [--faults 20] [--victims all] [--rule refresh] [--seed 0] [--out runs/deaths]

A tiny model trains with two trainers, three engines, `rollout.min_engines: 1` and `train.trainer_restarts: 3`. Each fault is SIGKILL
or SIGSTOP to a random engine or trainer (`--victims engines`: engines alone), at a random moment after the run is whole; one in five
faults hits a second process soon after the first. SIGTERM ends the run after the last fault. The script ends with status 1 if the
run ends without SIGTERM, a process is left, a step is missing, a group was trained twice or left out, or a step that was trained again
had another gradient norm.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from benchmarks.faults import END_SECONDS, ROOT, START_SECONDS, Violation, check, lines_of, pid_of
from benchmarks.faults import settings as settings_of
from megarl.commands.data.quickstart import prepare_quickstart

ENGINES, TRAINERS = 3, 2
PROCESSES = {
    "engines": [f"engine{number}" for number in range(ENGINES)],
    "trainers": [f"trainer-{number}" for number in range(TRAINERS)],
}
PROCESSES["all"] = PROCESSES["engines"] + PROCESSES["trainers"]


def settings(out: Path, rule: str) -> list[str]:
    more = {
        "rollout.engines": ENGINES, "rollout.min_engines": 1, "train.save_every": 20, "train.grace_seconds": 60,
        "cluster.trainers": TRAINERS, "train.trainer_restarts": 3,
    }  # fmt: skip
    base_settings = [each for each in settings_of(out, rule) if each.partition("=")[0] not in more]
    return [*base_settings, *(f"{key}={value}" for key, value in more.items())]


def deaths(out: Path) -> float:
    """Return the deaths of engines and the restarts of trainers so far."""
    lines = lines_of(out)
    return lines[-1]["fleet/deaths"] + max(line.get("recovery/trainer_restarts", 0.0) for line in lines)


def wait_for(
    process: subprocess.Popen[bytes], out: Path, state: str, reached: Callable[[dict[str, float]], bool]
) -> None:
    """Wait until the last line of the metrics fulfils `reached`. Raises Violation if the run ends or does not get there."""
    deadline = time.monotonic() + START_SECONDS
    while not (lines := lines_of(out)) or not reached(lines[-1]):
        if process.poll() is not None or time.monotonic() > deadline:
            end = "has not ended" if process.poll() is None else f"has ended with status {process.poll()}"
            raise Violation(f"the run is not {state} and {end}; see {out}/output.log")
        time.sleep(0.1)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--victims", choices=PROCESSES, default="all")
    parser.add_argument("--rule", choices=("drain", "refresh", "keep"), default="refresh")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "deaths")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    out, order = options.out.absolute(), random.Random(options.seed)
    out.mkdir(parents=True)
    prepare_quickstart(out / "quickstart", seed=0)
    command = [sys.executable, "-m", "megarl", "train", "recipes/quickstart.yaml", *settings(out, options.rule)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (out / "output.log").open("ab") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
    done, absences = 0, []
    try:
        wait_for(process, out, "begun", lambda line: line["fleet/serving"] == ENGINES)
        while done < options.faults:
            time.sleep(order.random() * 3)
            before, hit = deaths(out), []
            for name in order.sample(PROCESSES[options.victims], 2 if order.random() < 0.2 else 1):
                number = order.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
                with contextlib.suppress(ProcessLookupError):  # the first fault has ended it, in an update
                    os.kill(pid := pid_of(out, name), number)
                    hit.append(pid)
                    print(f"step {len(lines_of(out)) + 1}: {number.name} to {name}", flush=True)
                time.sleep(order.random() * 2)
            done, began = done + len(hit), time.monotonic()

            def is_whole(line: dict[str, float], before: float = before, hit: Sequence[int] = hit) -> bool:
                gone = not any(psutil.pid_exists(pid) for pid in hit)
                return gone and deaths(out) > before and line["fleet/serving"] == ENGINES

            wait_for(process, out, "whole", is_whole)
            absences.append(time.monotonic() - began)
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        status = process.wait(END_SECONDS + 60)
        _, alive = psutil.wait_procs(started, END_SECONDS)
        if alive or status != 143:
            raise Violation(f"the end: status {status}, {len(alive)} processes live")
        trained = check(out)
        notices = (out / "run" / "notices.jsonl").read_text()
        if "gradient norms differ" in notices:
            raise Violation("a step that was trained again had another gradient norm; see notices.jsonl")
    except Violation as violation:
        process.kill()
        sys.exit(f"violation: {violation}")
    last = lines_of(out)[-1]
    again = sum(line["fleet/sampled_again"] for line in lines_of(out))
    print(
        json.dumps(
            {
                "rule": options.rule, "seed": options.seed, "faults": done, "deaths_of_engines": last["fleet/deaths"],
                "restarts_of_trainers": max(line.get("recovery/trainer_restarts", 0) for line in lines_of(out)),
                "steps_trained_again": max(line.get("recovery/retrained_steps", 0) for line in lines_of(out)),
                "steps": len(lines_of(out)), "groups": len(trained), "sampled_again": again,
                "seconds_until_whole": {"mean": sum(absences) / len(absences), "most": max(absences)},
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
