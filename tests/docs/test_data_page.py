"""docs/data.md: run its examples as written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megarl import load_recipe
from megarl.commands.data.command import app
from megarl.data.images import ImageReader
from megarl.preflight.survey import prepare_training
from megarl.rollout.source_engines import EnginesSource
from tests.support.docs_pages import broken_links
from tests.support.vl_model import PATCH_VALUES, write_processor, write_vl_model

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "data.md").read_text()


def block(language: str, section: str) -> str:
    """Return the only block of a language in a section."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    (content,) = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    return content


def copy_recipes(folder: Path) -> None:
    for recipe in (ROOT / "recipes").glob("*.yaml"):
        (folder / recipe.name).write_text(recipe.read_text())
    (folder / "base").symlink_to(ROOT / "recipes" / "base")


def test_the_worked_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quickstart_data: Path) -> None:
    """Run the page's steps from a .csv file to the rows of the first batch."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "problems.csv").write_text('question,answer,steps\n"2, and 2?",4,1\n"2*3+1?",7,2\n', encoding="utf-8")
    exec(compile(block("python", "Other formats"), "docs/data.md", "exec"), {})
    (tmp_path / "data" / "quickstart").symlink_to(quickstart_data)
    copy_recipes(tmp_path)
    (tmp_path / "mixed.yaml").write_text(block("yaml", "Several sets"))
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


def test_the_example_with_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the example: images, rows, the recipe and its token counts, and the inputs of a rollout process."""
    monkeypatch.chdir(tmp_path)
    exec(compile(block("python", "Images"), "docs/data.md", "exec"), {})
    copy_recipes(tmp_path)
    (tmp_path / "drawings.yaml").write_text(block("yaml", "Images"))
    write_vl_model(tmp_path / "model")
    write_processor(tmp_path / "model")
    lengths = ["data.max_prompt_length=256", "rollout.max_response_length=64"]  # of the tiny model
    overrides = ["model.path=model", "model.dtype=float32", "data.cache=null", *lengths]
    for more, tokens in ((["data.max_pixels=null"], 48), ([], 20)):
        recipe = load_recipe("drawings.yaml", [*overrides, *more])
        prepared = prepare_training(recipe)
        assert prepared.data_sources == ["hiyouga/geometry3k"] and prepared.prompts is not None
        assert [prompt.ground_truth for prompt in prepared.prompts] == ["3", "4", "5", "6"]
        assert {prompt.images[0].tokens for prompt in prepared.prompts} == {tokens}
        assert all(len(prompt.tokens) > tokens for prompt in prepared.prompts)
        images = ImageReader.of(recipe.model.path, recipe.data).prepare(prepared.prompts[0])
        assert images is not None and images.pixels.shape == (tokens * 4, PATCH_VALUES)


def test_every_command_is_on_the_page() -> None:
    named = set(re.findall(r"^\| `data (\w+)`", PAGE, re.MULTILINE))
    assert named == {command.name or command.callback.__name__ for command in app.registered_commands} - {"quickstart"}


def test_links_lead_somewhere() -> None:
    assert not broken_links(ROOT / "docs" / "data.md")
