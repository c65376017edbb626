"""Prompts with videos: token ids, pixel values and grids equal the ones of transformers' processors."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.commands.data.tiny_tokenizer import make_tiny_tokenizer
from megarl.data import PromptDataset, SFTDataset, load_tokenizer
from megarl.data.images import ImageReader
from megarl.data.preferences import PreferenceDataset
from megarl.data.videos import FPS
from megarl.engines.vllm.images import check_images
from megarl.recipe.schema import DataConfig
from tests.data.test_images import dataset, jsonl, parquet, picture, row
from tests.support.vl_model import (
    END,
    MERGE,
    START,
    VIDEO,
    config,
    qwen3_config,
    write_processor,
    write_video_processor,
)

KINDS = {"qwen2_5_vl": "Qwen2VLVideoProcessor", "qwen3_vl": "Qwen3VLVideoProcessor"}
PROCESSORS = {"qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor"}


def write_model(path: Path, kind: str) -> Path:
    """Write config.json, tokenizer, and image and video processor of a tiny model. The tokenizer merges bytes: text before a timestamp
    may become one token with its first sign."""
    path.mkdir()
    make_tiny_tokenizer(path, images=True)
    ids = json.loads((path / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in ids}
    names = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    fields = {f"{name}_token_id": ids[f"<|{token}|>"] for name, token in names.items()}
    written = (config if kind == "qwen2_5_vl" else qwen3_config)()
    for name, value in fields.items():
        setattr(written, name, value)
    written.save_pretrained(path)
    write_video_processor(path, KINDS[kind], 3136, 40_000)
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": MERGE}
    (path / "preprocessor_config.json").write_text(json.dumps({**processor, "min_pixels": 3136, "max_pixels": 40_000}))
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: write_model(folder / kind, kind) for kind in KINDS}


def frames(count: int, width: int, height: int, seed: int = 0) -> list[bytes]:
    return [picture(width, height, seed=100 * seed + number) for number in range(count)]


def arrays(count: int, width: int, height: int, seed: int = 0) -> np.ndarray:
    """The pixels of `frames`, uint8 [count, height, width, 3]."""
    import io

    from PIL import Image

    return np.stack([np.asarray(Image.open(io.BytesIO(data))) for data in frames(count, width, height, seed)])


CONTENT = "Look at this:\n<video> and <image>, then (<video>)"
IMAGES = [(70, 50)]
VIDEOS = [(5, 60, 90, 3.0), (2, 130, 70, 0.7)]  # frames, width, height, frames per second
LIMITS = {"as published": (None, None), "of each frame": (4000, 6000)}


@pytest.fixture(scope="module")
def processed(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    """Outputs of transformers' processors for the prompt of `CONTENT`, and for single videos without text around them."""
    cases: list[Any] = []
    keys: list[tuple[str, str]] = []
    for kind, model in models.items():
        text = load_tokenizer(model).render_text(parts(), True)
        for name, limits in LIMITS.items():
            videos = [arrays(count, width, height, number) for number, (count, width, height, _) in enumerate(VIDEOS)]
            images, rates = [arrays(1, *size)[0] for size in IMAGES], [video[-1] for video in VIDEOS]
            sizes = {len(video): size_of(kind, limits, len(video)) for video in videos}
            if kind == "qwen3_vl" and limits[0] is not None:  # limits of all frames together: one video at a time
                keys += [(kind, f"{name}, video {number}") for number in range(len(videos))]
                alone = "<|vision_start|><|video_pad|><|vision_end|>"
                cases += [
                    (PROCESSORS[kind], str(model), alone, [], [video], [fps], sizes[len(video)])
                    for video, fps in zip(videos, rates, strict=True)
                ]
            else:
                keys.append((kind, name))
                cases.append((PROCESSORS[kind], str(model), text, images, videos, rates, sizes[len(videos[0])]))
    folder = tmp_path_factory.mktemp("transformers")
    (folder / "cases.pickle").write_bytes(pickle.dumps(cases))
    root = Path(__file__).parents[2]
    paths = [str(root)]
    if importlib.util.find_spec("torchvision") is None:
        paths.insert(0, str(root / "tests" / "stand_ins"))
    subprocess.run(
        [sys.executable, "-m", "tests.support.transformers_videos", str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        check=True,
        cwd=root,
    )
    return dict(zip(keys, pickle.loads((folder / "results.pickle").read_bytes()), strict=True))  # noqa: S301 - of this test


def size_of(kind: str, limits: tuple[int | None, int | None], count: int) -> dict[str, int] | None:
    smallest, largest = limits
    if smallest is None or largest is None:
        return None
    if kind == "qwen3_vl":  # of all frames together; the model's limit of 40,000 pixels holds as well
        return {"shortest_edge": smallest * count, "longest_edge": min(40_000, largest * count)}
    return {"shortest_edge": smallest, "longest_edge": largest}


def parts() -> list[dict[str, Any]]:
    first, rest = CONTENT.split("<video>", 1)
    between, rest = rest.split("<image>")
    then, last = rest.split("<video>")
    content = [
        {"type": "text", "text": first}, {"type": "video"}, {"type": "text", "text": between}, {"type": "image"},
        {"type": "text", "text": then}, {"type": "video"}, {"type": "text", "text": last},
    ]  # fmt: skip
    return [{"role": "user", "content": content}]


def prompt_of(tmp_path: Path, model: Path, limits: tuple[int | None, int | None]) -> tuple[Any, ImageReader]:
    reader = ImageReader(str(model), *limits)
    videos = [
        {"frames": frames(count, width, height, number), "fps": fps}
        for number, (count, width, height, fps) in enumerate(VIDEOS)
    ]
    file = parquet(tmp_path, row(CONTENT, [picture(*IMAGES[0])], videos=videos))
    (prompt,) = dataset(file, load_tokenizer(model), reader)
    return prompt, reader


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_is_processed_as_transformers_does(
    tmp_path: Path, models: dict[str, Path], kind: str, processed: dict[tuple[str, str], Any]
) -> None:
    """Five frames, so the last is repeated, and two frames of another size, around an image."""
    prompt, reader = prompt_of(tmp_path, models[kind], LIMITS["as published"])
    expected = processed[kind, "as published"]
    assert list(prompt.tokens) == expected["input_ids"][0]
    prepared = reader.prepare(prompt)
    assert prepared is not None
    check_images(prepared, prompt.tokens, MERGE)
    assert (np.diff(prepared.starts) > 0).all(), "in the order of their tokens"
    types = np.array(expected["mm_token_type_ids"][0])
    runs = [types[start] for start in prepared.starts]
    parts = np.split(prepared.pixels, np.cumsum(prepared.grids.prod(1))[:-1])
    pixels = {
        token: np.concatenate([part for part, run in zip(parts, runs, strict=True) if run == token]) for token in (1, 2)
    }
    np.testing.assert_array_equal(pixels[1], np.asarray(expected["pixel_values"], dtype=np.float32))
    np.testing.assert_array_equal(pixels[2], np.asarray(expected["pixel_values_videos"]))
    grids = prepared.grids[np.array(runs) == 2]
    if kind == "qwen3_vl":
        assert grids[:, 0].tolist() == [1] * 4 and prepared.seconds is None
        grids = np.concatenate([[[3, *grids[0, 1:]]], [grids[3]]])
    else:
        seconds = prepared.seconds[np.array(runs) == 2]  # type: ignore[index]
        np.testing.assert_allclose(seconds, expected["second_per_grid_ts"], rtol=1e-6)
    np.testing.assert_array_equal(grids, np.asarray(expected["video_grid_thw"]))


@pytest.mark.parametrize("kind", KINDS)
def test_pixel_limits_hold_for_each_frame(
    tmp_path: Path, models: dict[str, Path], kind: str, processed: dict[tuple[str, str], Any]
) -> None:
    prompt, reader = prompt_of(tmp_path, models[kind], LIMITS["of each frame"])
    prepared = [np.concatenate([part for _, part, _, _ in reader.videos.prepare(video)]) for video in prompt.videos]
    if kind == "qwen3_vl":
        theirs = [processed[kind, f"of each frame, video {number}"]["pixel_values_videos"] for number in range(2)]
    else:
        theirs = [processed[kind, "of each frame"]["pixel_values_videos"]]
    np.testing.assert_array_equal(np.concatenate(prepared), np.concatenate([np.asarray(values) for values in theirs]))


def test_a_video_becomes_tokens_by_hand(tmp_path: Path) -> None:
    """Three frames of 60 x 60 pixels: two time steps of 2 x 2 tokens. A bare list has 2 frames per second, so steps last 1 s."""
    config().save_pretrained(tmp_path)
    write_processor(tmp_path)
    write_video_processor(tmp_path, "Qwen2VLVideoProcessor", 3136, 40_000)
    reader = ImageReader(str(tmp_path))
    file = parquet(tmp_path, row("w7 <video> w8", None, videos=[frames(3, 60, 60)]))
    (prompt,) = dataset(file, load_tokenizer(tmp_path), reader)
    assert list(prompt.tokens) == [3, 7, START, *[VIDEO] * 8, END, 8, 4, 5]
    (video,) = prompt.videos
    assert (video.fps, video.tokens, video.starts) == (FPS, 8, (3,)) and not prompt.images
    prepared = reader.prepare(prompt)
    assert prepared is not None and prepared.seconds is not None
    assert prepared.grids.tolist() == [[2, 4, 4]] and prepared.seconds.tolist() == [1.0]
    assert len(pickle.dumps(prompt)) < sum(map(len, frames(3, 60, 60))) + 3000, "the encoded frames are sent"


@pytest.mark.parametrize("key", ["video", "frames"])
def test_paths_and_the_keys_of_verl_are_read(tmp_path: Path, models: dict[str, Path], key: str) -> None:
    reader, tokenizer = ImageReader(str(models["qwen3_vl"])), load_tokenizer(models["qwen3_vl"])
    (tmp_path / "clip").mkdir()
    for number, data in enumerate(frames(4, 60, 60)):
        (tmp_path / "clip" / f"{number}.png").write_bytes(data)
    names = [f"clip/{number}.png" for number in range(4)]
    video = {"type": "video", "video": names, "sample_fps": 4} if key == "video" else {"frames": names, "fps": 4}
    (prompt,) = dataset(jsonl(tmp_path, row("<video>", None, videos=[video])), tokenizer, reader)
    whole = {"frames": frames(4, 60, 60), "fps": 4.0}
    (other,) = dataset(parquet(tmp_path, row("<video>", None, videos=[whole])), tokenizer, reader)
    assert prompt.tokens == other.tokens and "<0.1 seconds>" in prompt.text and "<0.6 seconds>" in prompt.text
    ours, theirs = reader.prepare(prompt), reader.prepare(other)
    assert ours is not None and theirs is not None
    np.testing.assert_array_equal(ours.pixels, theirs.pixels)


def test_the_cache_distinguishes_models(tmp_path: Path, models: dict[str, Path]) -> None:
    """One tokenizer for both: only Qwen3-VL's text has timestamps."""
    tokenizer = load_tokenizer(models["qwen2_5_vl"])
    (tmp_path / "a.png").write_bytes(picture(60, 60))
    file = jsonl(tmp_path, *[row("<video>", None, videos=[["a.png"] * 4])] * 1000)
    settings = DataConfig(cache=str(tmp_path / "cache"))
    lengths: dict[str, set[int]] = {}
    for kind, model in models.items():
        for _ in range(2):  # the second time from the cache
            data = PromptDataset([file], tokenizer, settings, images=ImageReader(str(model)))
            lengths.setdefault(kind, set()).update(len(prompt.tokens) for prompt in data)
    assert len(lengths["qwen2_5_vl"]) == len(lengths["qwen3_vl"]) == 1 and lengths["qwen2_5_vl"] != lengths["qwen3_vl"]
    assert len(list((tmp_path / "cache").rglob("*.bin"))) == 2


WRITE = "write a video file's frames as images first, for example with ffmpeg -i clip.mp4"


@pytest.mark.parametrize(
    ("content", "video", "message"),
    [
        ("<video>", "clip.mp4", f"row 0, video 0 is not a list of frames: {WRITE}"),
        ("<video>", b"film", "row 0, video 0 is not a list of frames"),
        ("<video>", {"video": "clip.mp4", "fps": 2.0}, "row 0, video 0 is not a list of frames"),
        ("<video>", [], "row 0, video 0 is not a list of frames"),
        (
            "<video>",
            {"frames": frames(2, 60, 60), "max_pixels": 3136},
            "row 0, video 0 has max_pixels, which videos do not",
        ),
        (
            "<video>",
            {"frames": frames(2, 60, 60), "fps": 0.0},
            r"video 0 has fps \[0.0\]: it must be one number above 0",
        ),
        ("<video>", {"frames": frames(2, 60, 60), "fps": float("inf")}, "it must be one number above 0"),
        ("<video>", {"frames": frames(2, 60, 60), "fps": 1.0, "sample_fps": 2.0}, r"fps \[1.0, 2.0\]: it must be one"),
        ("<video>", frames(2, 60, 60) + frames(1, 60, 61), "video 0, frame 2 has 60 x 61 pixels and frame 0 60 x 60"),
        ("<video>", frames(1, 60, 60), r"video 0 \(1 frames of 60 x 60\): 1 frame, and .* at least 2"),
        ("<video>", frames(2, 6000, 20), r"video 0 \(2 frames of 6000 x 20\): one side is"),
        ("<video>", [*frames(1, 60, 60), b"no image"], "row 0, video 0, frame 1 cannot be read as one of PNG"),
        ("w7", frames(2, 60, 60), "the prompt has 0 <video> and the column 'videos' has 1"),
        ("<video><video>", frames(2, 60, 60), "the prompt has 2 <video> and the column 'videos' has 1"),
        ("<video><image>", frames(2, 60, 60), "the prompt has 1 <image> and the column 'images' has 0"),
        (
            "<video><|video_pad|>",
            frames(2, 60, 60),
            r"row 0: the rendered prompt has 2 video placeholders \(<\|video_pad",
        ),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_invalid_rows_are_refused(
    tmp_path: Path, models: dict[str, Path], content: str, video: Any, message: str
) -> None:
    file = parquet(tmp_path, row(content, [], videos=[video]))
    model = models["qwen3_vl"]
    with pytest.raises(ValueError, match=message):
        dataset(file, load_tokenizer(model), ImageReader(str(model)))


def test_a_placeholder_token_in_the_text_is_refused(tmp_path: Path, models: dict[str, Path]) -> None:
    model = models["qwen2_5_vl"]
    file = parquet(tmp_path, row("<video><|video_pad|>", [], videos=[frames(2, 60, 60)]))
    with pytest.raises(
        ValueError, match=r"the rendered prompt has 2 video placeholders \(token \d+\), and the row has 1 videos"
    ):
        dataset(file, load_tokenizer(model), ImageReader(str(model)))


def test_a_changed_frame_is_named(tmp_path: Path, models: dict[str, Path]) -> None:
    reader = ImageReader(str(models["qwen2_5_vl"]))
    for number, data in enumerate(frames(2, 60, 60)):
        (tmp_path / f"{number}.png").write_bytes(data)
    file = jsonl(tmp_path, row("<video>", None, videos=[["0.png", "1.png"]]))
    (prompt,) = dataset(file, load_tokenizer(models["qwen2_5_vl"]), reader)
    (tmp_path / "1.png").write_bytes(picture(130, 90))
    with pytest.raises(ValueError, match="line 1, video 0, frame 1 has 130 x 90 pixels and frame 0 60 x 60"):
        reader.prepare(prompt)
    (tmp_path / "0.png").write_bytes(picture(130, 90))
    with pytest.raises(ValueError, match="line 1, video 0 takes 15 tokens; it took 4 when its row was read"):
        reader.prepare(prompt)


def test_videos_are_refused_without_template_or_reader(tmp_path: Path, models: dict[str, Path]) -> None:
    model = models["qwen2_5_vl"]
    tokenizer, reader = load_tokenizer(model), ImageReader(str(model))
    file = parquet(tmp_path, row("<video>", None, videos=[frames(2, 60, 60)]))
    with pytest.raises(ValueError, match="row 0: videos need a chat template"):
        dataset(file, tokenizer, reader, chat_template=False)
    with pytest.raises(ValueError, match="row 0 has videos, and no model was named"):
        PromptDataset([file], tokenizer, DataConfig(cache=None))
    messages = [{"role": "user", "content": "<video>"}]
    answers = {"response": "yes", "chosen": "yes", "rejected": "no"}
    both = parquet(tmp_path, {"prompt": messages, **answers, "videos": [frames(2, 60, 60)]})
    for kind in (SFTDataset, PreferenceDataset):
        with pytest.raises(ValueError, match="row 0: column 'videos' is not empty, and demonstrations"):
            kind([both], tokenizer, DataConfig(), 100)
