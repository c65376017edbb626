"""Simulate the effective training time of a long run on devices that fail: with a restart of the whole run, or of the failed part.

    python -m benchmarks.effective_time [--devices 1024] [--seed 0]

Effective training time is the time of the steps of a run without failures, divided by the time of the run with failures. Failures
are a Poisson process: either per device (`--mtbf-hours`, 50,000), or one in `--failing-steps` (10 %) of the steps, the rate of
RobustRL (arXiv 2512.22492, 256 GPUs, more than 80 % effective time against 60 % with restarts of the whole job).

Three ways to go on:

- whole run: every failure starts all processes again from the newest checkpoint (`train.restarts`). The steps since then are sampled
  and trained again.
- engines: a failed engine starts again while the others sample (`rollout.min_engines`); a failed trainer is as above.
- engines and trainers: failed trainers start again too, and train the kept batches since the checkpoint again, without sampling
  (`train.trainer_restarts`). The engines sample ahead meanwhile, within `max_staleness`.

Assumed times are arguments: they stand for a large model and are not measured here. A step takes the time of the slower of sampling and
training, since both overlap (`max_staleness` of 1 or more).
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass

WAYS = ("whole run", "engines", "engines and trainers")


@dataclass(frozen=True)
class Times:
    """Seconds. `sampling` and `training` of one step; `engine_start`, `trainers_start`, `run_start` from the failure until the
    processes are ready; `checkpoint`: between two checkpoints."""

    sampling: float = 240.0
    training: float = 120.0
    engine_start: float = 180.0
    trainers_start: float = 300.0
    run_start: float = 480.0
    checkpoint: float = 1800.0


@dataclass(frozen=True)
class Cluster:
    """`failures_per_second` of all devices together; `trainer_share`: of the failures that hit trainers; `staleness`: steps that
    engines may sample ahead."""

    failures_per_second: float
    engines: int
    trainer_share: float = 0.5
    staleness: int = 1


def effective_time(way: str, times: Times, cluster: Cluster, steps: int, order: random.Random) -> float:
    """Return the effective training time of a run of `steps` steps, between 0 and 1."""
    step = max(times.sampling, times.training)
    every = max(1, round(times.checkpoint / step))
    most_ahead = cluster.staleness * times.sampling
    clock, done, ahead = 0.0, 0, 0.0  # seconds; steps; seconds of sampling that is done ahead of the step
    next_failure = order.expovariate(cluster.failures_per_second)
    while done < steps:
        rest = duration = max(times.training, times.sampling - ahead)  # of this step
        while clock + rest > next_failure:
            rest -= max(0.0, next_failure - clock)  # a failure during a repair is noticed at its end
            clock = max(clock, next_failure)
            next_failure += order.expovariate(cluster.failures_per_second)
            since = done % every
            if way != "whole run" and order.random() >= cluster.trainer_share:
                rest += (
                    times.engine_start + step
                ) / cluster.engines  # the others sample; it takes part from the next update on
            elif way == "engines and trainers":
                repair = times.trainers_start + since * times.training
                clock, rest = clock + repair, max(times.training, rest - repair)  # sampling goes on
                ahead = min(most_ahead, ahead + repair)
            else:
                clock, done, ahead = clock + times.run_start, done - since, 0.0
                rest = duration = step
        ahead = min(most_ahead, max(0.0, ahead + duration - times.sampling))
        clock, done = clock + rest, done + 1
    return steps * step / clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1024)
    parser.add_argument("--mtbf-hours", type=float, default=50_000.0)
    parser.add_argument("--failing-steps", type=float, default=0.1)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    for name, value in vars(Times()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=value, metavar="SECONDS")
    options = parser.parse_args()
    times = Times(**{name: getattr(options, name) for name in vars(Times())})
    step = max(times.sampling, times.training)
    rates = {
        f"a failure per {options.mtbf_hours:,.0f} h of each of {options.devices:,} devices": options.devices
        / (options.mtbf_hours * 3600),
        f"{options.failing_steps:.0%} of the steps have a failure": options.failing_steps / step,
    }
    print("| failures | " + " | ".join(WAYS) + " |")
    print("|---|" + "---|" * len(WAYS))
    for name, rate in rates.items():
        cluster = Cluster(rate, options.engines)
        shares = [effective_time(way, times, cluster, options.steps, random.Random(options.seed)) for way in WAYS]
        print(f"| {name} | " + " | ".join(f"{share:.1%}" for share in shares) + " |", flush=True)


if __name__ == "__main__":
    main()
