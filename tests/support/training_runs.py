"""Training runs of the quickstart's recipe at tiny size, in the foreground or in the background, and their processes."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from megarl.cluster.failures import HEADER
from tests.support.stack import ROOT, command, environment, metrics, run

TINY = [
    "data.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "rollout.max_response_length=16",
    "rollout.engine_args.max_num_seqs=16",
    "reward.function=tests.support.scorers:letters",
    "algorithm.overlong.penalty_buffer=0",
    "algorithm.dynamic_sampling.metric=reward",
    "evaluation.limit=4",
    "train.save_every=1",
    "train.keep_checkpoints=10",
]
SMALL = ["cluster.trainers=1", "megatron.expert_parallel=1", "evaluation.at_start=false", "evaluation.at_end=false"]


def settings(data: Path, runs: Path, name: str, *more: str) -> list[str]:
    return [
        f"model.path={data}/model",
        f"data.train_files=[{data}/data/train.parquet]",
        f"data.eval_files=[{data}/data/test.parquet]",
        f"runs_dir={runs}",
        f"name={name}",
        *TINY,
        *more,
    ]


def train(data: Path, runs: Path, name: str, *more: str, torchrun: int = 0) -> subprocess.CompletedProcess[str]:
    return run("train", "recipes/quickstart.yaml", *settings(data, runs, name, *more), torchrun=torchrun)


FEWEST_PROCESSES = 3
"""Child processes that every run has once Ray has started."""


class Run:
    """A training in the background; the fixture `started` kills it at the end of the test."""

    def __init__(self, data: Path, runs: Path, name: str, *more: str, torchrun: int = 0):
        self.directory = runs / name
        arguments = ["train", "recipes/quickstart.yaml", *settings(data, runs, name, *SMALL, "train.steps=500", *more)]
        self.process = subprocess.Popen(
            command(*arguments, torchrun=torchrun),
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # tests send signals to its process group
        )

    def wait_for_steps(self, count: int) -> None:
        deadline = time.monotonic() + 240
        while not (self.directory / "metrics.jsonl").exists() or len(metrics_so_far(self.directory)) < count:
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < deadline, "no step was done in time"
            time.sleep(0.05)

    def wait_for_processes(self) -> None:
        """Wait until the run has started Ray's first processes."""
        deadline = time.monotonic() + 240
        while len(psutil.Process(self.process.pid).children(recursive=True)) < FEWEST_PROCESSES:
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < deadline, "no process was started in time"
            time.sleep(0.05)

    def end(self, seconds: float) -> tuple[int, str]:
        """Wait until the run ends; returns its exit status and stderr."""
        _, errors = self.process.communicate(timeout=seconds)
        return self.process.returncode, errors


@contextlib.contextmanager
def background_runs(data: Path, folder: Path, *common: str) -> Iterator[Callable[..., Run]]:
    """Yield a function that starts a `Run` by its name and further settings. All runs are killed when the block is left."""
    runs: list[Run] = []

    def start(name: str, *more: str, torchrun: int = 0) -> Run:
        runs.append(Run(data, folder, name, *common, *more, torchrun=torchrun))
        return runs[-1]

    yield start
    for each in runs:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()


def pid_in_log(directory: Path, words: str) -> int:
    """Return the pid in the header of the log `words`.log.

    Open file handles cannot identify the process: its children (scorers, for example) inherit them.
    """
    log = (directory / "logs" / f"{words}.log").read_text()
    return int(re.findall(rf"^{re.escape(HEADER)} .*, pid (\d+) on ", log, re.MULTILINE)[-1])


def metrics_so_far(run_dir: Path) -> list[str]:
    return (run_dir / "metrics.jsonl").read_text().splitlines()


def descendants(pid: int) -> list[psutil.Process]:
    """Return every process that a run has started: workers, engines and Ray's."""
    children = psutil.Process(pid).children(recursive=True)
    assert len(children) >= FEWEST_PROCESSES, "a run has more processes than that"
    return children


def assert_ended(started: list[psutil.Process], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while (alive := [process for process in started if lives(process)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(run: Run, key: str, value: float) -> None:
    """Wait until the last step has this metric."""
    deadline = time.monotonic() + 300
    while metrics(run.directory)[-1][key] != value:
        assert run.process.poll() is None, run.process.communicate()[1]
        assert time.monotonic() < deadline, f"{key} was not {value} in time"
        time.sleep(0.1)
