"""examples/: each project is on its page, plans, and does what its docstrings say; tests/runs/test_examples.py trains it."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.agents import Context, Reply
from megarl.agents.interactions import find_interaction
from megarl.agents.tool_process import SampleState, ToolRequest
from megarl.cli import app
from megarl.rewards import ScoreRequest, find, score
from megarl.types import Turn
from tests.support.docs_pages import broken_links
from tests.support.slow import slow_except
from tests.support.tutorials import forget_user_functions

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PROJECTS = sorted(path.parent.name for path in EXAMPLES.glob("*/recipe.yaml"))


@pytest.fixture(autouse=True)
def at_the_top(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_user_functions(monkeypatch)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])


def test_the_page_lists_every_project_and_file() -> None:
    assert len(PROJECTS) == 6 and not broken_links(EXAMPLES / "README.md")
    text = (EXAMPLES / "README.md").read_text()
    assert re.findall(r"^\| (\w+) \| .*\[", text, re.M) and set(re.findall(r"^\| (\w+) \| .*\[", text, re.M)) == set(
        PROJECTS
    )
    for project in PROJECTS:
        files = sorted(
            (path.name for path in (EXAMPLES / project).iterdir() if path.is_file()), key=lambda name: name[-3:]
        )
        code, recipe = files
        assert code.endswith(".py") and recipe == "recipe.yaml", files
        assert f"]({project}/{code})" in text and f"]({project}/recipe.yaml)" in text


@pytest.mark.parametrize("project", slow_except("own_reward".__eq__, PROJECTS))
def test_it_plans(project: str, quickstart_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`plan` imports the project's module, checks the settings together, and counts the memory."""
    model = ["--model", str(quickstart_data / "model")]
    assert app(args=["plan", f"examples/{project}/recipe.yaml", *model], standalone_mode=False) == 0
    assert "actor 0" in capsys.readouterr().out


@pytest.mark.parametrize("project", PROJECTS)
def test_commands_in_its_files_are_on_the_page(project: str) -> None:
    page = (EXAMPLES / "README.md").read_text()
    for path in (EXAMPLES / project).iterdir():
        if path.is_file():
            text = path.read_text() if path.suffix == ".yaml" else ast.get_docstring(ast.parse(path.read_text())) or ""
            for command in re.findall(r"python -m (?:megarl train )?examples[\w./-]+", text):
                assert command in page, command


def test_the_reward() -> None:
    scorer = find("examples/own_reward/reward.py:right_and_brief")
    rewards = [
        score(scorer, ScoreRequest(text, "42", "mine")).value
        for text in ("#### 42", "#### 42" + " " * 53, "42", "#### 41")
    ]
    assert rewards == [pytest.approx(1 + 0.5 * (1 - 7 / 60)), 1.0, 0.0, 0.0]


def test_the_loss_and_the_advantage() -> None:
    from examples.own_loss.loss import ranks, smooth_clip

    settings: Any = SimpleNamespace(options={"width": 0.2})
    inputs: Any = SimpleNamespace(
        log_probs=torch.tensor([0.0, 1.0]), old_log_probs=torch.tensor([0.0, 0.0]), advantages=torch.tensor([2.0, 1.0])
    )
    loss, metrics = smooth_clip(inputs, settings)
    assert loss.tolist() == pytest.approx([-2.0, -1.2], abs=1e-6) and metrics["actor/ratio"][1] == pytest.approx(np.e)
    outcomes: Any = SimpleNamespace(rewards=np.array([3.0, 1.0, 2.0, 5.0, 5.0]), groups=np.array([7, 7, 7, 9, 9]))
    assert ranks(outcomes, settings).tolist() == [1.0, -1.0, 0.0, 0.0, 0.0]


def test_the_tool() -> None:
    from examples.own_tool.tool import demonstration, price, question, right

    context = Context("row", "4", {"prices": {"pens": 4}})
    assert price("pens", context) == "4"
    with pytest.raises(KeyError, match="no price of cars"):
        price("cars", context)
    turns = (Turn("assistant", ""), Turn("tool", "4"), Turn("assistant", " 4"))
    assert [right(ScoreRequest("", truth, "mine", turns=turns))["score"] for truth in ("4", "5")] == [1.0, 0.0]
    import random

    row = question(random.Random(0), 0)
    assert row["reward_model"]["ground_truth"] == str(row["extra_info"]["prices"][row["extra_info"]["item"]])
    lengths = {len(demonstration(random.Random(seed), 0)["messages"]) for seed in range(9)}
    assert lengths == {2, 4}, "with a call, and without"


def test_the_interaction() -> None:
    async def replies(texts: list[str]) -> list[Any]:
        state = SampleState(find_interaction("examples.own_interaction.user:Customer"))
        context = Context("row", "7", {})
        requests = [ToolRequest({"messages": [{"role": "assistant", "content": text}]}, context) for text in texts]
        return [await state.run(request) for request in requests]

    assert asyncio.run(replies(["How many?", "7"])) == [Reply("7", -0.1), Reply("Thank you.", 1.0, ends=True)]
    assert asyncio.run(replies(["3"])) == [Reply("No.", -0.5, ends=True)]


def test_the_tables_of_runs(tmp_path: Path) -> None:
    from examples.asynchronous.lag import table
    from examples.distillation.distil import compare

    lines = [
        {"step": 0, "eval/pass@1": 0.5},
        {"step": 1, "rollout/rewards/mean": 0.25, "actor/reward_kl_penalty": 0.5, "rollout/staleness_max": 2},
        {"step": 2, "rollout/rewards/mean": 0.5, "actor/reward_kl_penalty": 0.125},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    heading, first, last = table(tmp_path).splitlines()
    assert len(heading) == len(first) == len(last) and first.split()[:2] == ["1", "0.25"] and "-" in last
    assert "0.500 -> 0.125" in compare(tmp_path) and "0.25 -> 0.50" in compare(tmp_path)


def test_the_table_names_metrics_that_exist() -> None:
    from examples.asynchronous.lag import COLUMNS

    page = (ROOT / "docs" / "metrics.md").read_text()
    assert not [name for name in COLUMNS.values() if f"`{name}`" not in page]
