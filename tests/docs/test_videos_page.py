"""docs/videos.md: run its example as written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megarl import load_recipe
from megarl.data.images import ImageReader
from megarl.preflight.survey import prepare_training
from tests.docs.test_data_page import copy_recipes
from tests.support.docs_pages import broken_links
from tests.support.vl_model import PATCH_VALUES, write_processor, write_video_processor, write_vl_model

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "videos.md").read_text()


@pytest.mark.parametrize("model", ["vl", "qwen3_vl"])
def test_the_example(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the example: frames, rows, the recipe and its token counts, and the inputs of a rollout process."""
    monkeypatch.chdir(tmp_path)
    (script,), (settings,) = (re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL) for kind in ("python", "yaml"))
    exec(compile(script, "docs/videos.md", "exec"), {})
    copy_recipes(tmp_path)
    (tmp_path / "clips.yaml").write_text(settings)
    write_vl_model(tmp_path / "model", model)
    write_processor(tmp_path / "model")
    kind = "Qwen2VLVideoProcessor" if model == "vl" else "Qwen3VLVideoProcessor"
    write_video_processor(tmp_path / "model", kind, 3136, 25_165_824)
    overrides = [f"model.path={tmp_path}/model", "model.dtype=float32", "data.cache=null"]
    overrides += ["data.max_prompt_length=256", "rollout.max_response_length=64"]  # of the tiny model
    for more, tokens in ((["data.max_pixels=null"], 144), ([], 60)):
        recipe = load_recipe("clips.yaml", [*overrides, *more])
        prepared = prepare_training(recipe)
        assert prepared.prompts is not None
        assert [prompt.ground_truth for prompt in prepared.prompts] == ["left", "right", "left", "right"]
        for prompt in prepared.prompts:
            (video,) = prompt.videos
            assert video.tokens * len(video.starts) == tokens < len(prompt.tokens)
            assert ("<0.2 seconds>" in prompt.text) is (model == "qwen3_vl")
        images = ImageReader.of(recipe.model.path, recipe.data).prepare(prepared.prompts[0])
        assert images is not None and images.pixels.shape == (tokens * 4, PATCH_VALUES)


def test_links_lead_somewhere() -> None:
    assert not broken_links(ROOT / "docs" / "videos.md")
