"""Call a run's tools: Python tools in worker processes, MCP tools at their servers.

Every result of a call is text for the policy, except `ToolUnavailable`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from jsonschema.validators import extend

from megarl.agents import Answer, Context, Reply, Tool, ToolUnavailable
from megarl.agents.call_formats import ToolCall
from megarl.agents.tool import ToolFault
from megarl.cluster.call_gate import CallGate
from megarl.types import FailureKind, Turn

_MOST_PROBLEM = 300  # characters of an error about arguments


def _accept(*_: Any) -> None:
    """Accept any value."""


# Patterns are not checked: matching sampled text could take forever, and nothing here could interrupt it.
_Validator = extend(Draft202012Validator, {"pattern": _accept, "patternProperties": _accept})
Failure = Literal["", "refused", "error", "timeout", "crash"]


@dataclass(frozen=True)
class CallOutcome:
    """The result of a call."""

    answer: Answer
    seconds: float  # running time
    failure: Failure = ""


@dataclass(frozen=True)
class ToolAnswer:
    """A tool's turn, and the images that the policy reads before its text."""

    turn: Turn
    images: tuple[bytes, ...] = ()  # encoded files


class Caller(Protocol):
    """Runs tools: in worker processes, or at a server."""

    async def call(self, name: str, arguments: dict[str, Any], context: Context, timeout: float) -> CallOutcome:
        """Call a tool, for at most `timeout` seconds. Raises ToolUnavailable."""
        ...


class SampleCaller(Protocol):
    """Runs the tools with state of one sample. Whatever happens to the sample, `release` is called last."""

    async def call(self, name: str, arguments: dict[str, Any], timeout: float) -> CallOutcome:
        """Call a tool, for at most `timeout` seconds; the first call starts it. Raises ToolUnavailable."""
        ...

    async def finish(self, with_rewards: bool) -> float:
        """End the tools of a complete sample, and return the sum of their final rewards. Raises ToolUnavailable.

        `with_rewards`: without it the tools' rewards are not computed, and the sum is 0.
        """
        ...

    def release(self) -> None:
        """End the tools that have not ended. Does not wait for them."""
        ...


class Toolbox:
    """Tools by name, each with its caller."""

    def __init__(
        self,
        tools: Sequence[Tool],
        callers: Mapping[str, Caller],
        timeout: float,
        retries: int,
        open_sample: Callable[[Context], SampleCaller] | None = None,
        gates: Mapping[str, CallGate] | None = None,
    ) -> None:
        """`timeout`: seconds of one call. `retries`: further attempts while a tool is unavailable. `open_sample`: makes the
        caller of a sample's tools with state; None if there are none. `gates`: of the services behind tools; a tool without one
        gets its own.

        Raises ValueError for a tool with an invalid JSON schema.
        """
        self._callers, self._timeout, self._retries = dict(callers), timeout, retries
        self._stateful = {tool.name for tool in tools if tool.stateful}
        self._titles = {tool.name: tool.title for tool in tools}
        self.interaction = next(
            (tool.name for tool in tools if tool.is_interaction), None
        )  # answers turns without calls
        self._open_sample = open_sample
        self._gates = {tool.name: CallGate(tool.title) for tool in tools} | dict(gates or {})
        self._checks: dict[str, Any] = {}
        for tool in (tool for tool in tools if not tool.is_interaction):
            try:
                Draft202012Validator.check_schema(tool.parameters)
            except SchemaError as error:
                raise ValueError(
                    f"the parameters of tool {tool.name!r} are not a valid JSON schema: {error.message}"
                ) from error
            self._checks[tool.name] = _Validator(tool.parameters)

    def open_sample(self, context: Context) -> SampleCaller | None:
        """Return the caller of a new sample's tools with state; None if there are none. It must be released."""
        return self._open_sample(context) if self._stateful and self._open_sample is not None else None

    async def call(
        self, call: ToolCall, context: Context, seconds_left: float, state: SampleCaller | None = None
    ) -> ToolAnswer:
        """Return the answer to `call`, with its whole text. Raises ToolUnavailable after all attempts.

        `state`: the sample's, from `open_sample`.
        """
        problem = self._problem_of(call)
        if problem:
            return ToolAnswer(refused(call, problem))
        outcome = await self._attempts(call, context, min(self._timeout, seconds_left), state)
        turn = Turn(
            "tool",
            outcome.answer.text,
            name=call.name,
            arguments=call.arguments,
            failure=outcome.failure,
            seconds=outcome.seconds,
            reward=outcome.answer.reward,
        )
        return ToolAnswer(turn, outcome.answer.images)

    async def reply(
        self, messages: list[dict[str, Any]], context: Context, seconds_left: float, state: SampleCaller | None
    ) -> tuple[Turn, bool]:
        """Return the user's turn after `messages`, with its whole text, and whether the conversation ends with it.

        Raises ToolUnavailable if the interaction fails in any way: the policy has not called it.
        """
        assert self.interaction is not None, "the recipe has no interaction"
        call = ToolCall(self.interaction, {"messages": messages})
        outcome = await self._attempts(call, context, min(self._timeout, seconds_left), state)
        reply = outcome.answer
        if not isinstance(reply, Reply):
            fault = ToolFault(reply.text.removeprefix("Error: "), cast("FailureKind", outcome.failure))
            fault.source = self._titles[call.name]
            raise fault
        if reply.images:
            fault = ToolFault("its reply has images; only answers of tools may have some")
            fault.source = self._titles[call.name]
            raise fault
        return Turn("user", reply.text, seconds=outcome.seconds, reward=reply.reward), reply.ends

    async def _attempts(
        self, call: ToolCall, context: Context, timeout: float, state: SampleCaller | None
    ) -> CallOutcome:
        async def attempt() -> CallOutcome:
            if call.name in self._stateful:
                assert state is not None, f"{call.name} needs the sample's state"
                return await state.call(call.name, call.arguments, timeout)
            return await self._callers[call.name].call(call.name, call.arguments, context, timeout)

        try:
            outcome, _ = await self._gates[call.name].call(context.uid, attempt, self._retries + 1, _is_answer)
        except ToolUnavailable as error:
            error.source = self._titles[call.name]
            raise
        return outcome

    def _problem_of(self, call: ToolCall) -> str:
        if call.problem:
            return call.problem
        if call.name not in self._checks:
            return f"there is no tool {call.name!r}; there are: {', '.join(self._checks)}"
        try:
            error = best_match(self._checks[call.name].iter_errors(call.arguments))
        except Exception as failure:  # noqa: BLE001 -- a server's schema, or a number that cannot be compared
            return f"its arguments cannot be checked against the tool's schema: {type(failure).__name__}: {failure}"
        if error is None:
            return ""
        place = ".".join(str(part) for part in error.absolute_path)
        return f"its arguments are wrong{' at ' + place if place else ''}: {error.message[:_MOST_PROBLEM]}"


def _is_answer(outcome: CallOutcome) -> bool:
    return outcome.failure not in ("timeout", "crash")


def refused(call: ToolCall, problem: str) -> Turn:
    """Return a tool turn with the reason why the call was not made."""
    return Turn("tool", f"Error: {problem}", name=call.name, arguments=call.arguments, failure="refused")
