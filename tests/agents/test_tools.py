"""Tools: schemas from signatures, and real calls in killable processes and the sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any, Literal

import pytest

from megarl.agents import Context, ToolUnavailable, find, tool
from megarl.agents.call_formats import ToolCall
from megarl.agents.code_interpreter import code_interpreter
from megarl.agents.python_tools import PythonTools
from megarl.agents.setup import Agents, AgentSetup, check_tools
from megarl.agents.toolbox import Toolbox
from megarl.recipe.agent import AgentConfig
from megarl.recipe.sandbox import SandboxConfig
from megarl.types import Turn
from tests.support.agent_tokenizers import qwen3
from tests.support.sandbox_machine import needs_sandbox

OWN = "tests.support.agent_tools"


# ---- schemas


def test_a_schema_comes_from_the_signature_and_the_docstring() -> None:
    add = find(f"{OWN}:add")
    assert add.schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first one."},
                    "b": {"type": "number", "description": "The second one, which may be left out.", "default": 0.5},
                },
                "required": ["a"],
            },
        },
    }
    look_up = find(f"{OWN}:look_up")
    assert (look_up.name, look_up.context, list(look_up.parameters["properties"])) == ("look-up", "context", ["key"])
    mood = find(f"{OWN}:wait").parameters["properties"]["mood"]
    assert mood == {"type": "string", "enum": ["calm", "hasty"], "default": "calm"}


def test_annotations_become_json_schema_types() -> None:
    @tool
    def many(
        a: list[int],
        b: dict[str, bool | None],
        c: str | None = None,
        d: list = [],  # noqa: B006
        e: dict = {},  # noqa: B006
        f: Literal["x"] | None = None,
    ) -> str:
        """Takes much."""
        return ""

    described = many.__megarl_tool__  # type: ignore[attr-defined]
    assert described.parameters["properties"] == {
        "a": {"type": "array", "items": {"type": "integer"}},
        "b": {"type": "object", "additionalProperties": {"type": ["boolean", "null"]}},
        "c": {"type": ["string", "null"]},
        "d": {"type": "array", "default": []},
        "e": {"type": "object", "default": {}},
        "f": {"type": ["string", "null"], "enum": ["x", None]},
    }
    # Models write null for an optional argument: such a call reaches the tool.
    box = Toolbox([described], {}, 1.0, 0)
    call = ToolCall("many", {"a": [1], "b": {"x": None}, "c": None, "f": None})
    assert box._problem_of(call) == ""
    assert "None is not of type 'array'" in box._problem_of(ToolCall("many", {"a": None, "b": {}}))


def _no_docstring(a: int) -> int:
    return a


def _no_annotation(a) -> int:  # type: ignore[no-untyped-def]
    """Adds."""
    return int(a)


def _odd(a: set[int]) -> int:
    """Adds."""
    return len(a)


def _many(*a: int) -> int:
    """Adds."""
    return sum(a)


def _told_too_much(a: int) -> int:
    """Adds.

    Args:
        a: One.
        b: Another.
    """
    return a


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (_no_docstring, "it has no docstring"),
        (_no_annotation, "parameter 'a' has no annotation"),
        (_odd, r"parameter 'a' is annotated with set\[int\]: give it str"),
        (_many, "cannot be called by name"),
        (_told_too_much, "describes b, and it has no such parameter"),
    ],
)
def test_functions_without_a_complete_schema_are_refused(function: Callable[..., Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tool(function)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("code_interpretr", "unknown tool 'code_interpretr'; did you mean 'code_interpreter'"),
        (f"{OWN}:ad", "tests.support.agent_tools has no function 'ad'; did you mean 'add'"),
        (f"{OWN}:not_a_tool", "is not decorated with megarl.agents.tool"),
        ("no_such_module:add", "importing 'no_such_module' failed with ModuleNotFoundError"),
    ],
)
def test_an_unknown_tool_is_refused(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        find(name)


# ---- Python tools


@pytest.fixture(scope="module")
def python_tools() -> Iterator[tuple[Toolbox, PythonTools]]:
    paths = {
        find(f"{OWN}:{name}").name: f"{OWN}:{name}"
        for name in ("add", "look_up", "wait", "rewarded", "misbehave", "odd")
    }
    running = PythonTools(paths, {}, processes=2, timeout=20.0)
    running.start()
    yield Toolbox([find(path) for path in paths.values()], dict.fromkeys(paths, running), 20.0, 0), running
    running.close()


def call(box: Toolbox, name: str, limit: float = 20.0, **arguments: Any) -> Turn:
    context = Context("row/1", "4", {"table": {"b": 7}})
    return asyncio.run(box.call(ToolCall(name, arguments), context, limit)).turn


def test_calls_in_processes(python_tools: tuple[Toolbox, PythonTools]) -> None:
    box, _ = python_tools
    assert call(box, "add", a=1, b=2.5).text == "3.5" and call(box, "add", a=1).text == "1.5"
    assert call(box, "look-up", key="b").text == "7"  # from the row, which the policy cannot name
    assert call(box, "wait", seconds=0.01).text == '{"mood": "calm", "waited": true}'
    arguments = call(box, "rewarded", text="well")
    assert (arguments.text, arguments.reward, arguments.failure, arguments.name) == (
        "well",
        0.5,
        "",
        "rewarded",
    ) and arguments.seconds < 20


def test_tool_failures_become_answers_to_the_policy(python_tools: tuple[Toolbox, PythonTools]) -> None:
    box, _ = python_tools
    assert call(box, "misbehave", how="so").text == "Error: ValueError: so"
    hung = call(box, "misbehave", limit=0.3, how="hang")
    assert (hung.text, hung.failure) == ("Error: it was stopped after 0.3 seconds", "timeout") and hung.seconds < 5
    for how in ("exit", "quit"):
        gone = call(box, "misbehave", how=how)
        assert gone.text.startswith("Error: ") and gone.failure in ("crash", "error"), gone
    assert call(box, "look-up", key="z").text == "Error: KeyError: 'z'"
    with pytest.raises(ToolUnavailable, match="the index is being rebuilt"):
        call(box, "misbehave", how="absent")
    assert call(box, "add", a=1, b=1).text == "2"  # other calls still work


def test_answers_with_an_invalid_reward_or_text_are_refused(python_tools: tuple[Toolbox, PythonTools]) -> None:
    """A reward of NaN would be trained on, and numpy's numbers cannot be saved; both are errors of the tool."""
    box, _ = python_tools
    with pytest.raises(ToolUnavailable, match="the reward of its answer is nan, not a finite number"):
        call(box, "odd", kind="nan")
    with pytest.raises(ToolUnavailable, match="the text of its answer is None"):
        call(box, "odd", kind="text")
    reward = call(box, "odd", kind="numpy").reward
    assert reward == 0.5 and type(reward) is float


def test_a_slow_tool_does_not_delay_other_samples(python_tools: tuple[Toolbox, PythonTools]) -> None:
    box, _ = python_tools

    async def together() -> list[str]:
        order: list[str] = []

        async def call_tool(name: str, **arguments: Any) -> None:
            await box.call(ToolCall(name, arguments), Context("row"), 20.0)
            order.append(name)

        await asyncio.gather(call_tool("wait", seconds=1.0), *(call_tool("add", a=number) for number in range(40)))
        return order

    assert asyncio.run(together()) == ["add"] * 40 + ["wait"]


# ---- the sandbox


@needs_sandbox
def test_the_code_interpreter() -> None:
    assert code_interpreter("print(2 + 2)\nprint('x')") == "4\nx"
    assert code_interpreter("a = 20\na * 2 + 2") == "42"  # a last expression is shown, as in a notebook
    assert code_interpreter("a = 1") == "(it printed nothing)" and code_interpreter("") == "(it printed nothing)"
    assert code_interpreter("None") == "(it printed nothing)"
    wrong = code_interpreter("print('before')\n1 / 0")
    assert wrong.startswith("before\n") and wrong.endswith("ZeroDivisionError: division by zero")
    assert 'File "program.py", line 2' in wrong and "_RUNNER" not in wrong and "exec(" not in wrong
    assert "SyntaxError" in code_interpreter("1 +")
    assert code_interpreter("import sys; sys.exit(3)") == "Error: it ended with exit status 3"
    assert "Error" in code_interpreter("open('/etc/passwd').read()")
    assert code_interpreter("def f(n):\n    return n and f(n - 1)\nf(3)") == "0"


@needs_sandbox
def test_the_code_interpreter_has_the_recipes_limits_and_packages() -> None:
    """The tool has the recipe's limits and packages."""
    settings = {"sandbox": asdict(SandboxConfig(wall_seconds=1.0, packages=["packaging"]))}
    setup = AgentSetup(AgentConfig(tools=["code_interpreter"], processes=1, tool_timeout=20.0), {}, settings)
    (schema,) = check_tools(setup, qwen3())
    assert schema["function"]["parameters"]["required"] == ["code"]

    async def used() -> list[Turn]:
        agents = Agents(setup, qwen3())
        try:
            loop = await agents.start()
            codes = ("import packaging; 6 * 7", "while True: pass", "import numpy")
            calls = [ToolCall("code_interpreter", {"code": code}) for code in codes]
            return [(await loop.tools.call(call, Context("row"), 20.0)).turn for call in calls]
        finally:
            await agents.close()

    right, endless, absent = asyncio.run(used())
    assert right.text == "42"
    assert endless.text == "Error: it ran for more than 1 seconds, and was stopped" and not endless.failure
    assert "ModuleNotFoundError" in absent.text
    nowhere = {"sandbox": asdict(SandboxConfig(packages=["no_such_package"]))}
    with pytest.raises(ValueError, match=r"tool 'code_interpreter' cannot be used here: .*no_such_package"):
        check_tools(replace(setup, settings=nowhere), qwen3())


def test_the_code_interpreters_schema_has_not_changed() -> None:
    """Its description is part of every prompt with tools: another text would change what a model samples."""
    tool = find("code_interpreter")
    assert tool.description == "Runs Python code and returns what it prints."
    assert tool.parameters["properties"] == {"code": {"type": "string", "description": "The code to run."}}
