"""Agent loops without an engine: turns, limits, failures, vectors."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.agents import Answer, Context, ToolUnavailable
from megarl.agents.call_formats import DEEPSEEK, HERMES, ToolCall
from megarl.agents.tool import describe
from megarl.agents.tool_responses import AnswerTokens
from megarl.agents.toolbox import CallOutcome, Toolbox
from megarl.agents.trajectory import AgentLoop, SampleTurn, Trajectory, turn_seed
from megarl.data.tokenizer import Tokenizer
from megarl.recipe.agent import AgentConfig
from megarl.rewards import Score
from megarl.rollout.assemble import control_data, score_request, steps_of, vectors
from megarl.types import Completion, GenerationRequest, Prompt, Sampling, Turn
from tests.support.agent_tokenizers import deepseek_v3, qwen3

TOKENIZERS = {HERMES: qwen3, DEEPSEEK: deepseek_v3}


# ---- a loop with a scripted policy


class Calculator:
    """Tools: add and fail, a slow tool, and an unavailable tool."""

    def __init__(self) -> None:
        self.contexts: list[Context] = []
        self.timeouts: list[float] = []
        self.absent = 0

    async def call(self, name: str, arguments: dict[str, Any], context: Context, timeout: float) -> CallOutcome:
        self.contexts.append(context)
        self.timeouts.append(timeout)
        if name == "absent":
            self.absent += 1
            raise ToolUnavailable("the server is down")
        if name == "slow":
            return CallOutcome(Answer("Error: it was stopped"), timeout, "timeout")
        return CallOutcome(Answer(str(arguments["a"] + arguments.get("b", 0)), reward=0.25), 1.5)


class Counter:
    """The state of a sample: its tool `count` counts calls."""

    def __init__(self, problem: str = "", reward: float = 0.5) -> None:
        self.problem, self.reward, self.calls = problem, reward, 0
        self.finished: list[bool] = []
        self.releases = 0

    async def call(self, name: str, arguments: dict[str, Any], timeout: float) -> CallOutcome:
        self.calls += 1
        return CallOutcome(Answer(f"{self.calls}"), 0.5)

    async def finish(self, with_rewards: bool) -> float:
        self.finished.append(with_rewards)
        if self.problem:
            error = ToolUnavailable(self.problem)
            error.source = "tool 'count'"
            raise error
        return self.reward

    def release(self) -> None:
        self.releases += 1


def tools() -> list[Any]:
    def add(a: int, b: int = 0) -> int:
        """Adds."""
        return a + b

    return [describe(add, name) for name in ("add", "slow", "absent")]


class Script:
    """A policy that returns the texts in order, from the first for each sample."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str], cut: bool = False) -> None:
        self.tokenizer, self.texts, self.cut = tokenizer, list(texts), cut
        self.requests: list[GenerationRequest] = []

    def turn(self, number: int) -> Completion:
        ids = self.tokenizer.encode(self.texts[number])
        if not self.cut or number < len(self.texts) - 1:
            ids = [*ids, self.tokenizer.eos_id]
        tokens = np.array(ids, np.int32)
        log_probs = -np.arange(1, len(ids) + 1, dtype=np.float32) - 100 * number
        return Completion(tokens, log_probs, "stop" if ids[-1] == self.tokenizer.eos_id else "length")

    async def first(self) -> Completion:
        return self.turn(0)

    async def sample(self, request: GenerationRequest) -> Completion:
        self.requests.append(request)
        return self.turn(len(self.requests))


PROMPT = Prompt("row/1", (5, 6, 7), "How much?", "test", ground_truth="4", extra_info={"level": 1})


def play(
    texts: Sequence[str],
    *,
    room: int = 2000,
    caller: Calculator | None = None,
    cut: bool = False,
    format: str = HERMES,
    state: Counter | None = None,
    sample: SampleTurn | None = None,
    **settings: Any,
) -> tuple[Trajectory, Script, Calculator]:
    tokenizer, caller = TOKENIZERS[format](), caller or Calculator()
    config = replace(AgentConfig(tools=["x"], retries=0, attempts=1), **settings)
    registered = tools() if state is None else [*tools(), replace(tools()[0], name="count", stateful=True)]
    callers = {tool.name: caller for tool in registered}
    box = Toolbox(registered, callers, config.tool_timeout, config.retries, lambda _: state or Counter())
    loop = AgentLoop(config, format, tokenizer, AnswerTokens(tokenizer, {}, config.max_answer_tokens), box)
    script = Script(tokenizer, texts, cut)
    request = GenerationRequest(3, PROMPT, Sampling(n=1, max_tokens=room, temperature=0.7), seed=11)
    return asyncio.run(loop.run(request, script.first(), sample or script.sample)), script, caller


ADD = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 3}}</tool_call>'


def test_two_turns_hand_worked() -> None:
    done, script, caller = play(["Well. " + ADD, "It is 4"])
    tokenizer = qwen3()
    first, second = script.turn(0), script.turn(1)
    answer = tokenizer.encode(
        "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert done.tokens.tolist() == [*first.tokens, *answer, *second.tokens]
    assert done.sampled.tolist() == [True] * len(first.tokens) + [False] * len(answer) + [True] * len(second.tokens)
    assert done.log_probs.tolist() == [*first.log_probs, *[0.0] * len(answer), *second.log_probs]
    assert done.ends == (len(first.tokens), len(done.tokens)) and done.finish_reason == "stop"
    assert [(turn.role, turn.text) for turn in done.turns] == [
        ("assistant", "Well. " + ADD), ("tool", "4"), ("assistant", "It is 4"),
    ]  # fmt: skip
    tool = done.turns[1]
    assert (tool.name, tool.arguments, tool.seconds, tool.reward, tool.failure) == (
        "add",
        {"a": 1, "b": 3},
        1.5,
        0.25,
        "",
    )
    assert sum(turn.tokens for turn in done.turns) == len(done.tokens)
    assert (done.tool_use.turns, done.tool_use.calls, done.tool_use.failures, done.tool_use.seconds) == (2, 1, 0, 1.5)
    # The second turn is sampled after the first, with the rest of the budget and a separate seed.
    (request,) = script.requests
    assert request.prompt.tokens == (*PROMPT.tokens, *first.tokens, *answer) and request.sampling.temperature == 0.7
    assert request.sampling.max_tokens == 2000 - len(first.tokens) - len(answer)
    assert request.seed == turn_seed(11, 1) != 11
    assert caller.contexts == [Context("row/1", "4", {"level": 1}, sample=3)]


COUNT = '<tool_call>{"name": "count", "arguments": {"a": 1}}</tool_call>'


def test_the_final_reward_of_a_state_is_at_the_end_of_the_last_turn() -> None:
    state = Counter(reward=0.75)
    done, _, _ = play([COUNT, ADD, "Done"], state=state)
    assert [turn.text for turn in done.turns if turn.role == "tool"] == ["1", "4"]
    assert (state.finished, state.releases) == ([True], 1)
    steps, of_tools = steps_of(Score(0.0), done, qwen3().decode)
    assert steps == ((done.ends[1] - 1, 0.25), (done.ends[2] - 1, 0.75)) and of_tools == 1.0


def test_rewards_for_scorers_alone_are_not_added() -> None:
    state = Counter(reward=0.75)
    done, _, _ = play([COUNT, ADD, "Done"], state=state, tool_rewards="scorer")
    assert steps_of(Score(0.0), done, qwen3().decode) == ((), 0.0) and state.finished == [False]
    assert [turn.reward for turn in score_request(PROMPT, done, True).turns if turn.name == "add"] == [0.25]


def test_a_state_is_released_on_every_path() -> None:
    """A sample that is cut, fails or is aborted must not leave a process or a session behind."""
    cut, failing, ending, aborted = Counter(), Counter(), Counter("no session"), Counter()
    play([COUNT, "Do"], state=cut, cut=True)
    assert (cut.finished, cut.releases) == ([True], 1)
    done, _, _ = play(['<tool_call>{"name": "absent", "arguments": {"a": 1}}</tool_call>'], state=failing)
    assert done.failure is not None and (failing.finished, failing.releases) == ([], 1)
    done, _, _ = play([COUNT, "Done"], state=ending)
    assert done.failure is not None and (done.failure.cause, done.finish_reason) == ("no session", "failed")
    assert "count" in done.failure.source and ending.releases == 1

    async def abort(request: GenerationRequest) -> Completion:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        play([COUNT], state=aborted, sample=abort)
    assert (aborted.calls, aborted.finished, aborted.releases) == (1, [], 1)


def test_deepseek_two_turns() -> None:
    call = (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 2}\n```<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>"
    )
    done, _, _ = play([call, "2"], format=DEEPSEEK)
    assert [turn.text for turn in done.turns] == [call, "2", "2"] and done.finish_reason == "stop"


def test_invalid_calls_get_an_error_message_and_the_sample_continues() -> None:
    texts = [
        '<tool_call>{"name": "sub", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": "1"}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {}}</tool_call>',
        "<tool_call>add(1)</tool_call>",
        ADD,
        "4",
    ]
    done, _, caller = play(texts)
    answers = [turn.text for turn in done.turns if turn.role == "tool"]
    assert answers[0] == "Error: there is no tool 'sub'; there are: add, slow, absent"
    assert answers[1] == "Error: its arguments are wrong at a: '1' is not of type 'integer'"
    assert answers[2] == "Error: its arguments are wrong: 'a' is a required property"
    assert answers[3].startswith("Error: the call is not valid JSON") and answers[4] == "4"
    assert [turn.failure for turn in done.turns if turn.role == "tool"] == ["refused"] * 4 + [""]
    assert (done.tool_use.calls, done.tool_use.failures, done.tool_use.timeouts) == (5, 4, 0)
    assert len(caller.contexts) == 1  # no tool was called with invalid arguments


def test_a_schema_that_breaks_the_validator_fails_only_the_call() -> None:
    """A schema or a value that breaks the validator fails the call, not the run."""
    schema = {"type": "object", "properties": {"a": {"type": "number", "multipleOf": 0.1}, "b": {"$ref": "#/none"}}}
    pattern = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(a+)+$"}}}
    odd = [
        replace(tools()[0], name=name, parameters=parameters)
        for name, parameters in (("odd", schema), ("slow", pattern))
    ]
    box = Toolbox(odd, dict.fromkeys(("odd", "slow"), Calculator()), 1.0, 0)

    def answer_to(name: str, **arguments: Any) -> str:
        return asyncio.run(box.call(ToolCall(name, arguments), Context("row"), 1.0)).turn.text

    assert answer_to("odd", a=10**400).startswith(
        "Error: its arguments cannot be checked against the tool's schema: OverflowError"
    )
    assert answer_to("odd", b=1).startswith("Error: its arguments cannot be checked against the tool's schema: ")
    assert "stopped" in answer_to(
        "slow", a="a" * 40 + "!"
    )  # the call reached the tool: patterns are not checked before


def test_calls_above_the_limit_of_a_turn_are_refused() -> None:
    done, _, caller = play([ADD * 3, "12"], max_calls_per_turn=2)
    answers = [turn for turn in done.turns if turn.role == "tool"]
    assert [turn.text for turn in answers] == ["4", "4", "Error: a turn may make 2 calls; this one was not made"]
    assert len(caller.contexts) == 2


@pytest.mark.parametrize(
    ("settings", "reason", "turns", "calls"),
    [
        ({"max_turns": 2}, "turns", 2, 1),
        ({"max_tool_seconds": 3.0}, "tool_time", 3, 2),  # 1.5 s a call: the budget ends after two
        ({"room": 60}, "length", 1, 1),  # the call takes 46 tokens, and the answer does not fit
    ],
)
def test_limits_end_a_sample_after_a_sampled_token(
    settings: dict[str, Any], reason: str, turns: int, calls: int
) -> None:
    """The last token of a sample is a sampled token, since it carries the reward."""
    done, _, _ = play([ADD] * 9, **settings)
    assert (done.finish_reason, len(done.ends), done.tool_use.calls) == (reason, turns, calls)
    assert done.sampled[-1] and done.ends[-1] == len(done.tokens) == len(done.log_probs)


def test_a_truncated_turn_calls_no_tool() -> None:
    done, _, caller = play([ADD], cut=True)
    assert done.finish_reason == "length" and not caller.contexts and len(done.turns) == 1


def test_the_samples_tool_time_limits_each_call() -> None:
    slow = '<tool_call>{"name": "slow", "arguments": {"a": 1}}</tool_call>'
    done, _, caller = play([slow, slow, "4"], tool_timeout=30.0, max_tool_seconds=40.0)
    assert caller.timeouts == [30.0, 10.0] and done.tool_use.timeouts == 2


def test_an_unavailable_tool_fails_the_sample_after_its_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(_: float) -> None:
        return None

    monkeypatch.setattr("megarl.cluster.call_gate.asyncio.sleep", at_once)
    done, _, caller = play(['<tool_call>{"name": "absent", "arguments": {"a": 1}}</tool_call>', "4"], retries=2)
    assert caller.absent == 3 and done.failure is not None
    assert str(done.failure) == "tool 'absent' failed on row 'row/1': the server is down (3 attempts)"


# ---- properties


words = st.text(alphabet=st.characters(blacklist_categories=("Cs",)), max_size=12)


@given(st.lists(words, min_size=1, max_size=4), words)
@settings(max_examples=60, deadline=None)
def test_loss_tokens_are_exactly_the_sampled_tokens(earlier: list[str], last: str) -> None:
    """Decoding the tokens in the loss gives the policy's turns, for any sampled text and any tool answer, and the
    other tokens give the template's text."""
    tokenizer = qwen3()
    texts = [*(text + ADD for text in earlier), last]
    done, script, _ = play(texts)
    turns = [script.turn(number).tokens.tolist() for number in range(len(done.ends))]
    assert done.tokens[done.sampled].tolist() == [token for turn in turns for token in turn]
    assert done.tokens[done.sampled].tolist() == [
        token for text in texts[: len(done.ends)] for token in [*tokenizer.encode(text), tokenizer.eos_id]
    ]
    assert not done.log_probs[~done.sampled].any() and (done.log_probs[done.sampled] < 0).all()


# ---- vectors and control data


def test_rewards_of_tools_and_scorers_are_steps_at_the_end_of_their_text() -> None:
    done, _, _ = play(["Well. " + ADD, "It is 4"])
    request = GenerationRequest(3, PROMPT, Sampling(n=1, max_tokens=2000), seed=11)
    tokenizer = qwen3()
    response = score_request(PROMPT, done, with_tools=True).response
    assert response == "Well. " + ADD + "\n" + "It is 4"
    # Steps: "Well", the whole first turn with its line break, and "It".
    scored = Score(
        1.5, {"steps": 0.5}, steps=((4, 0.125), (len("Well. " + ADD) + 1, 0.25), (len("Well. " + ADD) + 3, 0.125))
    )
    sample = control_data(request, 0, done, scored, tokenizer.decode, with_tools=True)
    well, first, it = (token - 3 for token, _ in sample.steps)
    assert tokenizer.decode(done.tokens[: well + 1].tolist()) == "Well"
    assert first == done.ends[0] - 1 and done.tokens[first] == tokenizer.eos_id
    last = len(done.tokens) - len(tokenizer.encode("It is 4")) - 1
    assert tokenizer.decode(done.tokens[last : it + 1].tolist()) == "It"
    assert [reward for _, reward in sample.steps] == [0.125, 0.25 + 0.25, 0.125]  # the call's turn has the tool's, too
    assert sample.reward == 1.5 + 0.25 and sample.reward_parts == {"steps": 0.75} and sample.outcome == 1.0
    assert (sample.prompt_length, sample.response_length, sample.loss_tokens) == (
        3,
        len(done.tokens),
        int(done.sampled.sum()),
    )
    assert sample.tool_use == done.tool_use
    spoken = vectors(request, done, "all", "why", with_tools=True)
    assert spoken.loss_mask.tolist() == [False] * 3 + done.sampled.tolist() and spoken.turns == done.turns
    assert len(spoken.tokens) == len(spoken.rollout_log_probs) == 3 + len(done.tokens)


def test_a_plain_sample_has_no_turns() -> None:
    completion = Completion(np.array([8, 9], np.int32), np.array([-1.0, -2.0], np.float32), "length")
    plain = Trajectory.of(completion, "xy")
    messages = ({"role": "user", "content": "?"},)
    scored = score_request(replace(PROMPT, messages=messages), plain, with_tools=False)
    assert scored.turns == () and scored.messages == messages
    sample = control_data(
        GenerationRequest(3, PROMPT, Sampling(1, 2), 0), 0, plain, Score(1.0), lambda ids: "xy"[: len(ids)], False
    )
    assert sample.tool_use is None and sample.truncated and sample.steps == () and sample.loss_tokens == 2


def test_a_turn_without_text_can_have_a_step_reward() -> None:
    """A turn without text may have a step reward."""
    turns = (Turn("assistant", "ab", 3), Turn("tool", "x", 1), Turn("assistant", "", 1))
    done = Trajectory(
        np.array([1, 2, 0, 9, 0], np.int32),
        np.zeros(5, np.float32),
        np.array([True, True, True, False, True]),
        turns,
        (3, 5),
        "stop",
    )

    def decode(ids: Sequence[int]) -> str:
        return "".join({1: "a", 2: "b"}.get(token, "") for token in ids)

    steps, given_by_tools = steps_of(Score(0.0, steps=((1, 1.0), (3, 2.0))), done, decode)
    assert steps == ((0, 1.0), (2, 2.0)) and given_by_tools == 0


def test_experts_of_earlier_turns_do_not_change() -> None:
    """A later request computes earlier tokens again and may route them differently; the first routing is kept."""
    from megarl.agents.trajectory import _with_experts

    first = np.array([1, 2, -1], np.int16).reshape(3, 1, 1)
    later = np.array([7, 7, 3, 4, -1], np.int16).reshape(5, 1, 1)
    assert _with_experts(_with_experts(None, first), later).ravel().tolist() == [1, 2, 3, 4, -1]  # type: ignore[union-attr]
    assert _with_experts(None, None) is None
