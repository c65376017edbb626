"""Images of prompts: read from rows, counted in tokens by their size, and prepared by the model's image processor.

A prompt keeps its images encoded, as in the row. The number of tokens follows from the image size in the file's header.
The sampling process decodes the pixels once, for engine and trainer.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from megarl.data.image_files import column_of, decode, encoded_image, size_of
from megarl.data.rows import Row
from megarl.data.videos import VideoReader
from megarl.hf import hub
from megarl.hf.families import has_tower
from megarl.hf.families.tables.family_table import without_table
from megarl.recipe.data import DataConfig
from megarl.types import Prompt, PromptImage, SampleImages

_PREPARED = {"pixel_values", "image_grid_thw"}
_LOADING = threading.Lock()


@dataclass(frozen=True)
class ImageReader:
    """The model's image processor, loaded at first use. Limits in pixels; None keeps the processor's limit."""

    directory: str  # of the model
    min_pixels: int | None = None
    max_pixels: int | None = None

    @classmethod
    def of(cls, model_path: str, config: DataConfig) -> ImageReader:
        return cls(model_path, config.min_pixels, config.max_pixels)

    @property
    def token(self) -> int:
        """Id of the image placeholder token.

        Raises:
            ValueError: the model reads no images.
        """
        return _image_token(self.directory)

    def tokens(self, width: int, height: int) -> int:
        """Return the placeholder tokens of an image of `width` x `height` pixels. ValueError if the processor rejects it."""
        processor = self._processor()
        return int(processor.get_number_of_image_patches(height, width)) // int(processor.merge_size) ** 2

    @property
    def videos(self) -> VideoReader:
        """Reader of the prompts' videos, with the same limits for each frame."""
        return VideoReader(self.directory, self.min_pixels, self.max_pixels)

    def prepare(self, prompt: Prompt) -> SampleImages | None:
        """Return the vision tower's inputs for the prompt's images and videos; None without any.

        Raises:
            ValueError: a file has changed or cannot be decoded; names the row.
        """
        parts = [(image.start, *self._prepare(image), 0.0) for image in prompt.images]
        parts += [part for video in prompt.videos for part in self.videos.prepare(video)]
        if not parts:
            return None
        starts, pixels, grids, seconds = zip(*sorted(parts, key=lambda part: part[0]), strict=True)
        return SampleImages(
            pixels=np.concatenate(pixels),
            grids=np.array(grids, dtype=np.int64),
            starts=np.array(starts, dtype=np.int64),
            seconds=np.array(seconds) if any(steps > 1 for steps, _, _ in grids) else None,
        )

    @property
    def reads_images(self) -> bool:
        """True if the model has a vision tower."""
        try:
            return self.token >= 0
        except ValueError:
            return False

    def encoded(self, image: bytes, where: str) -> PromptImage:
        """Return an image that is not of a row, with its number of tokens. `where`: for messages.

        Raises:
            ValueError: it is not an image, or the model reads none.
        """
        self.token  # noqa: B018 - raises if the model reads no images
        return _image(image, where, Path(), self)

    def _processor(self) -> Any:
        with _LOADING:  # several threads prepare images
            return _load(self)

    def _prepare(self, image: PromptImage) -> tuple[np.ndarray, list[int]]:
        """Return (float32 [patches, values per patch], grid: 1, rows and columns of patches)."""
        processor = self._processor()
        inputs = processor(images=[decode(image)], return_tensors="np")
        (grid,) = inputs["image_grid_thw"].astype(np.int64)
        tokens = int(grid.prod()) // int(processor.merge_size) ** 2
        if tokens != image.tokens:
            raise ValueError(
                f"{image.where} takes {tokens} tokens; it took {image.tokens} when its header was read. Do not change the "
                "files of a data set during a run"
            )
        return inputs["pixel_values"].astype(np.float32), grid.tolist()


def joined(first: SampleImages | None, second: SampleImages | None, offset: int) -> SampleImages | None:
    """Return the images of both in one sample. `offset`: index, in the sample, of the token at which the starts of `second` begin."""
    if second is None:
        return first
    moved = replace(second, starts=second.starts + offset)
    if first is None:
        return moved
    seconds = None
    if first.seconds is not None or second.seconds is not None:
        seconds = np.concatenate([first.seconds_or_zeros, second.seconds_or_zeros])
    return SampleImages(
        pixels=np.concatenate([first.pixels, moved.pixels]),
        grids=np.concatenate([first.grids, moved.grids]),
        starts=np.concatenate([first.starts, moved.starts]),
        seconds=seconds,
    )


def read_images(row: Row, file: Path, reader: ImageReader | None) -> tuple[PromptImage, ...]:
    """Read the headers of the images in a row's column `images`. Image paths are relative to the folder of `file`.

    Raises:
        ValueError: the column is not a list of images, an image cannot be read, or the model reads no images.
    """
    values = column_of(row, "images", None if reader is None else lambda: reader.token)
    if not values or reader is None:
        return ()
    return tuple(
        _image(value, f"{row.where}, image {number}", file.absolute().parent, reader)
        for number, value in enumerate(values)
    )


def _image(value: Any, where: str, folder: Path, reader: ImageReader) -> PromptImage:
    image = encoded_image(value, where, folder)
    width, height = size_of(image)
    try:
        return replace(image, tokens=reader.tokens(width, height))
    except ValueError as error:
        raise ValueError(f"{where} ({width} x {height}): {error}") from error


@lru_cache(maxsize=4)
def _image_token(directory: str) -> int:
    file = Path(hub.local_model(directory, weights=False)) / "config.json"
    config = without_table(json.loads(file.read_text(encoding="utf-8")))
    if not has_tower(config) or "image_token_id" not in config:
        raise ValueError(
            f"the model in {directory} ({config.get('model_type')}) reads no images: its config.json has no vision_config "
            "and image_token_id. Set model.path to a vision-language model, or use rows without images"
        )
    return int(config["image_token_id"])


@lru_cache(maxsize=4)
def _load(reader: ImageReader) -> Any:
    from transformers import AutoImageProcessor

    try:
        # The Pillow backend even with torchvision installed, so that every machine computes the same values.
        processor = AutoImageProcessor.from_pretrained(
            hub.local_model(reader.directory, weights=False),
            backend="pil",
            trust_remote_code=False,
            local_files_only=True,
        )
    except Exception as error:  # transformers raises whatever its parsers raise
        raise ValueError(f"{reader.directory}: transformers cannot load the image processor: {error}") from error
    if not set(processor.model_input_names) >= _PREPARED or not hasattr(processor, "get_number_of_image_patches"):
        raise ValueError(
            f"{reader.directory} has a {type(processor).__name__}, which is not supported: an image processor must return "
            f"{' and '.join(sorted(_PREPARED))}, as Qwen2-VL's does"
        )
    limits = {"shortest_edge": reader.min_pixels, "longest_edge": reader.max_pixels}
    size = {name: processor.size[name] if limit is None else limit for name, limit in limits.items()}
    if size["shortest_edge"] > size["longest_edge"]:
        raise ValueError(
            f"the smallest image size, {size['shortest_edge']} pixels, is above the largest, {size['longest_edge']} (the "
            "model's image processor sets an unset limit): set both data.min_pixels and data.max_pixels"
        )
    processor.size = size
    return processor
