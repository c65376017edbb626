"""Placeholders of images and videos: `<image>` and `<video>` in a row's text, and placeholder tokens in a prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megarl.data.cache import Encoded
from megarl.data.rows import Row
from megarl.data.tokenizer import Tokenizer
from megarl.types import PromptImage, PromptVideo

IMAGE, VIDEO = "<image>", "<video>"  # in a row's text, as in verl
_COLUMNS = {"image": "images", "video": "videos"}  # of the parts of a message
_ADVICE = "The text must not contain this token, and the chat template must write one for each"


@dataclass(frozen=True)
class Pictures:
    """Images and videos of a prompt, each in the order of their placeholders."""

    images: tuple[PromptImage, ...] = ()
    videos: tuple[PromptVideo, ...] = ()


@dataclass(frozen=True)
class Timestamps:
    """The text of a video with timestamps. Each time step has its own time and placeholders, as in Qwen3-VL:
    ``<0.2 seconds><|vision_start|><|video_pad|><|vision_end|>``.

    `wrapped`: the whole video keeps the vision start and end that the chat template writes around it.
    """

    frames: int  # in a time step
    start: int  # token ids of vision start, of the placeholder and of vision end
    placeholder: int
    end: int
    wrapped: bool

    def write(self, text: str, videos: Sequence[tuple[int, float]], tokenizer: Tokenizer) -> str:
        """Return the rendered prompt with the timestamps of its `videos`: (number of frames, frames per second) of each.

        Raises:
            ValueError: `text` does not have exactly one placeholder per video.
        """
        start, placeholder, end = (
            tokenizer.decode([x], special=True) for x in (self.start, self.placeholder, self.end)
        )
        pieces = text.split(placeholder if self.wrapped else start + placeholder + end)
        if len(pieces) != len(videos) + 1:
            raise ValueError(
                f"the rendered prompt has {len(pieces) - 1} video placeholders ({placeholder}), and the row has {len(videos)} "
                f"videos. {_ADVICE} video"
            )
        written = [
            "".join(f"<{time:.1f} seconds>{start}{placeholder}{end}" for time in self.times(*video)) for video in videos
        ]
        return "".join(piece + video for piece, video in zip(pieces, [*written, ""], strict=True))

    def times(self, frames: int, fps: float) -> list[float]:
        """Return the middle between the first and the last frame of each time step, in seconds. The last frame fills the last step."""
        seconds = [min(i, frames - 1) / fps for i in range(frames + -frames % self.frames)]
        return [(seconds[i] + seconds[i + self.frames - 1]) / 2 for i in range(0, len(seconds), self.frames)]


def with_picture_parts(row: Row, messages: Sequence[dict[str, Any]], chat_template: bool) -> list[dict[str, Any]]:
    """Convert messages for chat templates: each `<image>` and `<video>` in a text becomes a part of its kind.

    `row` has the number of its images in the column `images`, and an entry per video in `videos`. Placeholders of an absent column are
    text. Contents that are lists of parts stay unchanged.

    Raises:
        ValueError: the chat template is off, or the row has a different number of placeholders than of images or videos.
    """
    images, videos = row.get("images", int), row.get("videos", list)
    counts = {"image": images, "video": None if videos is None else len(videos)}
    present = [kind for kind, count in counts.items() if count]
    converted = list(messages)
    if present:
        converted = [{**message, "content": _parts(message["content"], present)} for message in messages]
    for kind, count in counts.items():
        placeholders = sum(_placeholders(message["content"], kind) for message in messages)
        if count is not None and placeholders != count:
            raise ValueError(
                f"the prompt has {placeholders} <{kind}> and the column {_COLUMNS[kind]!r} has {count}: each {kind} "
                f"needs one <{kind}>, where it belongs in the text"
            )
    if present and not chat_template:
        raise ValueError(f"{_COLUMNS[present[0]]} need a chat template: set data.chat_template: true")
    return converted


def expand_placeholders(
    row: Row, text: Encoded, pictures: Pictures, tokens: Mapping[str, int]
) -> tuple[Encoded, Pictures]:
    """Repeat each placeholder token to the tokens of its image, or of its run of a video; return the pictures with their start
    indices.

    `tokens`: placeholder ids by kind, "image" and "video".

    Raises:
        ValueError: the rendered prompt does not have exactly one placeholder per image, or per run of a video.
    """
    sizes = {
        "image": [image.tokens for image in pictures.images],
        "video": [video.tokens for video in pictures.videos for _ in video.starts],
    }
    counts = np.ones(len(text.tokens), dtype=np.int64)
    places = {kind: np.flatnonzero(text.tokens == token) for kind, token in tokens.items()}
    for kind, at in places.items():
        if len(at) != len(sizes[kind]):
            raise ValueError(
                f"{row.where}: the rendered prompt has {len(at)} {kind} placeholders (token {tokens[kind]}), and the row has "
                f"{len(sizes[kind])} {_COLUMNS[kind]}. {_ADVICE} {kind}"
            )
        counts[at] = sizes[kind]
    starts = np.cumsum(counts) - counts
    of_kind = {kind: iter(starts[at].tolist()) for kind, at in places.items()}
    placed = Pictures(
        tuple(replace(image, start=next(of_kind["image"])) for image in pictures.images),
        tuple(replace(video, starts=tuple(next(of_kind["video"]) for _ in video.starts)) for video in pictures.videos),
    )
    return Encoded(text.tokens.repeat(counts), text.loss_mask.repeat(counts), text.text), placed


def _parts(content: Any, kinds: Sequence[str]) -> list[dict[str, Any]]:
    if isinstance(content, str):
        pieces = [piece for piece in re.split(f"(<(?:{'|'.join(kinds)})>)", content) if piece]
        markers = {f"<{kind}>": {"type": kind} for kind in kinds}
        return [markers.get(piece, {"type": "text", "text": piece}) for piece in pieces]
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise ValueError(f"a message's content is {content!r}, neither text nor a list of parts")
    # Parquet adds fields that a part lacks as None.
    return [{name: value for name, value in part.items() if value is not None} for part in content]


def _placeholders(content: Any, kind: str) -> int:
    if isinstance(content, str):
        return content.count(f"<{kind}>")
    return sum(part.get("type") == kind for part in content if isinstance(part, dict))
