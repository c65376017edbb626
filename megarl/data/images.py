"""Images of prompts: read from rows, counted in tokens by their size, and prepared by the model's image processor.

A prompt keeps its images encoded, as in the row. The number of tokens follows from the image size in the file's header.
The sampling process decodes the pixels once, for engine and trainer.
"""

from __future__ import annotations

import io
import json
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.data.cache import Encoded
from megarl.data.rows import Row
from megarl.hf import hub
from megarl.hf.families import has_tower
from megarl.recipe.data import DataConfig
from megarl.types import Prompt, PromptImage, SampleImages

if TYPE_CHECKING:
    from PIL import Image

PLACEHOLDER = "<image>"  # in a row's text, as in verl
MAX_PIXELS = 89_478_485  # Pillow's limit, above which Pillow itself only warns
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # not EPS: Pillow runs an external program to read it
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

    def prepare(self, prompt: Prompt) -> SampleImages | None:
        """Return the vision tower's inputs for the prompt's images; None without images.

        Raises:
            ValueError: a file has changed or cannot be decoded; names the row.
        """
        if not prompt.images:
            return None
        processor = self._processor()
        prepared = [self._prepare(processor, image) for image in prompt.images]
        return SampleImages(
            pixels=np.concatenate([pixels for pixels, _ in prepared]),
            grids=np.concatenate([grid for _, grid in prepared]),
            starts=np.array([image.start for image in prompt.images], dtype=np.int64),
        )

    def _processor(self) -> Any:
        with _LOADING:  # several threads prepare images
            return _load(self)

    def _prepare(self, processor: Any, image: PromptImage) -> tuple[np.ndarray, np.ndarray]:
        """Return (float32 [patches, values per patch], int64 [1, 3])."""
        with _open(image) as opened:
            try:
                pixels = _to_rgb(opened)
            except Exception as error:  # a decoder may raise any exception
                raise ValueError(f"{image.where} cannot be decoded: {error}") from error
        inputs = processor(images=[pixels], return_tensors="np")
        grid = inputs["image_grid_thw"].astype(np.int64)
        tokens = int(grid.prod()) // int(processor.merge_size) ** 2
        if tokens != image.tokens:
            raise ValueError(
                f"{image.where} takes {tokens} tokens; it took {image.tokens} when its row was read. Do not change the "
                "files of a data set during a run"
            )
        return inputs["pixel_values"].astype(np.float32), grid


def read_images(row: Row, file: Path, reader: ImageReader | None) -> tuple[PromptImage, ...]:
    """Read the headers of the images in a row's column `images`. Image paths are relative to the folder of `file`.

    Raises:
        ValueError: the column is not a list of images, an image cannot be read, or the model reads no images.
    """
    if row.values.get("videos"):
        raise ValueError(
            f"{row.where}: column 'videos' is not empty, and videos cannot be read yet. Leave such rows out"
        )
    values = row.get("images", list) or []
    if not values:
        return ()
    if reader is None:
        raise ValueError(f"{row.where} has images, and no model was named to read them")
    try:
        reader.token  # noqa: B018 - raises if the model reads no images
    except ValueError as error:
        raise ValueError(f"{row.where} has images: {error}") from error
    return tuple(
        _image(value, f"{row.where}, image {number}", file.absolute().parent, reader)
        for number, value in enumerate(values)
    )


def with_image_parts(row: Row, messages: Sequence[dict[str, Any]], chat_template: bool) -> list[dict[str, Any]]:
    """Convert messages for chat templates: each `<image>` in a text becomes an image part.

    `row` has the number of its images in the column `images`. Contents that are lists of parts stay unchanged.

    Raises:
        ValueError: the chat template is off, or the row has a different number of placeholders than of images.
    """
    count = row.get("images", int)
    if count is None:
        return list(messages)
    messages = [{**message, "content": _parts(message["content"])} for message in messages] if count else list(messages)
    placeholders = sum(_placeholders(message["content"]) for message in messages)
    if placeholders != count:
        raise ValueError(
            f"the prompt has {placeholders} {PLACEHOLDER} and the column 'images' has {count}: each image "
            f"needs one {PLACEHOLDER}, where it belongs in the text"
        )
    if count and not chat_template:
        raise ValueError("images need a chat template: set data.chat_template: true")
    return messages


def expand_placeholders(
    row: Row, text: Encoded, images: Sequence[PromptImage], token: int
) -> tuple[Encoded, tuple[PromptImage, ...]]:
    """Repeat each image's placeholder `token` to the image's number of tokens; return the images with their start indices.

    Raises:
        ValueError: the rendered prompt does not have exactly one placeholder per image.
    """
    places = np.flatnonzero(text.tokens == token)
    if len(places) != len(images):
        raise ValueError(
            f"{row.where}: the rendered prompt has {len(places)} image placeholders (token {token}), and the row has "
            f"{len(images)} images. The text must not contain this token, and the chat template must write one for each image"
        )
    counts = np.ones(len(text.tokens), dtype=np.int64)
    counts[places] = [image.tokens for image in images]
    starts = (np.cumsum(counts) - counts)[places].tolist()
    placed = tuple(replace(image, start=start) for image, start in zip(images, starts, strict=True))
    return Encoded(text.tokens.repeat(counts), text.loss_mask.repeat(counts), text.text), placed


def _image(value: Any, where: str, folder: Path, reader: ImageReader) -> PromptImage:
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str) and value:
        image = PromptImage(where, None, str(folder / value), 0)
    elif isinstance(value, bytes) and value:
        image = PromptImage(where, value, "", 0)
    else:
        raise ValueError(f"{where} is neither bytes nor a path, nor {{bytes, path}} with one of the two")
    with _open(image) as opened:
        width, height = opened.size
    try:
        return replace(image, tokens=reader.tokens(width, height))
    except ValueError as error:
        raise ValueError(f"{where} ({width} x {height}): {error}") from error


def _open(image: PromptImage) -> Image.Image:
    """Open the image, which reads only its header. Raises ValueError with the image's name."""
    from PIL import Image

    try:
        opened = Image.open(io.BytesIO(image.data) if image.data is not None else image.path, formats=_FORMATS)
    except FileNotFoundError as error:
        raise ValueError(f"{image.where}: no such file {image.path}") from error
    except Exception as error:  # a format's parser may raise any exception
        cause = f"{type(error).__name__}: {error}" if image.data is None else type(error).__name__
        raise ValueError(f"{image.where} cannot be read as one of {', '.join(_FORMATS)} ({cause})") from error
    width, height = opened.size
    if width * height > MAX_PIXELS:
        opened.close()
        raise ValueError(f"{image.where} has {width} x {height} pixels; more than {MAX_PIXELS:,} are not opened")
    return opened


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert to RGB on a white background, as verl does: black lines on a transparent one would vanish."""
    from PIL import Image

    if image.has_transparency_data:
        image = image.convert("RGBA")
        page = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(page, image).convert("RGB")
    return image.convert("RGB")


def _parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        pieces = [piece for piece in re.split(f"({PLACEHOLDER})", content) if piece]
        return [{"type": "image"} if piece == PLACEHOLDER else {"type": "text", "text": piece} for piece in pieces]
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise ValueError(f"a message's content is {content!r}, neither text nor a list of parts")
    # Parquet adds fields that a part lacks as None.
    return [{name: value for name, value in part.items() if value is not None} for part in content]


def _placeholders(content: Any) -> int:
    if isinstance(content, str):
        return content.count(PLACEHOLDER)
    return sum(part.get("type") == "image" for part in content if isinstance(part, dict))


@lru_cache(maxsize=4)
def _image_token(directory: str) -> int:
    config = json.loads((Path(hub.local_model(directory, weights=False)) / "config.json").read_text(encoding="utf-8"))
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
