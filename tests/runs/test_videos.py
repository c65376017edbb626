"""Rows with videos on the real stack: from a parquet file to the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.data.rows import write_parquet
from tests.runs.test_images import picture, torchvision, train  # noqa: F401 - a fixture of every test here
from tests.support.stack import metrics
from tests.support.vl_model import write_processor, write_video_processor, write_vl_model

pytestmark = [pytest.mark.stack, pytest.mark.slow]


def rows(count: int) -> list[dict[str, Any]]:
    """Rows with a video of two to five frames; every third has a picture as well, and every fourth no video."""
    table = []
    for number in range(count):
        frames = [picture(90, 60 + 50 * (number % 2), seed=10 * number + i) for i in range(2 + number % 4)]
        videos = [{"frames": frames, "fps": 0.5 + number}] if number % 4 != 3 else []
        images = [{"bytes": picture(90, 60, seed=1000 + number), "path": None}] if number % 3 == 0 else []
        table.append(
            {
                "data_source": "films",
                "prompt": [
                    {"role": "user", "content": "<video>" * len(videos) + f"w{20 + number}" + "<image>" * len(images)}
                ],
                "images": images,
                "videos": videos,
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": number},
            }
        )
    return table


@pytest.mark.parametrize(("model", "kind"), [("vl", "Qwen2VLVideoProcessor"), ("qwen3_vl", "Qwen3VLVideoProcessor")])
def test_engine_and_trainer_read_the_same_videos(model: str, kind: str, tmp_path: Path) -> None:
    """Log-probs agree before and after an update that includes the vision tower."""
    write_vl_model(tmp_path / "model", model)
    write_processor(tmp_path / "model")
    write_video_processor(tmp_path / "model", kind, 3136, 100_000)
    write_parquet(tmp_path / "rows.parquet", rows(12))
    train(tmp_path, tmp_path, "run", "train.steps=2")
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        print(line["rollout/logprob_gap_max"])
        assert line["rollout/logprob_gap_max"] < 1e-4 and line["actor/grad_norm"] > 0
        assert line["prompt_length/max"] > 20, "placeholders are counted"
