"""Sizes, patches and settings of video processors, against transformers and by hand."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.data import load_tokenizer
from megarl.data.images import ImageReader
from megarl.data.placeholders import Timestamps
from megarl.data.video_processor import VideoProcessor
from megarl.data.videos import VideoReader
from tests.data.test_images import dataset, parquet, row
from tests.data.test_videos import frames, write_model
from tests.support.vl_model import PATCH_VALUES


def test_resized_frames_are_torchvisions() -> None:
    """The digest is of torchvision 0.28's resize of these frames, 77 x 101 to 84 x 112 pixels."""
    video = np.random.default_rng(7).integers(0, 256, (2, 101, 77, 3), dtype=np.uint8)
    processor = VideoProcessor(14, 2, 2, 3136, 40_000, False, (0.0,) * 3, (1.0,) * 3, 1 / 255)
    patches = processor.patches(video)
    assert processor.grid(2, 101, 77) == (1, 8, 6) and patches.shape == (48, PATCH_VALUES)
    resized = np.rint(patches * 255).astype(np.uint8)
    assert blake2b(resized.tobytes(), digest_size=8).hexdigest() == "9fa3d4d7bf598211"


SHAPES = [
    (1, 28, 28),
    (2, 28, 28),
    (3, 41, 43),
    (4, 130, 90),
    (5, 9, 150),
    (5, 90, 100),
    (2, 500, 30),
    (7, 700, 900),
    (6, 2000, 11),
]


@pytest.mark.parametrize("limits", [(3136, 40_000), (200_000, 400_000), (3136, 3136)])
def test_sizes_equal_transformers(limits: tuple[int, int]) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as of_each_frame
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as of_all_frames

    each, together = (
        VideoProcessor(14, 2, 2, *limits, of_all, (0.5,) * 3, (0.5,) * 3, 1 / 255) for of_all in (False, True)
    )
    for count, height, width in SHAPES:
        high, wide = of_each_frame(height, width, 28, *limits)
        assert each.grid(count, height, width) == (-(-count // 2), high // 14, wide // 14)
        if count > 1:
            high, wide = of_all_frames(count, height, width, 2, 28, *limits)
            assert together.grid(count, height, width) == (-(-count // 2), high // 14, wide // 14)


def test_limits_of_the_recipe_and_of_the_model() -> None:
    """`data.max_pixels` replaces Qwen2.5-VL's limit of a frame. Qwen3-VL's limit of all frames holds as well."""

    def grid(of_all: bool, largest: int, max_pixels: int | None) -> tuple[int, int, int]:
        processor = VideoProcessor(14, 2, 2, 3136, largest, of_all, (0.5,) * 3, (0.5,) * 3, 1 / 255, None, max_pixels)
        return processor.grid(4, 280, 280)

    assert grid(False, 20_000, 80_000) == grid(False, 80_000, None) == (2, 20, 20)
    assert grid(True, 80_000, 80_000) == grid(True, 80_000, None) == (2, 10, 10)
    assert grid(True, 800_000, 20_000) == grid(True, 80_000, None)


def test_the_last_frame_fills_the_last_time_step() -> None:
    """By hand, at 2 frames per second: 5 frames are at 0, 0.5, 1, 1.5 and 2 s, and the last step has the last frame twice."""
    assert Timestamps(2, 1, 2, 3, wrapped=False).times(5, 2.0) == [0.25, 1.25, 2.0]
    assert Timestamps(2, 1, 2, 3, wrapped=False).times(2, 4.0) == [0.125]
    video = np.random.default_rng(0).integers(0, 256, (3, 56, 56, 3), dtype=np.uint8)
    processor = VideoProcessor(14, 2, 2, 3136, 40_000, False, (0.5,) * 3, (0.5,) * 3, 1 / 255)
    four = np.concatenate([video, video[-1:]])
    np.testing.assert_array_equal(processor.patches(video), processor.patches(four))
    assert processor.patches(video)[0, :4].tolist() == pytest.approx((video[0, 0, :4, 0] / 127.5 - 1).tolist())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"video_processor_type": "LlavaVideoProcessor"},
            "'LlavaVideoProcessor', which is not supported. Supported: Qwen2VL",
        ),
        (
            {"cap_pixels_per_frame": True},
            "cap_pixels_per_frame: True, which is not supported for videos; only False is",
        ),
        ({"resample": 2}, "resample: 2, which is not supported for videos; only 3 is"),
        ({"size": {"shortest_edge": 50_000, "longest_edge": 40_000}}, "50000 pixels, is above the largest, 40000"),
    ],
)
def test_unsupported_video_processors_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    model = tmp_path / "model"
    write_model(model, "qwen2_5_vl")
    file = model / "video_preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    rows = parquet(tmp_path, row("<video>", None, videos=[frames(2, 60, 60)]))
    with pytest.raises(ValueError, match=message):
        dataset(rows, load_tokenizer(model), ImageReader(str(model)))


def test_the_settings_of_older_models_are_in_the_image_processors_file(tmp_path: Path) -> None:
    """Qwen2.5-VL has one file for both. Without any file, or for another model, videos are refused."""
    model = write_model(tmp_path / "model", "qwen2_5_vl")
    (model / "video_preprocessor_config.json").unlink()
    processor = VideoReader(str(model)).processor()
    assert (processor.smallest, processor.largest, processor.of_all_frames) == (3136, 40_000, False)
    (model / "preprocessor_config.json").unlink()
    with pytest.raises(ValueError, match=r"has no video processor: none of processor_config\.json"):
        VideoReader(str(model), 1).processor()
    text = tmp_path / "text"
    text.mkdir()
    (text / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ValueError, match=r"the model in .* \(qwen3\) reads no videos here"):
        VideoReader(str(text)).token  # noqa: B018 - raises
