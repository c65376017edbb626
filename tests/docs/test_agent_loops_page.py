"""docs/agent_loops.md: the example gives the text's results, and all names on the page exist."""

from __future__ import annotations

import asyncio
import inspect
import re
import sys
from pathlib import Path

import pytest

from megarl.agents import LoopSample, Response
from megarl.agents.custom.verl_base import LOOP_MODULES
from megarl.agents.setup import Agents, AgentSetup, check_tools
from megarl.agents.trajectory import Trajectory
from megarl.preflight.load import load_recipe
from megarl.types import GenerationRequest, Sampling
from tests.agents.test_agent_loops import ROW, Policy
from tests.support.agent_tokenizers import qwen3
from tests.support.docs_pages import broken_links, unknown_settings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "agent_loops.md").read_text()


@pytest.mark.slow
def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the example as written: the module, the recipe's section, and the process of a sample."""
    code, recipe = (re.search(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL) for kind in ("python", "yaml"))
    assert code is not None and recipe is not None
    (tmp_path / "my_loops.py").write_text(code[1])
    (tmp_path / "recipe.yaml").write_text(f"model: {{path: some/model}}\n{recipe[1]}")
    setup = AgentSetup.of(load_recipe(tmp_path / "recipe.yaml"))
    assert setup is not None
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    assert check_tools(setup, qwen3()) == []

    async def sampled() -> Trajectory:
        agents = Agents(setup, qwen3())
        try:
            loop = await agents.start()
            request = GenerationRequest(0, ROW, Sampling(1, 100), 1)
            return await loop.run(request, None, Policy(["It is 4", "Yes"]))  # type: ignore[arg-type]
        finally:
            await agents.close()

    done = asyncio.run(sampled())
    assert done.failure is None, done.failure
    texts = [turn.text for turn in done.turns]
    assert (texts[0], texts[2]) == ("It is 4", "Yes") and "Are you sure?" in texts[1]
    assert not done.sampled.all() and done.outcome is None


def test_links_settings_and_names_exist() -> None:
    assert not broken_links(ROOT / "docs" / "agent_loops.md") and not unknown_settings(PAGE)
    tables = dict(re.findall(r"\| of `(\w+)` \| value \|\n\|---\|---\|\n((?:\|.*\n)+)", PAGE))
    for shown, class_ in (("sample", LoopSample), ("Response", Response)):
        names = re.findall(r"`(?:await )?(\w+)", "\n".join(row.split("|")[1] for row in tables[shown].splitlines()))
        public = {*inspect.get_annotations(class_), *vars(class_)}
        assert names and set(names) <= public, names
    provided = {each.__name__ for contents in LOOP_MODULES.values() for each in contents}
    assert {"AgentLoopBase", "AgentLoopOutput", "register", "ToolParser", "simple_timer"} <= provided
