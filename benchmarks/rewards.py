"""Scoring time: cheap scorers in the rollout process, math in one and two processes, and scorers that hang.

python -m benchmarks.rewards [--answers 10000] [--math 1000] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from pathlib import Path

from megarl.recipe.schema import RewardConfig
from megarl.rewards import ScoreRequest, resolve, score
from megarl.rewards.scoring import Scoring, scorer_pool
from megarl.rewards.weighted import terms_of
from megarl.subprocess_pool.job import Answered, Outcome
from megarl.subprocess_pool.pool import ProcessPool

GROUP = 8  # samples scored together
ENDLESS = "9^{9^{9^{9}}}"  # sympy computes this practically forever, and Python handles no signal meanwhile


def gsm8k_rows(count: int) -> list[ScoreRequest]:
    """Return answers of about 600 characters; every second answer is right."""
    working = "Natalia sold 48 / 2 = <<48/2=24>>24 clips in May, and a dozen more in June.\n" * 8
    return [ScoreRequest(f"{working}#### {72 + i % 2}", "72", "openai/gsm8k", uid=str(i)) for i in range(count)]


def math_rows(count: int) -> list[ScoreRequest]:
    """Return answers with numbers, fractions, roots, intervals and polynomials; the box is wrong or in another notation."""
    draw, rows = random.Random(0), []
    for number in range(count):
        a, b, c = (draw.randrange(2, 99) for _ in range(3))
        truth, box = draw.choice(
            [
                (str(a * b), f"{a} \\cdot {b}"),
                (f"\\frac{{{a}}}{{{b}}}", f"{a * c}/{b * c}"),
                (f"{a}\\sqrt{{{b}}}", f"\\sqrt{{{a * a * b}}}"),
                (f"({a}, {a + b}]", f"[{a}, {a + b}]"),
                (f"(x+{a})(x-{b})", f"x^2 + {a - b}x - {a * b}"),
                (f"{a}", f"{a}\\text{{ cm}}"),
            ]
        )
        rows.append(ScoreRequest(f"Hence the answer is $\\boxed{{{box}}}$.", truth, "lighteval/MATH", uid=str(number)))
    return rows


def scored(pool: ProcessPool, rows: list[ScoreRequest]) -> tuple[float, list[Outcome]]:
    """Score `rows` in warm processes. Returns the seconds and the outcomes."""
    warm = ScoreRequest(r"\boxed{1}", "2", "lighteval/MATH")
    for future in [pool.submit("math", warm) for _ in range(4 * pool.processes)]:
        future.result()
    began = time.perf_counter()
    outcomes = [future.result() for future in [pool.submit("math", row) for row in rows]]
    return time.perf_counter() - began, outcomes


def cheap(count: int, rounds: int) -> None:
    """Time GSM8K answers: the function alone, in the rollout process, and in another process over a pipe."""
    rows = gsm8k_rows(count)
    scorer = resolve("gsm8k", ["x"])["x"]

    def alone() -> None:
        for row in rows:
            score(scorer, row)

    scoring = Scoring(terms_of("gsm8k", {}, ["openai/gsm8k"]), RewardConfig())

    async def groups() -> None:
        await asyncio.gather(*(scoring.score(rows[start : start + GROUP]) for start in range(0, count, GROUP)))

    pool = scorer_pool(["gsm8k"], RewardConfig(processes=1))
    pool.start()

    def over_a_pipe() -> None:
        for future in [pool.submit("gsm8k", row) for row in rows]:
            future.result()

    ways = {
        "called one by one, one core": alone,
        f"in the rollout process, in groups of {GROUP}": lambda: asyncio.run(groups()),
        "in a separate process": over_a_pipe,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - began)
    pool.close()
    scoring.close()
    medians = {name: statistics.median(values) for name, values in times.items()}
    base = next(iter(medians.values()))
    print(f"{count} GSM8K answers\n\n| gsm8k | s | x the function alone |\n|---|---|---|")
    for name, value in medians.items():
        print(f"| {name} | {value:.2f} | {value / base:.1f} |")


def busiest(pool: ProcessPool) -> float:
    """Return the CPU seconds of the busiest process: the wall time on a machine without other load."""
    fork_server = pool._fork_server.pid
    workers = Path(f"/proc/{fork_server}/task/{fork_server}/children").read_text().split()
    ticks = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13] for pid in workers]
    return max(int(user) + int(system) for user, system in ticks) / os.sysconf("SC_CLK_TCK")


def math(count: int, rounds: int) -> None:
    rows = math_rows(count)
    times: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
    for _ in range(rounds):
        for processes, values in times.items():
            pool = scorer_pool(["math"], RewardConfig(processes=processes, timeout=60.0, retries=0))
            pool.start()
            seconds, outcomes = scored(pool, rows)
            values.append((seconds, busiest(pool)))
            pool.close()
            assert all(isinstance(outcome, Answered) for outcome in outcomes)
    print(f"\n{count} math answers, {os.cpu_count()} cores\n")
    print("| processes | s | throughput | CPU s of the busiest | throughput by CPU s |\n|---|---|---|---|---|")
    for processes, values in times.items():
        wall, cpu = (statistics.median(column) for column in zip(*values, strict=True))
        ratios = [[a / b for a, b in zip(base, row, strict=True)] for base, row in zip(times[1], values, strict=True)]
        by_wall, by_cpu = (statistics.median(column) for column in zip(*ratios, strict=True))
        print(f"| {processes} | {wall:.2f} | {by_wall:.2f} x | {cpu:.2f} | {by_cpu:.2f} x |")


def hanging(count: int, every: int, timeout: float) -> None:
    rows = math_rows(count)
    for number in range(0, count, every):
        rows[number] = ScoreRequest(rf"\boxed{{{ENDLESS}}}", "2", "lighteval/MATH", uid=str(number))
    pool = scorer_pool(["math"], RewardConfig(processes=2, timeout=timeout, retries=0))
    pool.start()
    seconds, _ = scored(pool, [row for row in rows if ENDLESS not in row.response])
    with_hanging, outcomes = scored(pool, rows)
    pool.close()
    ended = sum(not isinstance(outcome, Answered) for outcome in outcomes)
    least = ended * timeout / 2 + seconds
    print(f"\n{count} math answers, {ended} of them ended at the limit, two processes, reward.timeout {timeout:g} s\n")
    print("| | s |\n|---|---|")
    print(f"| without these | {seconds:.2f} |\n| with these | {with_hanging:.2f} |")
    print(f"| with these / (without these + {ended} x {timeout:g} s / 2) | {with_hanging / least:.2f} x |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--math", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    cheap(options.answers, options.rounds)
    math(options.math, options.rounds)
    hanging(options.math, every=100, timeout=2.0)


if __name__ == "__main__":
    main()
