"""Measure `megarl view` in headless Chromium on a run of 100,000 samples.

    python -m benchmarks.view [--steps 3125] [--samples 32] [--rounds 5]

Opens tabs, follows a live run, and writes the files of a step that the page needs. Wall time depends on the load of the machine,
which the first line has; CPU time hardly does.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from megarl.observe.log import RunLog
from tests.support.chromium import Chromium
from tests.support.viewed_runs import add_step, make_large_run, make_run

ROOT = Path(__file__).parents[1]
READY = {
    "overview": "document.querySelectorAll('.figure').length",
    "curves": "[...document.querySelectorAll('.chart canvas')].some((canvas) => canvas.width)",
    "samples": "document.querySelector('.sample')",
}
TOKENS = 4096  # of a recorded sample, at most
FOLLOWED_SECONDS = 10


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def row(name: str, wall: list[float], cpu: list[float] | None) -> str:
    used = f"{statistics.median(cpu):.3f}" if cpu else ""
    return f"| {name} | {statistics.median(wall):.2f} | {min(wall):.2f} | {used} |"


def opened(browser: Chromium, address: str, tab: str, pid: int) -> tuple[float, float]:
    """Open a tab in a fresh page. Returns its seconds until it has data, and CPU seconds of the server."""
    browser.open("about:blank")
    used, began = cpu_seconds(pid), time.monotonic()
    browser.open(f"{address}#{tab}?run=1")
    browser.wait_for(READY[tab])
    return time.monotonic() - began, cpu_seconds(pid) - used


def followed(browser: Chromium, log: RunLog) -> float:
    step = log.next_step
    add_step(log, step)
    return browser.wait_for(f"document.querySelector('.facts').textContent.includes('{step} of')")


def write_tokens(log: RunLog) -> float:
    """Record the tokens of two long samples, and return the CPU seconds."""
    values = {name: [-0.123456789] * TOKENS for name in ("rollout_log_probs", "old_log_probs", "log_probs")}
    values |= {"mask": [1] * TOKENS, "advantages": [0.5] * TOKENS, "entropy": [0.987654321] * TOKENS}
    record = {"tokens": ["token"] * TOKENS, "values": values | {"versions": [7] * TOKENS}}
    began = time.process_time()
    log.tokens(log.next_step, [{"group": 0, "index": index, **record} for index in range(2)])
    return time.process_time() - began


def measure(folder: Path, steps: int, samples: int, rounds: int) -> None:
    make_large_run(folder / "large", steps=steps, samples_per_step=samples)
    log = make_run(folder / "live", 4, name="live", live=True)
    command = [sys.executable, "-m", "megarl", "view", str(folder / "live"), str(folder / "large"), "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with contextlib.ExitStack() as stack:
        stack.callback(log.close, "finished")
        browser = Chromium(folder / "profile")
        stack.callback(browser.close)
        server = subprocess.Popen([*command, "--follow"], stdout=subprocess.PIPE, text=True, env=environment)
        stack.enter_context(server)
        stack.callback(server.kill)
        assert server.stdout is not None
        printed = re.search(r"http://\S+", server.stdout.readline())
        assert printed
        print(f"{steps:,} steps, {steps * samples:,} samples; load {os.getloadavg()[0]:.1f}\n")
        print("| | s, median | least | CPU s |\n|---|---|---|---|")
        for tab in READY:
            times = [opened(browser, printed[0], tab, server.pid) for _ in range(rounds)]
            print(row(f"open {tab}", [wall for wall, _ in times], [cpu for _, cpu in times]))
        opened(browser, printed[0], "overview", server.pid)
        print(row("show a new step", [followed(browser, log) for _ in range(rounds)], None))
        used = cpu_seconds(server.pid)
        time.sleep(FOLLOWED_SECONDS)
        share = (cpu_seconds(server.pid) - used) / FOLLOWED_SECONDS
        print(f"| follow, share of a core | | | {share:.4f} |")
        seconds = statistics.median(write_tokens(log) for _ in range(rounds))
        print(f"| write the tokens of a step | | | {seconds:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3125)
    parser.add_argument("--samples", type=int, default=32, help="per step")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), options.steps, options.samples, options.rounds)


if __name__ == "__main__":
    main()
