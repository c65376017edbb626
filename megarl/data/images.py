"""Images of prompts: found in rows, counted in tokens by their size alone, and prepared by the model's image processor.

A prompt keeps its images as they came, encoded. How many tokens one takes follows from its size, which its first bytes
tell; pixels are made in the process that samples, once, for engine and trainer.
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
from megarl.recipe.data import DataConfig
from megarl.types import Prompt, PromptImage, SampleImages

if TYPE_CHECKING:
    from PIL import Image

PLACEHOLDER = "<image>"  # in a row's text, as verl writes it
LARGEST = 89_478_485  # pixels of an image that is opened: Pillow's own limit, past which it only warns
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # not EPS: Pillow runs a program to read one
_PREPARED = {"pixel_values", "image_grid_thw"}
_LOADING = threading.Lock()


@dataclass(frozen=True)
class ImageReader:
    """The model's image processor, which is loaded when it is first used. Limits in pixels; None: the processor's own."""

    directory: str  # of the model
    min_pixels: int | None = None
    max_pixels: int | None = None

    @classmethod
    def of(cls, model_path: str, config: DataConfig) -> ImageReader:
        return cls(model_path, config.min_pixels, config.max_pixels)

    @property
    def token(self) -> int:
        """Id of the placeholder token.

        Raises:
            ValueError: the model reads no images.
        """
        return _image_token(self.directory)

    def tokens(self, width: int, height: int) -> int:
        """Placeholder tokens of an image of so many pixels. Raises ValueError for one that the processor refuses."""
        processor = self._processor()
        return int(processor.get_number_of_image_patches(height, width)) // int(processor.merge_size) ** 2

    def prepare(self, prompt: Prompt) -> SampleImages | None:
        """What the vision tower reads of the prompt's images; None where it has none.

        Raises:
            ValueError: with the row, for a file that has changed or cannot be decoded.
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
        with _LOADING:  # threads that prepare images want it at once
            return _load(self)

    def _prepare(self, processor: Any, image: PromptImage) -> tuple[np.ndarray, np.ndarray]:
        """float32 [patches, numbers of a patch], int64 [1, 3]."""
        with _opened(image) as opened:
            try:
                pixels = _in_colour(opened)
            except Exception as error:  # a decoder raises whatever its library does
                raise ValueError(f"{image.where} cannot be decoded: {error}") from error
        made = processor(images=[pixels], return_tensors="np")
        grid = made["image_grid_thw"].astype(np.int64)
        tokens = int(grid.prod()) // int(processor.merge_size) ** 2
        if tokens != image.tokens:
            raise ValueError(
                f"{image.where} takes {tokens} tokens; it took {image.tokens} when its row was read. Leave the files "
                "of a data set as they are while a run lasts"
            )
        return made["pixel_values"].astype(np.float32), grid


def images_of(row: Row, file: Path, reader: ImageReader | None) -> tuple[PromptImage, ...]:
    """The images of a row's column `images`; every one's header has been read. `file` is the row's, to which paths are
    relative.

    Raises:
        ValueError: the column holds something else, an image cannot be read, or there is no model that reads images.
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
        reader.token  # noqa: B018 - that there is one
    except ValueError as error:
        raise ValueError(f"{row.where} has images: {error}") from error
    return tuple(
        _image(value, f"{row.where}, image {number}", file.absolute().parent, reader)
        for number, value in enumerate(values)
    )


def with_image_parts(row: Row, messages: Sequence[dict[str, Any]], chat_template: bool) -> list[dict[str, Any]]:
    """The messages of a row with images as chat templates take them: each `<image>` of a text becomes a part of its own.

    `row` has the number of its images in the column `images`. Contents that are lists of parts stay as they are.

    Raises:
        ValueError: there is no chat template, or there are not as many placeholders as images.
    """
    count = row.get("images", int)
    if count is None:
        return list(messages)
    given = [{**message, "content": _parts(message["content"])} for message in messages] if count else list(messages)
    placeholders = sum(_placeholders(message["content"]) for message in given)
    if placeholders != count:
        raise ValueError(
            f"{row.where}: the prompt has {placeholders} {PLACEHOLDER} and the column 'images' has {count}: each image "
            f"needs one {PLACEHOLDER}, where it belongs in the text"
        )
    if count and not chat_template:
        raise ValueError(f"{row.where}: images are written by a chat template: set data.chat_template: true")
    return given


def expanded(
    row: Row, text: Encoded, images: Sequence[PromptImage], token: int
) -> tuple[Encoded, tuple[PromptImage, ...]]:
    """A prompt in which each image's single placeholder has become as many as the image takes; the images with the
    places of theirs.

    Raises:
        ValueError: the rendered prompt does not have one placeholder an image.
    """
    places = np.flatnonzero(text.tokens == token)
    if len(places) != len(images):
        raise ValueError(
            f"{row.where}: {len(places)} tokens of the rendered prompt are the model's placeholder of an image "
            f"(number {token}), and the row has {len(images)} images. A text must not write it, and the chat template "
            "has to write one for each image"
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
    with _opened(image) as opened:
        width, height = opened.size
    try:
        return replace(image, tokens=reader.tokens(width, height))
    except ValueError as error:
        raise ValueError(f"{where} ({width} x {height}): {error}") from error


def _opened(image: PromptImage) -> Image.Image:
    """The image, of which no more than the header has been read. Raises ValueError, which names it."""
    from PIL import Image

    try:
        opened = Image.open(io.BytesIO(image.data) if image.data is not None else image.path, formats=_FORMATS)
    except FileNotFoundError as error:
        raise ValueError(f"{image.where}: there is no file {image.path}") from error
    except Exception as error:  # a header may raise anything of its format's
        said = f"{type(error).__name__}: {error}" if image.data is None else type(error).__name__
        raise ValueError(f"{image.where} cannot be read as one of {', '.join(_FORMATS)} ({said})") from error
    width, height = opened.size
    if width * height > LARGEST:
        opened.close()
        raise ValueError(f"{image.where} has {width} x {height} pixels; more than {LARGEST:,} are not opened")
    return opened


def _in_colour(image: Image.Image) -> Image.Image:
    """RGB; what is transparent becomes white, as in verl: black lines on nothing would else vanish."""
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
    # Parquet gives every part the fields of all others, as None.
    return [{name: value for name, value in part.items() if value is not None} for part in content]


def _placeholders(content: Any) -> int:
    if isinstance(content, str):
        return content.count(PLACEHOLDER)
    return sum(part.get("type") == "image" for part in content if isinstance(part, dict))


@lru_cache(maxsize=4)
def _image_token(directory: str) -> int:
    config = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
    if "vision_config" not in config or "image_token_id" not in config:
        raise ValueError(
            f"the model in {directory} ({config.get('model_type')}) reads none: its config.json has no vision_config "
            "and image_token_id. Name a vision-language model in model.path, or rows without images"
        )
    return int(config["image_token_id"])


@lru_cache(maxsize=4)
def _load(reader: ImageReader) -> Any:
    from transformers import AutoImageProcessor

    try:
        # Pillow's, wherever torchvision may be: an image is the same numbers on every machine.
        found = AutoImageProcessor.from_pretrained(
            reader.directory, backend="pil", trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # transformers raises whatever its parsers raise
        raise ValueError(f"{reader.directory}: transformers cannot load the image processor: {error}") from error
    if not set(found.model_input_names) >= _PREPARED or not hasattr(found, "get_number_of_image_patches"):
        raise ValueError(
            f"{reader.directory} has a {type(found).__name__}: image processors that make "
            f"{' and '.join(sorted(_PREPARED))}, as Qwen2-VL's does, are the ones that can be used"
        )
    limits = {"shortest_edge": reader.min_pixels, "longest_edge": reader.max_pixels}
    size = {name: found.size[name] if limit is None else limit for name, limit in limits.items()}
    if size["shortest_edge"] > size["longest_edge"]:
        raise ValueError(
            f"images are to have {size['shortest_edge']} pixels at least and {size['longest_edge']} at most, with what "
            "the model's image processor says: set both data.min_pixels and data.max_pixels"
        )
    found.size = size
    return found
