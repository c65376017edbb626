"""Tools with state: one process per sample, which ends whatever happens to the sample."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.agents import Answer, Context, Reply, ToolUnavailable, find, tool
from megarl.agents.interactions import find_interaction
from megarl.agents.python_tools import PythonTools, SampleProcess
from megarl.agents.toolbox import CallOutcome

OWN = "tests.support.stateful_tools"
PATIENT = find_interaction("tests.support.interactions:Patient").name
PATHS = {name: f"{OWN}:{name}" for name in ("submit", "fragile")} | {PATIENT: "tests.support.interactions:Patient"}


@pytest.fixture(scope="module")
def running() -> Iterator[PythonTools]:
    tools = PythonTools(PATHS, {}, processes=2, timeout=20.0)
    tools.start()
    yield tools
    tools.close()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def context(log: Path, sample: int = 1, **extra: Any) -> Context:
    return Context("row/1", "4", {"log": str(log), **extra}, sample)


async def submit(sample: SampleProcess, number: float) -> tuple[str, float]:
    outcome = await sample.call("submit", {"number": number}, 20.0)
    return outcome.answer.text, outcome.answer.reward


async def fragile(sample: SampleProcess, how: str, timeout: float = 20.0) -> CallOutcome:
    return await sample.call("fragile", {"how": how}, timeout)


def ended(log: Path, line: str) -> bool:
    """Return True if a tool writes `line` within a few seconds: `release` does not wait."""
    limit = time.monotonic() + 10.0
    while time.monotonic() < limit:
        if log.exists() and line in log.read_text().splitlines():
            return True
        time.sleep(0.02)
    return False


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# ---- state


def test_calls_of_a_sample_share_state_that_other_samples_do_not_see(running: PythonTools, log: Path) -> None:
    """The reward of a call depends only on earlier calls of the same sample; calls of a turn run in their order."""

    async def play() -> None:
        first, second = running.open_sample(context(log, 1)), running.open_sample(context(log, 2))
        assert await submit(first, 2.0) == ("submission 1, best 2", 2.0)
        assert await submit(second, 5.0) == ("submission 1, best 5", 5.0)
        together = await asyncio.gather(submit(first, 1.0), submit(first, 2.5), submit(first, 2.5))
        assert together == [
            ("submission 2, best 2", 0.0), ("submission 3, best 2.5", 0.5), ("submission 4, best 2.5", 0.0)
        ]  # fmt: skip
        assert await first.finish(with_rewards=True) == -0.5
        assert await submit(second, 6.0) == ("submission 2, best 6", 1.0)  # the first sample's end is not the second's
        assert await second.finish(with_rewards=True) == -0.25
        first.release()
        second.release()

    asyncio.run(play())
    lines = log.read_text().splitlines()
    assert [line[2:] for line in lines if line[0] == "1"] == [
        "start", "call 2", "call 1", "call 2.5", "call 2.5", "end"
    ]  # fmt: skip
    assert [line[2:] for line in lines if line[0] == "2"] == ["start", "call 5", "call 6", "end"]


def test_a_samples_tools_share_a_process_that_ends_with_it(running: PythonTools, log: Path) -> None:
    async def play() -> tuple[int, int, float]:
        sample = running.open_sample(context(log, final=2.0))
        pid = int((await fragile(sample, "pid")).answer.text)
        await submit(sample, 1.0)
        again = int((await fragile(sample, "pid")).answer.text)
        assert is_alive(pid)
        return pid, again, await sample.finish(with_rewards=True)

    pid, again, reward = asyncio.run(play())
    assert pid == again and reward == 2.0 - 0.125
    assert log.read_text().splitlines()[-2:] == ["1 end fragile", "1 end"]
    limit = time.monotonic() + 10.0
    while is_alive(pid):
        assert time.monotonic() < limit, "the process of an ended sample still runs"
        time.sleep(0.02)


def test_an_interaction_keeps_its_state_in_the_process_of_its_sample(running: PythonTools) -> None:
    """A reply, with the end of the conversation, comes back whole; another sample's symptoms are its own."""

    async def play() -> tuple[list[Answer], float]:
        samples = [
            running.open_sample(Context("row/1", "flu", {"symptoms": ["hot", "weak"]}, sample)) for sample in (1, 2)
        ]
        said = [(0, "?"), (0, "?"), (1, "?"), (0, "flu")]
        replies = [
            (await samples[number].call(PATIENT, {"messages": [{"role": "assistant", "content": text}]}, 20.0)).answer
            for number, text in said
        ]
        return replies, sum([await sample.finish(with_rewards=True) for sample in samples])

    replies, reward = asyncio.run(play())
    assert replies == [
        Reply("hot", -0.25),
        Reply("weak", -0.25),
        Reply("hot", -0.25),
        Reply("Thank you", 1.0, ends=True),
    ]
    assert reward == 0.125  # a symptom is left in the second sample


def test_a_sample_without_calls_starts_nothing(running: PythonTools, log: Path) -> None:
    async def play() -> float:
        sample = running.open_sample(context(log))
        reward = await sample.finish(with_rewards=True)
        sample.release()
        return reward

    assert asyncio.run(play()) == 0.0 and not log.exists()


def test_rewards_that_do_not_count_are_not_computed(running: PythonTools, log: Path) -> None:
    async def play() -> float:
        sample = running.open_sample(context(log, final=float("nan")))
        await fragile(sample, "pid")
        return await sample.finish(with_rewards=False)

    assert asyncio.run(play()) == 0.0 and log.read_text().endswith("1 end fragile\n")


# ---- failures


@pytest.mark.parametrize(("how", "kind"), [("hang", "timeout"), ("exit", "crash")])
def test_a_killed_call_costs_its_own_sample_the_state_and_no_other(
    running: PythonTools, log: Path, how: str, kind: str
) -> None:
    async def play() -> None:
        first, second = running.open_sample(context(log, 1)), running.open_sample(context(log, 2))
        await submit(first, 1.0)
        await submit(second, 1.0)
        waiting = [asyncio.create_task(fragile(first, how, 0.5)), asyncio.create_task(submit(first, 3.0))]
        failed, (behind, reward) = await waiting[0], await waiting[1]
        assert failed.failure == kind and failed.answer.text.startswith("Error: ")
        assert (behind, reward) == ("Error: it was stopped or crashed earlier, and cannot be called again", 0.0)
        later = await first.call("submit", {"number": 9.0}, 20.0)
        assert later.failure == "crash" and later.answer.text == behind
        assert await first.finish(with_rewards=True) == 0.0
        first.release()
        assert await submit(second, 3.0) == ("submission 2, best 3", 2.0)
        assert await second.finish(with_rewards=True) == -0.25

    asyncio.run(play())


def test_the_policy_reads_exceptions_and_the_state_stays(running: PythonTools, log: Path) -> None:
    async def play() -> None:
        sample = running.open_sample(context(log))
        await submit(sample, 1.0)
        assert (await fragile(sample, "raise")).answer.text == "Error: ValueError: raise"
        with pytest.raises(ToolUnavailable, match="the index is being rebuilt"):
            await fragile(sample, "absent")
        assert (await submit(sample, 1.0))[0] == "submission 2, best 1"
        sample.release()

    asyncio.run(play())
    assert ended(log, "1 end") and ended(log, "1 end fragile")


def test_a_start_or_an_end_that_fails_is_not_the_policys_fault(running: PythonTools, log: Path) -> None:
    async def play(**extra: Any) -> None:
        sample = running.open_sample(context(log, **extra))
        try:
            await fragile(sample, "pid")
            await sample.finish(with_rewards=True)
        finally:
            sample.release()

    with pytest.raises(ToolUnavailable, match="it could not start: FileNotFoundError: no index"):
        asyncio.run(play(no_start=True))
    with pytest.raises(ToolUnavailable, match="its method end failed: OSError: the session was gone") as raised:
        asyncio.run(play(no_end=True))
    assert raised.value.source == "tool 'fragile'"
    with pytest.raises(ToolUnavailable, match="the reward of its answer is nan"):
        asyncio.run(play(final=float("nan")))
    assert log.read_text().count("end fragile") == 2  # the tool with an invalid reward has ended, too


def test_a_released_sample_ends_its_tools_even_while_a_call_runs(
    running: PythonTools, log: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def play() -> None:
        sample = running.open_sample(context(log, no_end=True))
        await submit(sample, 1.0)
        call = asyncio.create_task(fragile(sample, "slow"))
        await asyncio.sleep(0.3)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        sample.release()
        sample.release()

    asyncio.run(play())
    assert ended(log, "1 end") and ended(log, "1 end fragile")
    limit = time.monotonic() + 10.0
    while "tool 'fragile', sample 1 of row/1: its method end failed: OSError" not in capfd.readouterr().err:
        assert time.monotonic() < limit, "the failed end is not in the engine's log"
        time.sleep(0.02)
    assert log.read_text().count("1 end\n") == 1


def test_the_end_of_the_run_ends_tools_of_samples_that_still_run(log: Path) -> None:
    tools = PythonTools(PATHS, {}, processes=1, timeout=20.0)
    tools.start()
    try:
        assert asyncio.run(submit(tools.open_sample(context(log)), 1.0))[1] == 1.0
    finally:
        tools.close()
    assert log.read_text().splitlines() == ["1 start", "1 call 1", "1 end"]


def test_calls_at_a_time_are_limited(log: Path) -> None:
    """Samples with state have a process each; `agent.processes` still limits the calls that run."""
    tools = PythonTools(PATHS, {}, processes=1, timeout=20.0)
    tools.start()

    async def play() -> float:
        samples = [tools.open_sample(context(log, number)) for number in range(3)]
        began = time.monotonic()
        await asyncio.gather(*(fragile(sample, "slow") for sample in samples))
        return time.monotonic() - began

    try:
        assert asyncio.run(play()) > 2.9
    finally:
        tools.close()


# ---- declarations


def _class(**methods: Any) -> type:
    return type("counter", (), methods)


def _call(self: object, number: int) -> str:
    """Counts."""
    return str(number)


def _undescribed(self: object, number: int) -> str:
    return str(number)


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        ({}, "its class has no method call"),
        ({"call": _undescribed}, "its method call has no docstring"),
        ({"call": _call, "start": lambda self: None}, "its method start must take the context"),
        ({"call": _call, "reward": lambda self, sample: 0.0}, "its method reward must take no argument"),
        ({"call": _call, "__init__": lambda self, size: None}, "creates an object for each sample without arguments"),
    ],
)
def test_classes_that_cannot_be_called_are_refused(methods: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tool(_class(**methods))


def test_the_schema_comes_from_the_method_call() -> None:
    described = find(f"{OWN}:submit")
    assert described.stateful and described.description == "Submits an answer."
    assert described.parameters["required"] == ["number"] and list(described.parameters["properties"]) == ["number"]
    assert not find("tests.support.agent_tools:add").stateful
