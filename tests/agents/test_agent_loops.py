"""Agent loops of the user: the loss counts tokens that the engine sampled there, and failures are never the policy's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.agents import agent_loop
from megarl.agents.custom.find import find_loop
from megarl.agents.custom.messages import LoopRequest
from megarl.agents.custom.process import LoopProcess
from megarl.agents.custom.record import EngineAnswer, match
from megarl.agents.custom.runner import CustomLoop, LoopPool
from megarl.agents.setup import Agents, AgentSetup
from megarl.agents.tool import ToolFault
from megarl.agents.tool_responses import ReplyTokens
from megarl.agents.trajectory import Trajectory, turn_seed
from megarl.cluster.call_gate import CallGate
from megarl.recipe.agent import AgentConfig
from megarl.rewards import Score, ScoreRequest
from megarl.rollout.assemble import control_data, outcomes_of, steps_of, vectors
from megarl.subprocess_pool.job import Answered, Outcome
from megarl.subprocess_pool.pool import ProcessPool
from megarl.subprocess_pool.process import Seat
from megarl.types import Completion, GenerationRequest, Prompt, Sampling, Span
from tests.support.agent_tokenizers import qwen3

OWN = "tests.support.agent_loops"
ROW = Prompt("row/1", (5, 6, 7), "How much?", "sums", ground_truth="4", extra_info={"level": 1})


class InThisProcess:
    """The processes of samples, without processes. The loop's clock is half a second a step."""

    def __init__(self, path: str, arguments: dict[str, Any], verl: dict[str, Any]) -> None:
        self.tokenizer = qwen3()
        self.loop = find_loop(path, arguments, verl, self.tokenizer)
        self.replies = ReplyTokens(self.tokenizer, {}, 512)
        self.samples: dict[Seat, LoopProcess] = {}
        self.ended = 0

    async def run(self, seat: Seat, request: LoopRequest, timeout: float) -> Outcome:
        if seat not in self.samples:
            self.samples[seat] = LoopProcess(self.loop, self.tokenizer, self.replies.tokens)
        return Answered(await self.samples[seat].run(request), 0, 0.5)

    def end(self, seat: Seat) -> None:
        self.ended += 1


class Policy:
    """An engine that answers requests with texts in order, and notes them. versions: of the weights, by request."""

    def __init__(self, texts: Sequence[str], versions: Sequence[int] = (), cut: bool = False) -> None:
        self.texts, self.versions, self.cut = list(texts), versions, cut
        self.requests: list[GenerationRequest] = []
        self.answers: list[Completion] = []

    async def __call__(self, request: GenerationRequest) -> Completion:
        number = len(self.requests)
        self.requests.append(request)
        ids = qwen3().encode(self.texts[number % len(self.texts)])
        stops = not self.cut and len(ids) < request.sampling.max_tokens
        ids = [*ids, qwen3().eos_id] if stops else ids[: request.sampling.max_tokens]
        log_probs = -np.arange(1, len(ids) + 1, dtype=np.float32) - 100 * number
        spans = (Span(0, self.versions[number] if self.versions else 0),)
        self.answers.append(Completion(np.array(ids, np.int32), log_probs, "stop" if stops else "length", spans=spans))
        return self.answers[-1]


def play(
    name: str,
    policy: Callable[[GenerationRequest], Any],
    *,
    prompt: Prompt = ROW,
    room: int = 200,
    arguments: dict[str, Any] | None = None,
    verl: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[Trajectory, InThisProcess]:
    path = name if ":" in name or name.endswith(".yaml") else f"{OWN}:{name}"
    config = replace(AgentConfig(loop=path, attempts=1), **settings)
    pool = InThisProcess(path, arguments or {}, verl or {})
    loop = CustomLoop(config, pool.loop.title, qwen3(), pool, 100, CallGate(pool.loop.title))  # type: ignore[arg-type]
    request = GenerationRequest(3, prompt, Sampling(n=1, max_tokens=room, temperature=0.7), seed=11)

    async def first() -> Completion:
        raise AssertionError("the loop chooses its first request")

    async def run() -> Trajectory:
        unused = first()
        try:
            return await loop.run(request, unused, policy)
        finally:
            unused.close()

    return asyncio.run(run()), pool


# ---- tokens of the loss


def test_a_loop_hand_worked() -> None:
    """Tokens, mask, log-probs and versions are the engine's; the text between has no loss."""
    policy = Policy(["It is 4", "Yes"], versions=[3, 4])
    done, pool = play("SecondLook", policy, arguments={"question": "Really?"})
    first, second = (answer.tokens.tolist() for answer in policy.answers)
    between = ReplyTokens(qwen3(), {}, 512).tokens("Really?")
    assert done.failure is None and done.tokens.tolist() == [*first, *between, *second]
    assert done.sampled.tolist() == [True] * len(first) + [False] * len(between) + [True] * len(second)
    assert done.log_probs[: len(first)].tolist() == policy.answers[0].log_probs.tolist()
    assert not done.log_probs[len(first) : -len(second)].any()
    assert done.log_probs[-len(second) :].tolist() == policy.answers[1].log_probs.tolist()
    assert done.spans == (Span(0, 3), Span(len(first) + len(between), 4))
    assert done.ends == (len(first), len(done.tokens)) and done.finish_reason == "stop"
    assert [(turn.role, turn.text) for turn in done.turns[::2]] == [("assistant", "It is 4"), ("assistant", "Yes")]
    assert done.turns[1].role == "user" and "Really?" in done.turns[1].text
    assert sum(turn.tokens for turn in done.turns) == len(done.tokens)
    assert (done.tool_use.turns, done.tool_use.calls, done.tool_use.seconds) == (2, 0, 1.5)
    assert pool.ended == 1


def test_requests_have_the_samples_seeds_and_the_room_that_is_left() -> None:
    policy = Policy(["It is 4", "Yes"])
    done, _ = play("SecondLook", policy, room=60)
    first, second = policy.requests
    assert first.prompt.tokens == ROW.tokens and first.sampling == Sampling(1, 60, 0.7)
    assert second.prompt.tokens == (*ROW.tokens, *done.tokens[: -len(policy.answers[1].tokens)].tolist())
    assert second.sampling.max_tokens == 60 - (len(second.prompt.tokens) - len(ROW.tokens))
    assert (first.seed, second.seed) == (11, turn_seed(11, 1)) and first.group == second.group == 3


def test_concurrent_requests_are_sampled_together_and_a_reward_replaces_the_scorer() -> None:
    policy = Policy(["Four", "It is 4, I think"])
    done, _ = play("BestOfTwo", policy)
    assert done.tokens.tolist() == policy.answers[1].tokens.tolist()
    assert done.log_probs.tolist() == policy.answers[1].log_probs.tolist()
    difference = len(policy.answers[1].tokens) - len(policy.answers[0].tokens)
    assert done.outcome == difference and {request.seed for request in policy.requests} == {11, turn_seed(11, 1)}
    scored: list[ScoreRequest] = []

    async def score(requests: list[ScoreRequest]) -> list[Any]:
        scored.extend(requests)
        return [(Score(0.25), 1) for _ in requests]

    plain = replace(done, outcome=None)
    outcomes = asyncio.run(outcomes_of(score, ROW, [plain, done, plain], True))
    assert [outcome.value for outcome, _ in outcomes] == [0.25, difference, 0.25]  # type: ignore[union-attr]
    assert [request.response for request in scored] == ["It is 4, I think"] * 2
    assert scored[0].extra_info == {"level": 1, "shorter": len(policy.answers[0].tokens)}
    assert scored[0].turns == done.turns
    assert steps_of(Score(0.0), done, qwen3().decode) == ((), 0.0)


def test_a_loop_may_write_its_prompt_and_train_on_a_part() -> None:
    policy = Policy(["one two three four"])
    done, _ = play("OwnPrompt", policy)
    prompt, turn = tuple(qwen3().encode("2 + 2 =")), policy.answers[0].tokens.tolist()
    half = len(turn) // 2
    assert done.prompt == prompt and done.tokens.tolist() == turn
    assert done.sampled.tolist() == [False] * half + [True] * (len(turn) - half)
    assert done.log_probs.tolist() == [0.0] * half + policy.answers[0].log_probs[half:].tolist()
    assert policy.requests[1].sampling.temperature == 0.0 and policy.requests[1].sampling.max_tokens == 1
    assert done.finish_reason == "length" and done.extra_info == {"source": "sums"}
    request = GenerationRequest(3, ROW, Sampling(1, 200), 11)
    tokens = vectors(request, done, "", "", True)
    assert tokens.tokens.tolist() == [*prompt, *turn] and tokens.loss_mask.sum() == len(turn) - half
    sample = control_data(request, 0, done, Score(1.0), qwen3().decode, True)
    assert (sample.prompt_length, sample.loss_tokens, sample.length) == (
        len(prompt),
        len(turn) - half,
        len(tokens.tokens),
    )


@pytest.mark.parametrize(
    ("settings", "requests", "reason"), [({"max_turns": 3}, 3, "turns"), ({"room": 25}, 0, "length")]
)
def test_limits_end_a_loop_that_never_ends(settings: dict[str, Any], requests: int, reason: str) -> None:
    """A request beyond a limit returns no tokens."""
    policy = Policy(["again and again"])
    done, _ = play("Endless", policy, **settings)
    assert done.failure is None and done.finish_reason == reason
    assert len(policy.requests) == (requests or len(policy.requests))
    assert len(done.tokens) <= settings.get("room", 200) and done.sampled.all()


def test_ids_that_the_tokenizer_lacks_may_follow_if_the_policy_sampled_them() -> None:
    """The output layer of a model may be wider than its tokenizer."""
    answers = [Completion(np.array([token, 9], np.int32), np.zeros(2, np.float32), "length") for token in (10**5, 8, 7)]

    async def sample(request: GenerationRequest) -> Completion:
        return answers.pop(0)

    done, _ = play("Endless", sample, max_turns=3)
    assert done.failure is None and done.tokens.tolist() == [10**5, 9, 8, 9, 7, 9], done.failure


# ---- the record of the engine's answers


def recorded(
    prompt: Sequence[int], answer: Sequence[int], base: float, version: int = 0, reason: str = "stop"
) -> EngineAnswer:
    log_probs = base - np.arange(len(answer), dtype=np.float32)
    completion = Completion(np.array(answer, np.int32), log_probs, reason, spans=(Span(0, version),))
    return EngineAnswer(np.array(prompt, np.int32), completion)


def test_a_token_belongs_to_the_answer_that_explains_most() -> None:
    """Two answers to one request share a beginning; the response continues the second."""
    records = [recorded([1], [2, 3, 4], -10), recorded([1], [2, 3, 5], -20), recorded([1, 2, 3, 5, 9], [6], -30)]
    done = match([1], [2, 3, 5, 9, 6, 8], [True, True, True, False, True, False], records, 100)
    assert done.tokens.tolist() == [2, 3, 5, 9, 6]  # what follows the last loss token is left out
    assert done.log_probs.tolist() == [-20, -21, -22, 0, -30]
    assert done.ends == (3, 5) and done.finish_reason == "stop"


def test_answers_that_follow_each_other_are_one_turn() -> None:
    records = [recorded([1], [2, 3], -10, 5), recorded([1, 2, 3], [4], -20, 6, "length")]
    done = match([1], [2, 3, 4], [True] * 3, records, 100)
    assert done.spans == (Span(0, 5), Span(2, 6)) and done.ends == (3,) and done.finish_reason == "length"


def test_a_response_is_cut_at_the_limit() -> None:
    records = [recorded([1], [2, 3, 4, 5], -10)]
    done = match([1], [2, 3, 4, 5], [True] * 4, records, 3)
    assert done.tokens.tolist() == [2, 3, 4] and done.finish_reason == "length"
    assert match([1], [2, 3], [True] * 2, records, 3).finish_reason == "stop"  # the loop's decision


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        ([2, 9, 4], "token 1 of its response has the mask"),
        ([9, 3, 4], "token 0"),
        ([2, 3, 4, 4], "after the 4 tokens before it"),
    ],
)
def test_a_token_that_the_engine_did_not_sample_there_is_refused(tokens: list[int], problem: str) -> None:
    with pytest.raises(ToolFault, match=problem):
        match([1], tokens, [True] * len(tokens), [recorded([1], [2, 3, 4], -10)], 100)


def test_answers_of_newer_weights_before_older_ones_are_refused() -> None:
    records = [recorded([1], [2], -10, 5), recorded([1, 2], [3], -20, 4)]
    with pytest.raises(ToolFault, match="newer weights before"):
        match([1], [2, 3], [True, True], records, 100)


# ---- failures


@pytest.mark.parametrize(
    ("fails", "kind", "words"),
    [
        ("raises", "error", "KeyError: 'no such page' ("),
        ("unavailable", "unavailable", "the search engine is down"),
        ("other tokens", "error", "token 0 of its response has the mask, and no request returned it"),
        ("no mask", "error", "there is nothing to train on"),
        ("lengths", "error", "entries of the mask"),
        ("text", "error", "returned 'done' (str), not a Response"),
        ("reward", "error", "is nan, not a finite number"),
        ("extra", "error", "other values than JSON's"),
        ("long prompt", "error", "data.max_prompt_length is 100"),
        ("temperature", "error", "sampled with temperature 0.5"),
        ("empty request", "error", "its request 1 has no tokens"),
        ("foreign tokens", "error", "its request 1 has token ids outside 0 to"),
        ("no room", "error", "max_tokens=0: give at least 1"),
        ("top_p", "error", "its request 1 asks for top_p=2.0, which the engine does not know"),
    ],
)
def test_failures_cost_the_sample_and_name_the_loop(fails: str, kind: str, words: str) -> None:
    policy = Policy(["It is 4", "Five"])
    done, pool = play("Broken", policy, prompt=replace(ROW, extra_info={"fails": fails}), attempts=2)
    assert done.failure is not None and words in done.failure.cause, done.failure
    assert (done.failure.source, done.failure.kind, done.failure.attempts) == ("agent loop 'Broken'", kind, 2)
    assert done.sampled_again == (kind,) and pool.ended == 2  # from its start, with the same seed
    assert [request.seed for request in policy.requests if request.prompt.tokens == ROW.tokens][:1] == [11]
    if fails == "raises":
        assert "agent_loops.py, line " in done.failure.cause


def test_nothing_is_sampled_beside_an_invalid_request() -> None:
    """The sample starts again, with the same seeds: an answer to the valid one would be engine time without use."""
    policy = Policy(["It is 4"])
    done, _ = play("Broken", policy, prompt=replace(ROW, extra_info={"fails": "one of two"}), attempts=2)
    assert done.failure is not None and "its request 2 has no tokens" in done.failure.cause
    assert len(policy.requests) == 2  # the first of each attempt, before the two


def test_the_time_of_all_steps_is_limited() -> None:
    done, _ = play("SecondLook", Policy(["It is 4", "Yes"]), max_tool_seconds=1.0)
    assert done.failure is not None and done.failure.kind == "timeout"
    assert "longer than 1 s in all (agent.max_tool_seconds)" in done.failure.cause


@pytest.mark.parametrize("kind", ["hangs", "crashes"])
def test_a_loop_is_killed_in_its_process(kind: str) -> None:
    """With the limit of a step; other samples are not affected."""
    config = AgentConfig(loop=f"{OWN}:Broken", attempts=1, tool_timeout=2.0, processes=2)
    agents = Agents(AgentSetup(config, {}, {}, max_prompt=100), qwen3())
    broken, whole = replace(ROW, extra_info={"fails": kind}), replace(ROW, extra_info={"fails": ""})

    async def run() -> list[Trajectory]:
        loop = await agents.start()
        try:
            requests = [GenerationRequest(n, row, Sampling(1, 50), 1) for n, row in enumerate((broken, whole))]
            return list(await asyncio.gather(*(loop.run(request, None, Policy(["A 4"])) for request in requests)))  # type: ignore[arg-type]
        finally:
            await agents.close()

    failed, done = asyncio.run(run())
    assert failed.failure is not None and failed.failure.kind == {"hangs": "timeout", "crashes": "crash"}[kind]
    words = "longer than 2 s (agent.tool_timeout)" if kind == "hangs" else "exit"
    assert words in failed.failure.cause, failed.failure
    assert done.failure is None and done.sampled.all() and len(done.tokens) == len(qwen3().encode("A 4")) + 1


def test_a_loop_releases_what_it_has_when_its_sample_is_aborted(tmp_path: Path) -> None:
    agents = Agents(AgentSetup(AgentConfig(loop=f"{OWN}:Careful"), {}, {}, max_prompt=100), qwen3())
    lock = tmp_path / "lock"
    request = GenerationRequest(0, replace(ROW, extra_info={"lock": str(lock)}), Sampling(1, 50), 1)

    async def never(request: GenerationRequest) -> Completion:
        assert lock.is_file()
        await asyncio.sleep(3600)
        raise AssertionError

    async def run() -> None:
        loop = await agents.start()
        task = asyncio.create_task(loop.run(request, None, never))  # type: ignore[arg-type]
        while not lock.is_file():
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await agents.close()

    asyncio.run(run())
    assert not lock.exists()


def test_a_sample_that_is_aborted_before_its_turn_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[Any] = []
    monkeypatch.setattr(ProcessPool, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(ProcessPool, "submit", lambda *arguments, **_: submitted.append(arguments))

    async def run() -> None:
        pool, seat = LoopPool("m:Loop", {}, at_once=1, timeout=5.0), Seat()
        async with pool.places:
            task = asyncio.create_task(pool.run(seat, LoopRequest("begin"), 5.0))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        pool.end(seat)

    asyncio.run(run())
    assert not submitted


# ---- classes


def test_classes_that_cannot_run_are_refused() -> None:
    for methods, words in (
        ({}, "has no method run"),
        ({"run": lambda self, sample: None}, "must be `async def`"),
    ):
        with pytest.raises(ValueError, match=words):
            agent_loop(type("Wrong", (), methods))

    async def run(self: Any) -> None: ...

    with pytest.raises(ValueError, match="must take the sample"):
        agent_loop(type("Wrong", (), {"run": run}))


@pytest.mark.parametrize(
    ("path", "arguments", "words"),
    [
        ("SecondLook", {}, "give module:Class"),
        (f"{OWN}:Missing", {}, "has no function 'Missing'"),
        (f"{OWN}:Path", {}, "not decorated with megarl.agents.agent_loop"),
        (f"{OWN}:SecondLook", {"questions": 1}, "cannot be created with agent.loop_arguments={'questions': 1}"),
    ],
)
def test_names_that_are_no_loop_are_refused(path: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("{", r"\{").replace("}", r"\}")):
        find_loop(path, arguments, {}, qwen3())
