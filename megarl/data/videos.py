"""Videos of prompts: frames, read from rows, counted in tokens, and prepared as the model's video processor does.

A prompt keeps the frames encoded, as in the row; the sampling process decodes them.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from megarl.data.image_files import column_of, decode, encoded_image, size_of
from megarl.data.placeholders import Timestamps
from megarl.data.rows import Row
from megarl.data.video_processor import VideoProcessor
from megarl.hf import hub
from megarl.types import PromptImage, PromptVideo

FPS = 2.0
"""Frames per second of a video that names none: the rate at which Qwen2.5-VL and Qwen3-VL sample videos."""

_HAS_TIMESTAMPS = {"qwen2_5_vl": False, "qwen3_vl": True, "qwen3_vl_moe": True}
"""By `model_type`: the processor writes the time of each time step into the text. Other models read no videos."""

_FRAMES, _RATES = ("frames", "video"), ("fps", "sample_fps")
"""Names in a mapping; the second ones are of verl and qwen_vl_utils."""


@dataclass(frozen=True)
class VideoReader:
    """The model's video processor, loaded at first use. Limits in pixels of each frame; None keeps the processor's limit."""

    directory: str  # of the model
    min_pixels: int | None = None
    max_pixels: int | None = None

    @property
    def token(self) -> int:
        """Id of the video placeholder token.

        Raises:
            ValueError: the model reads no videos.
        """
        return int(_config(self.directory)["video_token_id"])

    @property
    def timestamps(self) -> Timestamps | None:
        """Text of the model's videos; None if the model has one run of placeholders per video and no timestamps.

        Raises:
            ValueError: the model reads no videos.
        """
        config = _config(self.directory)
        if not _HAS_TIMESTAMPS[config["model_type"]]:
            return None
        start, placeholder, end = (config[f"{name}_token_id"] for name in ("vision_start", "video", "vision_end"))
        return Timestamps(self.processor().frames, start, placeholder, end, wrapped=_keeps_wrapper())

    def processor(self) -> VideoProcessor:
        return _load(self)

    def prepare(self, video: PromptVideo) -> list[tuple[int, np.ndarray, list[int], float]]:
        """Return (index of the first placeholder, float32 patches [patches, values per patch], grid, seconds) of each run.

        The grid is time steps, rows and columns of patches; seconds are from time step to time step.

        Raises:
            ValueError: a file has changed or cannot be decoded; names the row.
        """
        processor, runs = self.processor(), len(video.starts)
        frames = [np.asarray(decode(frame)) for frame in video.frames]
        _check_sizes(video.frames, [(frame.shape[1], frame.shape[0]) for frame in frames])
        steps, rows, columns = processor.grid(len(frames), *frames[0].shape[:2])
        tokens = steps * rows * columns // processor.merge**2
        if tokens != video.tokens * runs:
            raise ValueError(
                f"{video.where} takes {tokens} tokens; it took {video.tokens * runs} when its row was read. Do not change the files "
                "of a data set during a run"
            )
        parts = np.split(processor.patches(np.stack(frames)), runs)
        grid, seconds = [steps // runs, rows, columns], processor.frames / video.fps
        return [(start, part, grid, seconds) for start, part in zip(video.starts, parts, strict=True)]


def read_videos(row: Row, file: Path, reader: VideoReader | None) -> tuple[PromptVideo, ...]:
    """Read the headers of all frames in a row's column `videos`. Paths are relative to the folder of `file`.

    Raises:
        ValueError: the column is not a list of videos, a frame cannot be read, or the model reads no videos.
    """
    values = column_of(row, "videos", None if reader is None else lambda: (reader.timestamps, reader.processor()))
    if not values or reader is None:
        return ()
    timestamps, processor, videos = reader.timestamps, reader.processor(), []
    for number, value in enumerate(values):
        where = f"{row.where}, video {number}"
        frames, fps = _frames(value, where, file.absolute().parent)
        sizes = [size_of(frame) for frame in frames]
        _check_sizes(frames, sizes)
        width, height = sizes[0]
        try:
            steps, rows, columns = processor.grid(len(frames), height, width)
        except ValueError as error:
            raise ValueError(f"{where} ({len(frames)} frames of {width} x {height}): {error}") from error
        tokens, runs = steps * rows * columns // processor.merge**2, 1 if timestamps is None else steps
        videos.append(PromptVideo(where, frames, fps, tokens // runs, (0,) * runs))
    return tuple(videos)


def _frames(value: Any, where: str, folder: Path) -> tuple[tuple[PromptImage, ...], float]:
    """Return the frames of a video, and frames per second."""
    fields = {"frames": value}
    if isinstance(value, dict):  # parquet adds fields that a mapping lacks as None
        fields = {name: part for name, part in value.items() if part is not None and (name, part) != ("type", "video")}
    if unknown := sorted(fields.keys() - {*_FRAMES, *_RATES}):
        raise ValueError(
            f"{where} has {', '.join(unknown)}, which videos do not have: write {{frames: [...], fps: 2.0}}"
        )
    frames = [part for name, part in fields.items() if name in _FRAMES]
    rates = [part for name, part in fields.items() if name in _RATES]
    if len(frames) != 1 or not isinstance(frames[0], list) or not frames[0]:
        raise ValueError(
            f"{where} is not a list of frames: write a video file's frames as images first, for example with "
            "ffmpeg -i clip.mp4 -vf fps=2 clip/%04d.jpg, and name these in the row"
        )
    fps = rates[0] if rates else FPS
    if len(rates) > 1 or isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < math.inf:
        raise ValueError(f"{where} has fps {rates}: it must be one number above 0, the frames per second")
    named = (encoded_image(frame, f"{where}, frame {number}", folder) for number, frame in enumerate(frames[0]))
    return tuple(named), float(fps)


def _check_sizes(frames: tuple[PromptImage, ...], sizes: list[tuple[int, int]]) -> None:
    for frame, size in zip(frames, sizes, strict=True):
        if size != sizes[0]:
            (width, height), (first_width, first_height) = size, sizes[0]
            raise ValueError(
                f"{frame.where} has {width} x {height} pixels and frame 0 {first_width} x {first_height}: all frames of a video "
                "must have one size"
            )


@lru_cache(maxsize=4)
def _config(directory: str) -> dict[str, Any]:
    file = Path(hub.local_model(directory, weights=False)) / "config.json"
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if config.get("model_type") not in _HAS_TIMESTAMPS or "video_token_id" not in config:
        raise ValueError(
            f"the model in {directory} ({config.get('model_type')}) reads no videos here. Set model.path to a model of "
            f"{', '.join(_HAS_TIMESTAMPS)}, or use rows without videos"
        )
    return config


@lru_cache(maxsize=4)
def _load(reader: VideoReader) -> VideoProcessor:
    directory = Path(hub.local_model(reader.directory, weights=False))
    return VideoProcessor.load(directory, reader.min_pixels, reader.max_pixels)


def _keeps_wrapper() -> bool:
    """Return True if the installed transformers' Qwen3VLProcessor replaces the placeholder alone (since 5.10) and so keeps the vision
    start and end around a video; it replaced all three before. vLLM follows it in the same way."""
    from transformers import Qwen3VLProcessor

    return hasattr(Qwen3VLProcessor, "replace_video_token")
