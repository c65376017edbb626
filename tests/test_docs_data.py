"""docs/data.md does what it says: its examples are run here as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megarl import load_recipe
from megarl.data.command import app
from megarl.preflight import prepare_training
from megarl.rollout.engines_source import EnginesSource

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "data.md").read_text()


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return found


def test_the_worked_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quickstart_data: Path) -> None:
    """From a .csv to the first batch's rows, by the page's own words."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "problems.csv").write_text('question,answer,steps\n"2, and 2?",4,1\n"2*3+1?",7,2\n', encoding="utf-8")
    exec(compile(block("python"), "docs/data.md", "exec"), {})
    (tmp_path / "data" / "quickstart").symlink_to(quickstart_data)
    for recipe in (ROOT / "recipes").glob("*.yaml"):
        (tmp_path / recipe.name).write_text(recipe.read_text())
    (tmp_path / "base").symlink_to(ROOT / "recipes" / "base")
    (tmp_path / "mixed.yaml").write_text(block("yaml"))
    settings = [f"model.path={quickstart_data}/model", f"data.cache={tmp_path}/cache"]

    with pytest.raises(ValueError) as refused:
        prepare_training(load_recipe("mixed.yaml", settings))
    assert str(refused.value) == re.findall(r"```\n(data\.curriculum: .*?)\n```", PAGE)[0]

    recipe = load_recipe("mixed.yaml", [*settings, "data.curriculum=null", "data.curriculum_epochs=null"])
    prepared = prepare_training(recipe)
    assert prepared.rows_of_sets == {"words": 4096, "problems": 2} and prepared.prompts is not None
    source = EnginesSource(recipe, prepared.prompts, [], [], lambda: None)
    rows = [prepared.prompts[source.sampler.at(position)] for position in range(16)]
    assert sum(row.data_source == "openai/gsm8k" for row in rows) == 4  # weight 1 of 4
    assert {row.ground_truth for row in rows if row.data_source == "openai/gsm8k"} == {"4", "7"}

    only = load_recipe("mixed.yaml", [*settings, "data.mix.words.files=[data/problems.parquet]"])
    prepared = prepare_training(only)
    assert prepared.prompts is not None
    sampler = EnginesSource(only, prepared.prompts, [], [], lambda: None).sampler
    assert [prepared.prompts[sampler.at(position)].extra_info["steps"] for position in (0, 1)] == [1, 2]


def test_every_command_is_on_the_page() -> None:
    named = set(re.findall(r"^\| `data (\w+)`", PAGE, re.MULTILINE))
    assert named == {command.name or command.callback.__name__ for command in app.registered_commands} - {"quickstart"}


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", PAGE)
    assert not [link for link in links if "://" not in link and not (ROOT / "docs" / link).exists()]
