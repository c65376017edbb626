"""Data set of the prompts for RL training and evaluation."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megarl.data.cache import Encoded
from megarl.data.dataset import Files, RowDataset
from megarl.data.encode import Encode
from megarl.data.images import ImageReader, read_images
from megarl.data.placeholders import Pictures, Timestamps, expand_placeholders, with_picture_parts
from megarl.data.rows import Row, messages_of, text_of
from megarl.data.tokenizer import Tokenizer
from megarl.data.videos import read_videos
from megarl.errors import cut_end
from megarl.hf import hub
from megarl.recipe.schema import DataConfig
from megarl.types import Prompt

COLUMNS = ("data_source", "reward_model", "extra_info", "images", "videos")  # all except the prompt
SCORED_BY_ROW = ("data_source", "reward_model")  # columns needed if the row's data source selects the scorer
AGENT_NAME, TOOL_AGENT = "agent_name", "tool_agent"
"""Column of verl with the agent loop of a row, and the loop that passes tools."""


def layout_of(needed: Sequence[str]) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return (layouts, optional columns) of prompt rows, for scorers that need the columns `needed`."""
    return [("prompt", *needed)], [name for name in COLUMNS if name not in needed]


def with_source(row: Row, file: Path, needed: Sequence[str]) -> Row:
    """Return `row` with a data source for metrics and uids if the column is absent and not needed: the name of the data set on
    the hub, or of the file."""
    if row.values.get("data_source") is not None or "data_source" in needed:
        return row
    name = hub.name_of_file(str(file))
    return Row(row.where, {**row.values, "data_source": name.repo if name is not None else file.stem})


def ground_truth_of(row: Row, *, needed: bool) -> Any:
    """Return ``reward_model.ground_truth``, None if absent. Raises ValueError if it is needed, but absent, null or NaN."""
    reward_model = row.need("reward_model", dict) if needed else row.get("reward_model", dict) or {}
    if needed and "ground_truth" not in reward_model:
        raise ValueError(f"{row.where}: reward_model has no ground_truth, but {sorted(reward_model)}")
    truth = reward_model.get("ground_truth")
    if needed and (truth is None or truth != truth):
        raise ValueError(f"{row.where}: reward_model.ground_truth is {'null' if truth is None else truth}")
    return truth


class PromptDataset(RowDataset[Prompt]):
    """Rows with the column ``prompt`` and, where present or needed, ``data_source``, ``reward_model.ground_truth``,
    ``extra_info``, ``images`` and ``videos``, rendered and tokenized once.

    Attributes:
        data_sources: sorted data sources of the kept rows.
        has_images: True if a kept row has images or videos.

    Raises:
        ValueError: a file, column, image or video is wrong, or a prompt is longer than `data.max_prompt_length`
            and the recipe does not filter (or all prompts are).
    """

    source = "row"
    too_long = "prompts are longer than data.max_prompt_length"

    def __init__(
        self,
        files: Files,
        tokenizer: Tokenizer,
        config: DataConfig,
        difficulty: str | None = None,
        tools: Sequence[dict[str, Any]] = (),
        images: ImageReader | None = None,
        sample: int | None = None,
        needed: Sequence[str] = SCORED_BY_ROW,
        with_messages: bool = False,
        into_extra_info: Sequence[str] = (),
        posted: bool = False,
    ) -> None:
        """`tools`: schemas that the chat template renders. `images`: reader of images and videos; None: rows must not have
        any. `sample`: rows to read of each file; None: all. `needed`: columns that scorers need, from
        `megarl.rewards.weighted.needed_columns`. `with_messages`: a scorer, an interaction or an agent loop reads the rows'
        messages. `into_extra_info`: further columns, added to `extra_info` if a row has them. `posted`: a
        service scores the rows and receives them as JSON."""
        self.layouts, self.optional = layout_of(needed)
        self.optional += (*into_extra_info, *((AGENT_NAME,) if tools else ()))
        self._into_extra_info = tuple(into_extra_info)
        self._needed, self._with_messages, self._posted = tuple(needed), with_messages, posted
        self._tools = tuple(tools)
        self._reader = images
        self._pictures: dict[str, Pictures] = {}  # by `Row.where`, while rows are read
        super().__init__(files, tokenizer, config, config.max_prompt_length, difficulty, sample)
        self._pictures.clear()
        self.data_sources = sorted({prompt.data_source for prompt in self._items})
        self.notices += _truth_notices(self._items)
        self.has_images = any(prompt.images or prompt.videos for prompt in self._items)

    def read(self, file: Path) -> list[Row]:
        """Read the rows of one file. Their column `images` becomes the number of images, and `videos` a list of (number of frames,
        frames per second): tokenizing needs no more."""
        rows = []
        for row in self.rows_of(file, self.optional):
            if self._tools:
                _check_agent(row)
            images = read_images(row, file, self._reader)
            videos = read_videos(row, file, None if self._reader is None else self._reader.videos)
            if images or videos:
                self._pictures[row.where] = Pictures(images, videos)
            sizes = {"images": len(images), "videos": [(len(video.frames), video.fps) for video in videos]}
            sizes = {column: size for column, size in sizes.items() if column in row.values}
            rows.append(with_source(Row(row.where, {**row.values, **sizes}), file, self._needed))
        if not rows:
            raise ValueError(f"{file}: the file has no rows")
        return rows

    def expand(self, row: Row, texts: Sequence[Encoded]) -> Sequence[Encoded]:
        if (pictures := self._pictures.get(row.where)) is None:
            return texts
        assert self._reader is not None
        (text,) = texts
        tokens = {"image": self._reader.token, **({"video": self._reader.videos.token} if pictures.videos else {})}
        text, self._pictures[row.where] = expand_placeholders(row, text, pictures, tokens)
        return [text]

    def encode(self) -> Encode:
        arguments: dict[str, Any] = {"tools": self._tools} if self._tools else {}
        if self._reader is not None and any(pictures.videos for pictures in self._pictures.values()):
            arguments["timestamps"] = self._reader.videos.timestamps
        return functools.partial(encode_prompts, **arguments) if arguments else encode_prompts

    def item(self, row: Row, uid: str, texts: Sequence[Encoded]) -> Prompt:
        (encoded,) = texts
        if not len(encoded.tokens):
            raise ValueError(f"{row.where}: the prompt is empty")
        messages, pictures = messages_of(row, "prompt"), self._pictures.get(row.where, Pictures())
        truth = ground_truth_of(row, needed="reward_model" in self._needed)
        extra_info = {**(row.get("extra_info", dict) or {}), **self._more(row)}
        if self._posted:
            _check_json(row, "reward_model.ground_truth", truth)
            _check_json(row, "extra_info", extra_info)
        return Prompt(
            uid=uid,
            tokens=tuple(encoded.tokens.tolist()),
            text=encoded.text,
            data_source=row.need("data_source", str),
            ground_truth=truth,
            extra_info=extra_info,
            question=text_of(messages),
            messages=tuple(messages) if self._with_messages else (),
            images=pictures.images,
            videos=pictures.videos,
        )

    def _more(self, row: Row) -> dict[str, Any]:
        columns = {name: row.values.get(name) for name in self._into_extra_info}
        return {name: value for name, value in columns.items() if value is not None}


def _check_agent(row: Row) -> None:
    """Raise ValueError for a row of verl that has no tools, because every row gets the recipe's tools."""
    if (name := row.get(AGENT_NAME, str)) not in (None, TOOL_AGENT):
        raise ValueError(
            f"{row.where}: {AGENT_NAME} is {name!r}, with which verl passes no tools to the policy, and agent.tools is for every row: "
            f"write the rows with {TOOL_AGENT} to a separate file, or leave the column out"
        )


def _check_json(row: Row, place: str, value: Any) -> None:
    """Raise ValueError for a value that JSON cannot represent."""
    if isinstance(value, (dict, list, tuple)):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            _check_json(row, f"{place}.{name}", part)
    elif not isinstance(value, (str, int, float, type(None))) or (
        isinstance(value, float) and not math.isfinite(value)
    ):
        raise ValueError(
            f"{row.where}: {place} is {cut_end(repr(value), 80)}, and the scorer remote posts rows as JSON, which cannot represent it: "
            "write null for a missing number, and text for other values"
        )


def encode_prompts(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    config: DataConfig,
    tools: Sequence[dict[str, Any]] = (),
    timestamps: Timestamps | None = None,
) -> list[Encoded]:
    """Render and tokenize each row's prompt, with the tools, the generation prompt, and the `timestamps` of its videos."""
    texts = [_render(row, tokenizer, config, tools, timestamps) for row in rows]
    leading = tokenizer.leading_ids(config.applies_template)
    encoded = []
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        tokens = np.array(leading + ids, dtype=np.int32)
        encoded.append(Encoded(tokens, np.zeros(len(tokens), dtype=bool), text))
    return encoded


def _render(
    row: Row,
    tokenizer: Tokenizer,
    config: DataConfig,
    tools: Sequence[dict[str, Any]],
    timestamps: Timestamps | None,
) -> str:
    messages = messages_of(row, "prompt")
    if config.prompt_suffix:
        messages = _with_suffix(row, messages, config.prompt_suffix)
    try:
        messages = with_picture_parts(row, messages, config.applies_template)
        text = tokenizer.render_text(messages, config.applies_template, config.chat_template_args, tools=tools)
        videos = row.get("videos", list)
        return timestamps.write(text, videos, tokenizer) if timestamps is not None and videos else text
    except ValueError as error:
        raise ValueError(f"{row.where}: {error}") from error


def _with_suffix(row: Row, messages: list[dict[str, Any]], suffix: str) -> list[dict[str, Any]]:
    users = [place for place, message in enumerate(messages) if message["role"] == "user"]
    if not users or not isinstance(messages[users[-1]]["content"], str):
        raise ValueError(
            f"{row.where}: data.prompt_suffix is appended to the last user message, and the prompt has none that is text"
        )
    last = users[-1]
    changed = {**messages[last], "content": messages[last]["content"] + suffix}
    return [*messages[:last], changed, *messages[last + 1 :]]


def _truth_notices(prompts: Sequence[Prompt]) -> Iterator[str]:
    """Yield a notice for each data source in which some rows have a ground truth and others have none."""
    rows, without = Counter[str](), dict[str, list[str]]()
    for prompt in prompts:
        rows[prompt.data_source] += 1
        if prompt.ground_truth is None:
            without.setdefault(prompt.data_source, []).append(prompt.uid)
    for source, uids in without.items():
        if len(uids) < rows[source]:
            yield (
                f"{len(uids)} of {rows[source]} rows of the data source {source!r} have no ground truth, the first is {uids[0]}: "
                "their scorer gets None"
            )
