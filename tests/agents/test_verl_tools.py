"""Tools written for verl run unchanged, without verl and in the processes of their samples."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.agents import Context, ToolUnavailable, find, tool_paths
from megarl.agents.python_tools import PythonTools
from megarl.agents.setup import AgentSetup, check_tools
from megarl.errors import RecipeError
from megarl.recipe.agent import AgentConfig
from tests.support.agent_tokenizers import qwen3
from tests.support.verl_stand_in import forget_loop_modules

OWN = "tests.support.verl_tools"


def schema(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": f"The {name}.", "parameters": parameters}}


DEGREES = {"type": "number", "description": "The guess.", "minimum": -273}
ENTRIES: list[dict[str, Any]] = [
    {
        "class_name": f"{OWN}.ThermometerTool",
        "config": {"type": "native", "penalty": 0.25},
        "tool_schema": schema("guess", degrees=DEGREES),
    },
    {"class_name": f"{OWN}.NotesTool", "config": {"type": "native"}},
    {
        "class_name": f"{OWN}.PictureTool",
        "config": {"type": "native"},
        "tool_schema": schema("picture", what={"type": "string"}),
    },
]


def write(path: Path, *entries: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump({"tools": list(entries)}))
    return str(path)


@pytest.fixture(scope="module")
def tools_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("verl") / "tools.yaml", *ENTRIES)


@pytest.fixture(scope="module")
def running(tools_file: str) -> Iterator[PythonTools]:
    paths = {find(path).name: path for path in tool_paths([tools_file])}
    tools = PythonTools(paths, {}, processes=2, timeout=20.0)
    tools.start()
    yield tools
    tools.close()


def context(sample: int, notes: Path, degrees: Any = 20) -> Context:
    kwargs = {
        "guess": {"create_kwargs": {"degrees": degrees}, "calc_reward_kwargs": {"scale": 0.5}},
        "take_note": {"create_kwargs": {"path": str(notes)}, "execute_kwargs": {"prefix": "- "}},
        "picture": None,  # parquet fills the keys of other rows so
    }
    return Context("row/1", "20", {"tools_kwargs": kwargs}, sample)


def test_the_prompt_shows_the_schemas_as_verl_does(tools_file: str) -> None:
    """verl's schema classes keep type, description and enum of a parameter, and drop the rest."""
    setup = AgentSetup(AgentConfig(tools=[tools_file], processes=1), {}, {})
    shown = check_tools(setup, qwen3())
    guess = schema("guess", degrees={"type": "number", "description": "The guess."})
    note = schema("take_note", note={"type": "string", "description": "The note."})
    note["function"]["description"] = "Keeps a note."
    assert shown == [guess, note, schema("picture", what={"type": "string"})]
    assert tool_paths(["code_interpreter", tools_file])[:2] == ["code_interpreter", f"{tools_file}:guess"]


def test_rewards_depend_on_earlier_calls_of_the_sample(running: PythonTools, tmp_path: Path) -> None:
    """Two samples at once: guesses, penalties and agent_data of the first do not reach the second."""

    async def play() -> tuple[list[tuple[str, float]], list[str], list[float]]:
        first = running.open_sample(context(1, tmp_path / "one"))
        second = running.open_sample(context(2, tmp_path / "two", degrees=-5))
        answers = []
        for sample, degrees in ((first, 25.0), (second, -5.0), (first, 30.0), (first, 20.0), (second, -5.0)):
            outcome = await sample.call("guess", {"degrees": degrees}, 20.0)
            answers.append((outcome.answer.text, outcome.answer.reward))
        notes = [
            (await sample.call("take_note", {"note": note}, 20.0)).answer.text
            for sample, note in ((first, "a"), (first, "b"), (second, "c"))
        ]
        rewards = [await sample.finish(with_rewards=True) for sample in (first, second)]
        return answers, notes, rewards

    answers, notes, rewards = asyncio.run(play())
    assert answers == [("too warm", 0.0), ("hit", 0.0), ("too warm", -0.25), ("hit", 0.0), ("hit", -0.25)]
    assert notes == ["1 notes, last guess 20.0", "2 notes, last guess 20.0", "1 notes, last guess -5.0"]
    assert rewards == [0.5, 0.5]
    assert (tmp_path / "one").read_text() == "- a\n- b" and (tmp_path / "two").read_text() == "- c"


def test_a_tool_is_released_without_calc_reward(running: PythonTools, tmp_path: Path) -> None:
    async def play() -> None:
        sample = running.open_sample(context(1, tmp_path / "notes"))
        await sample.call("take_note", {"note": "x"}, 20.0)
        sample.release()

    asyncio.run(play())
    limit = time.monotonic() + 10.0
    while not (tmp_path / "notes").exists():
        assert time.monotonic() < limit, "the tool was not released"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("subject", "words"),
    [
        ("film", "it answered with video data, and tool messages are text and images"),
        ("sketch", "image 0 of its answer is neither bytes nor a Pillow image, but a object"),
        ("messages", r"agent_data.messages: megarl passes only request_id, tools_kwargs, extra_fields"),
    ],
)
def test_what_megarl_cannot_carry_fails_the_sample_with_the_reason(
    running: PythonTools, tmp_path: Path, subject: str, words: str
) -> None:
    async def play(requested: str) -> str:
        sample = running.open_sample(context(1, tmp_path / "notes"))
        try:
            return (await sample.call("picture", {"what": requested}, 20.0)).answer.text
        finally:
            sample.release()

    assert asyncio.run(play("tokens")) == "none"  # getattr with a default works
    with pytest.raises(ToolUnavailable, match=words):
        asyncio.run(play(subject))


def test_a_row_without_the_arguments_of_create_fails_its_sample(running: PythonTools) -> None:
    async def play() -> None:
        await running.open_sample(Context("row/2")).call("guess", {"degrees": 1.0}, 20.0)

    with pytest.raises(ToolUnavailable, match="it could not start: KeyError: 'degrees'"):
        asyncio.run(play())


MCP = {"class_name": "verl.tools.mcp_search_tool.MCPSearchTool", "config": {"type": "mcp"}}


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([], "has no list `tools`"),
        ([MCP], "tool 1 is an MCP server: name its command or URL in agent.mcp"),
        ([{**ENTRIES[1], "config": {}}], "config.type is None"),
        ([{**ENTRIES[1], "class_name": f"{OWN}.NoteTool"}], "importing tests.support.verl_tools.NoteTool failed"),
        ([{**ENTRIES[1], "class_name": "pathlib.Path"}], "it has no create, execute, calc_reward, release"),
        ([{**ENTRIES[0], "tool_schema": None}], "cannot be created"),
        ([{**ENTRIES[0], "config": {"type": "native"}}], "cannot be created: KeyError: 'penalty'"),
        ([{**ENTRIES[0], "tool_schema": {"type": "function"}}], "its tool_schema is not one of verl's"),
        ([ENTRIES[1], ENTRIES[1]], "two tools have the name 'take_note'"),
    ],
)
def test_files_that_cannot_be_used_are_refused_before_the_run(
    tmp_path: Path, entries: list[dict[str, Any]], words: str
) -> None:
    setup = AgentSetup(AgentConfig(tools=[write(tmp_path / "tools.yaml", *entries)]), {}, {})
    with pytest.raises(RecipeError, match=words):
        check_tools(setup, qwen3())


def test_a_tool_of_verl_itself_needs_verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the modules that megarl provides without verl."""
    forget_loop_modules(monkeypatch)
    entry = {**ENTRIES[0], "class_name": "verl.tools.gsm8k_tool.Gsm8kTool"}
    message = r"without it megarl provides only verl\.interactions\.base, verl\.tools\.base_tool"
    with pytest.raises(ValueError, match=message):
        tool_paths([write(tmp_path / "tools.yaml", entry)])
