"""Rehearsals of recipes for rows with videos."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.commands.rehearse.tiny_copy import make_tiny_copy
from megarl.preflight.survey import prepare_training

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen3-VL-8B-Instruct"])
def test_rows_with_videos_are_rehearsed_with_videos(model: str, tmp_path: Path) -> None:
    file = tmp_path / "clips.jsonl"
    file.write_text(json.dumps({"data_source": "me/own", "prompt": "<video>", "videos": [["a.png"]]}) + "\n")
    overrides = [
        f"model.path={model}",
        f"data.train_files=[{file}]",
        f"data.eval_files=[{file}]",
        "reward.function=math",
    ]
    tiny = make_tiny_copy(ROOT / "recipes" / "geometry3k.yaml", overrides, tmp_path / "copy")
    prepared = prepare_training(tiny.recipe)
    assert prepared.prompts is not None
    for prompt in prepared.prompts:
        (video,) = prompt.videos
        assert len(video.frames) == 3 and len(video.starts) == (2 if "Qwen3" in model else 1)
        assert ("<0.2 seconds>" in prompt.text) is ("Qwen3" in model)
