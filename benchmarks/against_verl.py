"""megarl and verl on the same GRPO job on a CPU: speed, memory, start and rewards, in runs that take turns.

    git clone https://github.com/verl-project/verl && git -C verl checkout 1dda039b9c
    python -m benchmarks.against_verl --verl verl --verl-python verl_env/bin/python [--size 0.2M|20M|100M] [--rounds 2]

verl_env has what verl's requirements.txt names, and vLLM's CPU build. verl names no CPU among its platforms. benchmarks/verl
adds one by verl's own plugins, with three stand-ins: the process group of torch, the name of vLLM's CPU build, and linear layers of
vLLM that keep their weights. verl's files stay as they are.

Equal in both: what benchmarks/against_trl.py lists for megarl and TRL, but these differ:

- verl computes old log-probs before the update, in a pass of its own (its default), and the entropy with them.
- verl trains on padded rows of prompt and response, because its packed form needs flash-attn.
- verl's engine never samples ids beyond the tokenizer's, of which the random model has some.
- verl runs one FSDP2 worker on gloo, vLLM behind a server, and TransferQueue, over Ray. megarl runs over Ray too.

A step begins and ends as in benchmarks/against_trl.py.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.against_trl import (
    RAY,
    Runs,
    add_job_options,
    job_of,
    measured_run,
    megarl_command,
    megarl_lines,
    steady_phases,
)
from benchmarks.trl.figures import SKIPPED, figures_of, mean_rewards, rewards_table, table
from benchmarks.trl.job import Job, environment
from benchmarks.verl import verl_side

VERL = "verl"


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--verl", type=Path, required=True, help="clone of verl")
    arguments.add_argument("--verl-python", required=True, help="Python of an environment with verl's requirements")
    arguments.add_argument("--only", nargs="+", choices=(VERL, RAY), default=(VERL, RAY))
    add_job_options(arguments)
    return arguments


def verl_environment(job: Job, folder: Path, clone: Path) -> dict[str, str]:
    env = environment(job.threads)
    paths = os.pathsep.join((env["PYTHONPATH"], str(clone.resolve())))
    return {**env, **verl_side.variables(job, folder), "PYTHONPATH": paths}


def check_verl(options: argparse.Namespace) -> None:
    """Raise SystemExit unless --verl is a clone and --verl-python has verl's requirements."""
    if not (options.verl / "verl" / "trainer" / "main_ppo.py").exists():
        raise SystemExit(
            f"--verl {options.verl} has no verl/trainer/main_ppo.py. Clone https://github.com/verl-project/verl"
        )
    names = ("ray", "vllm", "hydra", "tensordict", "torchdata", "transfer_queue")
    code = f"from importlib.util import find_spec; print(*(name for name in {names} if find_spec(name) is None))"
    try:
        missing = subprocess.run(
            [options.verl_python, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"--verl-python {options.verl_python} cannot be run: {error}") from error
    if missing:
        raise SystemExit(
            f"--verl-python {options.verl_python} has no {', '.join(missing)}. Install verl's requirements.txt and "
            "vLLM's CPU build there."
        )


def run_once(name: str, job: Job, options: argparse.Namespace, runs: Runs) -> None:
    """Run one framework, and add its results to `runs`. Raises RuntimeError with the end of its output if it fails."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        if name == VERL:
            command = [options.verl_python, "-m", "verl.trainer.main_ppo", *verl_side.options(job, folder)]
            env = verl_environment(job, folder, options.verl)
        else:
            command, env = megarl_command(job, folder, name, options.set), environment(job.threads)
        steps, usage = measured_run(name, command, env, job, folder, options.limit)
        if name == VERL:
            lengths, runs.phases = verl_side.response_lengths(folder), verl_side.phases(folder, SKIPPED)
        else:
            lines = megarl_lines(folder)
            lengths, runs.phases = [line["response_length/mean"] for line in lines], steady_phases(lines)
        runs.figures.append(figures_of(steps, lengths, usage))
        runs.rewards.append(mean_rewards(steps))


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    if options.steps < SKIPPED + 2:
        raise SystemExit(
            f"--steps is {options.steps}: the first {SKIPPED} are left out, so take at least {SKIPPED + 2}"
        )
    check_verl(options)
    results = {name: Runs() for name in options.only}
    with tempfile.TemporaryDirectory() as text:
        job = job_of(options, Path(text))
        print(f"{options.size} {job.prompts} x {job.samples} samples, load {os.getloadavg()[0]:.1f}", flush=True)
        for number in range(options.rounds):
            for name in list(results)[:: 1 if number % 2 == 0 else -1]:
                run_once(name, replace(job, seed=job.seed + number), options, results[name])
                print(f"round {number + 1}: {name} {results[name].figures[-1]}", flush=True)
    print("\n" + table({name: runs.figures for name, runs in results.items()}, next(iter(results))))
    print("\n" + rewards_table({name: runs.rewards for name, runs in results.items()}))
    for name, runs in results.items():
        print(f"\n{name}, s: " + ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in runs.phases.items()))
    print(f"\n{os.cpu_count()} cores, load {', '.join(f'{load:.1f}' for load in os.getloadavg())}")


if __name__ == "__main__":
    main()
