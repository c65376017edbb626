"""docs/agents.md: the example gives the printed results, and all names on the page exist."""

from __future__ import annotations

import asyncio
import re
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from megarl.agents import Context, Reply
from megarl.agents import find as find_tool
from megarl.agents.call_formats import calls_in
from megarl.agents.interactions import find_interaction
from megarl.agents.python_tools import PythonTools
from megarl.agents.setup import Agents, AgentSetup, check_tools
from megarl.agents.tool_process import SampleState, ToolRequest, caller_of
from megarl.preflight.load import load_recipe
from megarl.recipe.agent import AgentConfig
from megarl.rewards import ScoreRequest, find, score
from megarl.types import Turn
from tests.support.agent_tokenizers import qwen3
from tests.support.docs_pages import broken_links, unknown_settings
from tests.support.sandbox_machine import needs_sandbox

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "agents.md").read_text()
INTERACTIONS = (ROOT / "docs" / "interactions.md").read_text()


@needs_sandbox
def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the example as written: the module, the recipe's section, separate processes, and the answers in the text."""
    code, recipe = (re.search(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL) for kind in ("python", "yaml"))
    assert code is not None and recipe is not None
    (tmp_path / "my_tools.py").write_text(code[1])
    (tmp_path / "recipe.yaml").write_text(f"model: {{path: some/model}}\n{recipe[1]}")
    setup = AgentSetup.of(load_recipe(tmp_path / "recipe.yaml"))
    assert setup is not None
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    schemas = check_tools(setup, qwen3())
    assert [schema["function"]["name"] for schema in schemas] == ["code_interpreter", "look_up"]
    assert schemas[1]["function"]["parameters"]["required"] == ["name"]
    context = Context("row", extra_info={"ages": {"Ada": 36}})
    calls_on_page = re.findall(r"`(\{\"name\": \"look_up\".*?\}\})`", PAGE)
    assert len(calls_on_page) == 2

    async def answers() -> list[Turn]:
        agents = Agents(setup, qwen3())
        try:
            loop = await agents.start()
            calls = [call for text in calls_on_page for call in calls_in(f"<tool_call>{text}</tool_call>", "hermes")]
            return [(await loop.tools.call(call, context, 60.0)).turn for call in calls]
        finally:
            await agents.close()

    right, wrong = asyncio.run(answers())
    assert (right.text, right.reward, right.failure) == ("36", 0.1, "")
    assert wrong.failure == "refused" and wrong.text in " ".join(PAGE.split())


def test_the_example_with_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers and rewards of the text, from the class as written."""
    _, code = re.findall(r"```python\n(from megarl.agents import Answer.*?)```", PAGE, re.DOTALL)
    (tmp_path / "my_state.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    assert check_tools(AgentSetup(AgentConfig(tools=["my_state:submit"]), {}, {}), qwen3())
    tools = PythonTools({"submit": "my_state:submit"}, {}, processes=1, timeout=60.0)
    tools.start()

    async def play() -> tuple[list[tuple[str, float]], float]:
        sample = tools.open_sample(Context("row", "4"))
        outcomes = [await sample.call("submit", {"number": number}, 60.0) for number in (6, 7, 4)]
        return [(outcome.answer.text, outcome.answer.reward) for outcome in outcomes], await sample.finish(True)

    try:
        answers, final = asyncio.run(play())
    finally:
        tools.close()
    assert answers == [("2", 0.0), ("3", -0.05), ("0", 0.0)] and final == 0.2
    assert "reads `2`, `3` and `0`. The second call costs 0.05, and the sample earns" in " ".join(PAGE.split())


def test_the_example_with_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(from PIL import Image.*?)```", PAGE, re.DOTALL)
    (tmp_path / "my_camera.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    assert check_tools(AgentSetup(AgentConfig(tools=["my_camera:crop"]), {}, {}), qwen3())
    picture = Image.new("RGB", (64, 48), "white")
    picture.paste("black", (8, 8, 16, 16))
    picture.save(tmp_path / "picture.png")
    context = Context("row", extra_info={"picture": str(tmp_path / "picture.png")})
    where = {"left": 8, "top": 8, "right": 24, "bottom": 16}
    answer = caller_of(find_tool("my_camera:crop"))(ToolRequest(where, context))
    (image,) = (Image.open(BytesIO(image)) for image in answer.images)
    assert answer.text == "the part" and image.size == (64, 32)
    assert image.getpixel((4, 4)) == (0, 0, 0) and image.getpixel((60, 4)) == (255, 255, 255)


def test_the_example_of_an_interaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The conversation and rewards of docs/interactions.md, from the class as written."""
    code, recipe = (re.search(rf"```{kind}\n(.*?)```", INTERACTIONS, re.DOTALL) for kind in ("python", "yaml"))
    assert code is not None and recipe is not None
    (tmp_path / "my_user.py").write_text(code[1])
    (tmp_path / "recipe.yaml").write_text(f"model: {{path: some/model}}\n{recipe[1]}")
    setup = AgentSetup.of(load_recipe(tmp_path / "recipe.yaml"))
    assert setup is not None
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    assert check_tools(setup, qwen3()) == []
    state = SampleState(find_interaction("my_user:Patient"))
    context = Context("row", "flu", {"symptoms": ["I cough", "I am hot"]})

    async def replies() -> list[Any]:
        said = ["Where?", "A cold?", "Then it is a flu"]
        requests = [ToolRequest({"messages": [{"role": "assistant", "content": text}]}, context) for text in said]
        return [await state.run(request) for request in requests]

    assert asyncio.run(replies()) == [
        Reply("I cough", -0.1),
        Reply("I am hot", -0.1),
        Reply("Thank you", 1.0, ends=True),
    ]
    assert "reads `I cough` and `I am hot`, and `Then it is a flu` ends" in " ".join(INTERACTIONS.split())


def test_the_retool_scorer_has_the_documented_scores() -> None:
    def scored(response: str, turns: int) -> float:
        spoken = [Turn("assistant", "x")] * turns
        return score(find("retool"), ScoreRequest(response, "42", "math_dapo", turns=tuple(spoken))).value

    assert scored(r"so \boxed{42}", 1) == scored(r"\boxed{ 42 }", 3) == 1.0
    assert scored(r"\boxed{42.0}", 1) == -1.0 and scored("42", 2) == pytest.approx(-0.9)
    assert scored("no", 5) == pytest.approx(-0.6) and scored("no", 9) == pytest.approx(-0.6)
    assert scored(r"\boxed{42}" + " " * 100, 1) == -1.0  # too far from the end
    assert scored("", 0) == -1.0
    with pytest.raises(ValueError, match="ground_truth is ' '"):
        score(find("retool"), ScoreRequest("x", " ", "math_dapo"))


@pytest.mark.parametrize("name", ["retool_sft", "retool"])
def test_retools_recipes_load(name: str) -> None:
    recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml")
    assert recipe.name == name.replace("_", "-")
    assert recipe.agent.tools == (["code_interpreter"] if name == "retool" else [])


def test_links_and_settings_exist() -> None:
    assert (
        re.search(r"`(?:agent|rollout)\.\w+`", PAGE)
        and not unknown_settings(PAGE)
        and not unknown_settings(INTERACTIONS)
    )
    assert all((ROOT / path).exists() for path in re.findall(r"recipes/\w+\.yaml", PAGE))
    assert not broken_links(ROOT / "docs" / "agents.md") and not broken_links(ROOT / "docs" / "interactions.md")
