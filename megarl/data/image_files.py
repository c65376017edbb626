"""Encoded images of rows: pictures, and frames of videos."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.data.rows import Row
from megarl.types import PromptImage

if TYPE_CHECKING:
    from PIL import Image

MAX_PIXELS = 89_478_485  # Pillow's limit, above which Pillow itself only warns
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # not EPS: Pillow runs an external program to read it


def column_of(row: Row, name: str, check: Callable[[], object] | None) -> list[Any]:
    """Return a row's images or videos, from the column of this name; [] without any.

    `check`: raises ValueError if the model does not read them; None: no model was named.

    Raises:
        ValueError: the column is not a list, or the model does not read them.
    """
    values: list[Any] = row.get(name, list) or []
    if values and check is None:
        raise ValueError(f"{row.where} has {name}, and no model was named to read them")
    if values and check is not None:
        try:
            check()
        except ValueError as error:
            raise ValueError(f"{row.where} has {name}: {error}") from error
    return values


def encoded_image(value: Any, where: str, folder: Path) -> PromptImage:
    """Return the image that a row gives as bytes, a path relative to `folder`, or ``{bytes, path}``, with 0 tokens.

    Raises:
        ValueError: `value` is none of these.
    """
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str) and value:
        return PromptImage(where, None, str(folder / value), 0)
    if isinstance(value, bytes) and value:
        return PromptImage(where, value, "", 0)
    raise ValueError(
        f"{where} is empty"
        if value in (b"", "")
        else f"{where} is neither bytes nor a path, nor {{bytes, path}} with one of the two"
    )


def size_of(image: PromptImage) -> tuple[int, int]:
    """Read (width, height) in pixels from the header. Raises ValueError with the image's name."""
    with _open(image) as opened:
        return opened.size


def decode(image: PromptImage) -> Image.Image:
    """Decode the image to RGB. Raises ValueError with the image's name."""
    with _open(image) as opened:
        try:
            return _to_rgb(opened)
        except Exception as error:  # a decoder may raise any exception
            raise ValueError(f"{image.where} cannot be decoded: {error}") from error


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
