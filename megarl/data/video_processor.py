"""The video processors of Qwen2.5-VL and Qwen3-VL: the size, the patches and the grid of a video's frames.

transformers 5.19 has them as Qwen2VLVideoProcessor and Qwen3VLVideoProcessor, which need torchvision. The resize here is torch's, which
torchvision calls for 8-bit frames (bicubic, antialiased), so the values are the same.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_FILES = (
    ("processor_config.json", "video_processor"),
    ("video_preprocessor_config.json", None),
    ("preprocessor_config.json", None),
)
"""(file, its section) with the settings; the first that exists counts, as in transformers."""

_CLIP_MEAN, _CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
_DEFAULTS: dict[str, dict[str, Any]] = {
    "Qwen2VLVideoProcessor": {
        "patch_size": 14, "image_mean": _CLIP_MEAN, "image_std": _CLIP_STD,
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28},
    },
    "Qwen3VLVideoProcessor": {
        "patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32},
    },
}  # fmt: skip
"""Settings of each class that a model's files may leave out."""

_FIXED = {
    "do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True, "resample": 3,
    "cap_pixels_per_frame": False,
}  # fmt: skip
"""The only values of these settings that are supported; 3: bicubic."""


@dataclass(frozen=True)
class VideoProcessor:
    """Settings of a model's video processor. Limits count pixels."""

    patch: int  # pixels per side of a patch
    merge: int  # patches per side of the square that becomes one token
    frames: int  # in a time step (temporal patch)
    smallest: int
    largest: int
    of_all_frames: (
        bool  # `smallest` and `largest` hold for all frames of a video together (Qwen3-VL), not for each (Qwen2.5-VL)
    )
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    scale: float  # of 8-bit values, before `mean` and `deviation`
    min_pixels: int | None = None  # of each frame, from the recipe
    max_pixels: int | None = None

    @classmethod
    def load(cls, directory: Path, min_pixels: int | None, max_pixels: int | None) -> VideoProcessor:
        """Read the settings from the files of the model in `directory`.

        Raises:
            ValueError: no file has them, or they name another class or something that is not supported here.
        """
        file, values = _read(directory)
        name = str(values.get("video_processor_type") or values.get("image_processor_type", ""))
        name = name.removesuffix("Fast").replace("ImageProcessor", "VideoProcessor")
        if name not in _DEFAULTS:
            raise ValueError(
                f"{file} names the video processor {name!r}, which is not supported. Supported: {', '.join(_DEFAULTS)}"
            )
        values = {key: value for key, value in values.items() if value is not None}
        for key, supported in _FIXED.items():
            if values.get(key, supported) != supported:
                raise ValueError(
                    f"{file} has {key}: {values[key]!r}, which is not supported for videos; only {supported!r} is"
                )
        settings = _DEFAULTS[name] | values
        size = _size(name, settings)
        return cls(
            patch=settings["patch_size"],
            merge=settings.get("merge_size", 2),
            frames=settings.get("temporal_patch_size", 2),
            smallest=size["shortest_edge"],
            largest=size["longest_edge"],
            of_all_frames=name == "Qwen3VLVideoProcessor",
            mean=tuple(settings["image_mean"]),
            deviation=tuple(settings["image_std"]),
            scale=settings.get("rescale_factor", 1 / 255),
            min_pixels=min_pixels,
            max_pixels=max_pixels,
        )

    def grid(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Return time steps, rows and columns of patches of a video.

        Raises:
            ValueError: too few frames, sides that differ too much, or limits that contradict each other.
        """
        height, width = self._resized(frames, height, width)
        return -(-frames // self.frames), height // self.patch, width // self.patch

    def patches(self, video: np.ndarray) -> np.ndarray:
        """Return the patches of `video`, float32 [patches, values per patch], step by step and square by square.

        `video`: uint8 [frames, height, width, 3]. The last frame is repeated until the frames fill the time steps.
        """
        import torch

        count, height, width, channels = video.shape
        steps, rows, columns = self.grid(count, height, width)
        frames = torch.nn.functional.interpolate(
            torch.from_numpy(video).permute(0, 3, 1, 2).contiguous(),
            (rows * self.patch, columns * self.patch),
            mode="bicubic",
            antialias=True,
        )
        mean, deviation = (torch.tensor(values) * (1.0 / self.scale) for values in (self.mean, self.deviation))
        frames = (frames.float() - mean[:, None, None]) / deviation[:, None, None]
        frames = torch.cat([frames, frames[-1:].expand(steps * self.frames - count, -1, -1, -1)])
        frames = frames.view(
            steps, self.frames, channels, rows // self.merge, self.merge, self.patch, columns // self.merge, self.merge, self.patch
        )  # fmt: skip
        values: np.ndarray = frames.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(steps * rows * columns, -1).numpy()
        return values

    def _resized(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Return the height and width to which frames are resized: multiples of a token's side, within the limits."""
        unit = self.patch * self.merge
        counted = frames if self.of_all_frames else 1  # frames that count towards the limits
        rounded = counted
        if self.of_all_frames:
            if frames < self.frames:
                raise ValueError(f"{frames} frame, and the model's videos have at least {self.frames}")
            rounded = round(frames / self.frames) * self.frames
            if min(height, width) < unit:
                scale = max(unit / height, unit / width)
                height, width = int(height * scale), int(width * scale)
        smallest, largest = self._limits(counted)
        if max(height, width) / min(height, width) > 200:
            raise ValueError(
                f"one side is {max(height, width) / min(height, width):.0f} times the other; at most 200 times"
            )
        high, wide = round(height / unit) * unit, round(width / unit) * unit
        if rounded * high * wide > largest:
            ratio = math.sqrt(counted * height * width / largest)
            high, wide = (max(unit, math.floor(side / ratio / unit) * unit) for side in (height, width))
        elif rounded * high * wide < smallest:
            ratio = math.sqrt(smallest / (counted * height * width))
            high, wide = (math.ceil(side * ratio / unit) * unit for side in (height, width))
        return high, wide

    def _limits(self, counted: int) -> tuple[int, int]:
        smallest = self.smallest if self.min_pixels is None else self.min_pixels * counted
        largest = self.largest if self.max_pixels is None else self.max_pixels * counted
        if self.of_all_frames:
            largest = min(self.largest, largest)
        if smallest > largest:
            of = f"{counted} frames" if self.of_all_frames else "a frame"
            raise ValueError(
                f"the smallest size of {of}, {smallest} pixels, is above the largest, {largest} (the model's video processor sets an "
                "unset limit): set both data.min_pixels and data.max_pixels"
            )
        return smallest, largest


def _read(directory: Path) -> tuple[Path, dict[str, Any]]:
    for name, section in _FILES:
        if (file := directory / name).is_file():
            values = json.loads(file.read_text(encoding="utf-8"))
            if section is None or section in values:
                return file, values if section is None else values[section]
    raise ValueError(
        f"{directory} has no video processor: none of {', '.join(name for name, _ in _FILES)} has its settings"
    )


def _size(name: str, settings: dict[str, Any]) -> dict[str, int]:
    size = dict(settings["size"])
    if name == "Qwen2VLVideoProcessor":  # the names of published files of Qwen2.5-VL
        older = {"shortest_edge": settings.get("min_pixels"), "longest_edge": settings.get("max_pixels")}
        size |= {edge: value for edge, value in older.items() if value is not None}
    return size
