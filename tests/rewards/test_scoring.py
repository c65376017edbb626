"""Scoring processes: every sample gets a result in time, for any fault of a scorer, and no process remains."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.recipe.schema import RewardConfig
from megarl.rewards import Score, ScoreRequest
from megarl.rewards.scoring import Scoring, scorer_pool
from megarl.rewards.weighted import terms_of
from megarl.subprocess_pool.job import Answered, Failed, Outcome
from megarl.subprocess_pool.pool import ProcessPool
from megarl.types import SampleFailure

ROOT = Path(__file__).parents[2]
NAMES = [f"tests.support.scorers:{name}" for name in ("faulty", "fails_once", "awaited", "modules")]


@pytest.fixture
def make() -> Iterator[Callable[..., ProcessPool]]:
    pools: list[ProcessPool] = []

    def start(processes: int = 1, timeout: float = 0.2, retries: int = 0, names: list[str] = NAMES) -> ProcessPool:
        pools.append(scorer_pool(names, RewardConfig(processes=processes, timeout=timeout, retries=retries)))
        pools[-1].start()
        return pools[-1]

    yield start
    for pool in pools:
        pool.close()


def request(behavior: str = "", uid: str = "row", **extra: Any) -> ScoreRequest:
    return ScoreRequest("response", "truth", "test", {"what": behavior, **extra}, uid=uid)


def outcomes(pool: ProcessPool, whats: list[str], seconds: float = 20.0) -> list[tuple[Score | Failed, int]]:
    futures = [pool.submit(NAMES[0], request(behavior)) for behavior in whats]
    return [plain(future.result(seconds)) for future in futures]


def plain(outcome: Outcome) -> tuple[Score | Failed, int]:
    """Return the result and the number of retries."""
    return (outcome.value, outcome.retries) if isinstance(outcome, Answered) else (outcome, outcome.attempts - 1)


def test_every_sample_has_a_score_or_a_failure(make: Callable[..., ProcessPool]) -> None:
    """5 % of 1,000 samples hang, 5 % end their process, 5 % are killed and 5 % raise; each of these has two attempts.
    Eight processes spend 100 times 0.5 s on the hangs, 6.3 s each."""
    whats = [{0: "hang", 1: "exit", 2: "kill", 3: "raise"}.get(number % 20, "") for number in range(1000)]
    pool, began = make(processes=8, timeout=0.5, retries=1), time.monotonic()
    results = outcomes(pool, whats)
    assert time.monotonic() - began < 20
    kinds = {"hang": "timeout", "exit": "crash", "kill": "crash", "raise": "error", "": "score"}
    for behavior, (result, retries) in zip(whats, results, strict=True):
        if not behavior:
            assert (result, retries) == (Score(1.0), 0)  # no retries for requests that waited behind a failed one
            continue
        assert isinstance(result, Failed)
        assert (result.kind, result.attempts, retries) == (kinds[behavior], 2, 1)
        assert (result.seconds >= 0.5) == (behavior == "hang")


@pytest.mark.parametrize(
    ("behavior", "kind", "cause"),
    [
        ("hang", "timeout", "it ran for longer than 0.2 s (reward.timeout)"),
        ("exit", "crash", "its process ended with exit status 3"),
        ("kill", "crash", "its process was killed by SIGKILL"),
        ("raise", "error", "it raised ZeroDivisionError: no such luck"),
        ("leave", "error", "it raised SystemExit: 4"),
        ("nan", "error", "the score is nan, not a finite number"),
        ("huge", "error", "the score is 1e+300, and the limit is 1e+15"),
    ],
)
def test_the_cause_is_named_and_the_next_sample_is_scored(
    make: Callable[..., ProcessPool], behavior: str, kind: str, cause: str
) -> None:
    failed, scored = outcomes(make(), [behavior, ""])
    assert isinstance(failed[0], Failed) and scored == (Score(1.0), 0)
    assert (failed[0].kind, failed[0].cause) == (kind, cause)


def test_an_answer_that_takes_forever_is_wrong_and_costs_its_sample_alone() -> None:
    """Other scorers fail at their limit, and are repeated."""
    answers = [r"\boxed{4}", r"\boxed{2^{2^{2^{2^{2^2}}}}}", r"\boxed{10^{10^{10}}+1}", r"\boxed{2+2}"]
    requests = [ScoreRequest(answer, "4", "math", uid=answer) for answer in answers]
    scoring = Scoring(
        terms_of("math", {}, ["math"]), RewardConfig(function="math", processes=2, timeout=3.0, retries=1)
    )
    scoring.start()
    start = time.monotonic()
    try:
        results = asyncio.run(scoring.score(requests))
    finally:
        scoring.close()
    assert time.monotonic() - start < 12, "the answers are not tried again"
    scores = [score for score, _ in results if isinstance(score, Score)]
    assert [score.value for score in scores] == [1.0, 0.0, 0.0, 1.0] and [tries for _, tries in results] == [0] * 4
    assert any(score.parts.get("too_slow") for score in scores)
    assert all("3 s (reward.timeout)" in score.reason for score in scores if score.parts.get("too_slow"))


def test_time_in_the_queue_is_not_scoring_time(make: Callable[..., ProcessPool]) -> None:
    """32 samples of 0.1 s each, one after the other in one process with a limit of 0.5 s: the last waits for 3.1 s, and
    the first eight, 0.8 s of work, are handed over together."""
    assert outcomes(make(timeout=0.5), ["slow"] * 32) == [(Score(1.0), 0)] * 32


def test_a_retried_score_counts_its_retry(make: Callable[..., ProcessPool], tmp_path: Path) -> None:
    pool = make(retries=1)
    assert plain(pool.submit(NAMES[1], request(file=str(tmp_path / "once"))).result(10)) == (Score(1.0), 1)


def test_scoring_processes_run_async_scorers_without_torch(make: Callable[..., ProcessPool]) -> None:
    """A scoring process that imported torch would take seconds and gigabytes to replace."""
    pool = make()
    for _ in range(3):
        assert plain(pool.submit(NAMES[2], request()).result(10)) == (Score(0.5, {}, "response"), 0)
    score, _ = plain(pool.submit(NAMES[3], request()).result(10))
    assert isinstance(score, Score) and not score.answer, score.answer


def test_child_processes_of_a_scorer_end_with_it(make: Callable[..., ProcessPool], tmp_path: Path) -> None:
    file = tmp_path / "pid"
    result = make(timeout=0.5).submit(NAMES[0], request("child", file=str(file))).result(10)
    assert isinstance(result, Failed) and result.kind == "timeout"
    assert_gone({int(file.read_text())})


def test_close_ends_all_processes_and_pending_calls(make: Callable[..., ProcessPool]) -> None:
    pool = make(processes=3)
    assert outcomes(pool, [""]) == [(Score(1.0), 0)]
    hanging = pool.submit(NAMES[0], request("hang"))
    processes = {pool._fork_server.pid, *children(pool._fork_server.pid)}
    assert len(processes) > 1
    pool.close()
    assert_gone(processes)
    with pytest.raises(RuntimeError, match="shut down"):
        hanging.result(1)
    with pytest.raises(RuntimeError, match="shut down"):
        pool.submit(NAMES[0], request()).result(1)


OWNER = """
import sys, time
from megarl.rewards import ScoreRequest
from megarl.recipe.schema import RewardConfig
from megarl.rewards.scoring import scorer_pool
pool = scorer_pool(["tests.support.scorers:faulty"], RewardConfig(processes=2, timeout=100.0))
pool.start()
pool.submit("tests.support.scorers:faulty", ScoreRequest("", "", "", {"what": ""})).result()
pool.submit("tests.support.scorers:faulty", ScoreRequest("", "", "", {"what": "hang"}))
print(pool._fork_server.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_all_processes_end_with_their_owner(ending: signal.Signals) -> None:
    """A scorer hangs. Ctrl-C reaches the terminal's process group: the pool ends with its owner, not before."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert owner.stdout is not None
    fork_server = int(owner.stdout.readline())
    deadline = time.monotonic() + 5
    while len(processes := {fork_server, *children(fork_server)}) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)  # the first of two processes may have answered before the second is there
    assert len(processes) == 3
    owner.send_signal(ending)
    owner.wait(10)
    owner.stdout.close()
    assert_gone(processes)


def test_the_end_of_the_fork_server_fails_pending_calls(make: Callable[..., ProcessPool]) -> None:
    pool = make(timeout=100.0)
    assert outcomes(pool, [""]) == [(Score(1.0), 0)]
    hanging = pool.submit(NAMES[0], request("hang"))
    processes = children(pool._fork_server.pid)
    pool._fork_server.kill()
    with pytest.raises(RuntimeError, match="has ended; see the engine's log"):
        hanging.result(10)
    assert_gone(processes)


def test_a_scorer_that_cannot_be_imported_is_refused(make: Callable[..., ProcessPool]) -> None:
    with pytest.raises(RuntimeError, match="no function 'faluty'; did you mean 'faulty'"):
        make(names=["tests.support.scorers:faluty"])


def test_scores_of_local_and_remote_processes_are_summed() -> None:
    """gsm8k in this process, a function of the user's in another: 1 + 0.5 x 0.9 for ten right characters. The row on
    which one of them fails has no score."""
    settings = RewardConfig(functions={"gsm8k": 1.0, "tests.support.scorers:brevity": 0.5}, processes=1)
    scoring = Scoring(terms_of(None, settings.functions, ["test"]), settings)
    scoring.start()
    rows = [ScoreRequest("x\n#### 123", "123", "test"), ScoreRequest("#### 5", None, "test", uid="bad")]
    try:
        (right, _), (bad, retries) = asyncio.run(scoring.score(rows))
    finally:
        scoring.close()
    parts = {"gsm8k": 1.0, "gsm8k/accuracy": 1.0, "brevity": 0.9, "accuracy": 1.0}
    assert right == Score(1.45, parts, "123")
    assert isinstance(bad, SampleFailure) and (bad.source, bad.uid, retries) == ("scorer 'gsm8k'", "bad", 1)


def test_async_scorers_wait_together() -> None:
    """Each scorer has one process: eight samples of one scorer wait in it together, the other scorer's run one by one."""
    names = {"tests.support.scorers:crowd": 1.0, "tests.support.scorers:brevity": 1.0}
    settings = RewardConfig(functions=names, processes=1, concurrent=8)
    scoring = Scoring(terms_of(None, settings.functions, ["test"]), settings)
    scoring.start()
    try:
        outcomes = asyncio.run(scoring.score([request(uid=str(number)) for number in range(24)]))
    finally:
        scoring.close()
    crowds = [result.parts["crowd"] for result, _ in outcomes if isinstance(result, Score)]
    assert len(crowds) == 24 and max(crowds) == 8


def children(pid: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def assert_gone(processes: set[int], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while (left := {pid for pid in processes if alive(pid)}) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
