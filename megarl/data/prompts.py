"""The prompts that the policy is trained and evaluated on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megarl.config.schema import DataConfig
from megarl.data.cache import Encoded
from megarl.data.dataset import Files, RowDataset
from megarl.data.encode import Encode
from megarl.data.rows import Row, messages_of
from megarl.data.tokenizer import Tokenizer
from megarl.types import Prompt


class PromptDataset(RowDataset[Prompt]):
    """Rows with the columns ``prompt``, ``data_source``, ``reward_model.ground_truth`` and, where
    present, ``extra_info``, rendered and tokenised once.

    Attributes:
        data_sources: those of the rows that stayed, sorted.

    Raises:
        ValueError: a file or column is wrong, or a prompt is longer than `data.max_prompt_length`
            and the recipe does not filter (or all of them are).
    """

    layouts = (("prompt", "data_source", "reward_model"),)
    optional = ("extra_info",)
    source = "row"
    too_long = "prompts are longer than data.max_prompt_length"

    def __init__(self, files: Files, tokenizer: Tokenizer, config: DataConfig, difficulty: str | None = None) -> None:
        super().__init__(files, tokenizer, config, config.max_prompt_length, difficulty)
        self.data_sources = sorted({prompt.data_source for prompt in self._items})

    @staticmethod
    def encode() -> Encode:
        return encode_prompts

    def item(self, row: Row, uid: str, texts: Sequence[Encoded]) -> Prompt:
        reward_model = row.need("reward_model", dict)
        if "ground_truth" not in reward_model:
            raise ValueError(f"{row.where}: reward_model has no ground_truth, but {sorted(reward_model)}")
        (encoded,) = texts
        if not len(encoded.tokens):
            raise ValueError(f"{row.where}: the prompt is empty")
        return Prompt(
            uid=uid,
            tokens=tuple(encoded.tokens.tolist()),
            text=encoded.text,
            data_source=row.need("data_source", str),
            ground_truth=reward_model["ground_truth"],
            extra_info=row.get("extra_info", dict) or {},
        )


def encode_prompts(rows: Sequence[Row], tokenizer: Tokenizer, config: DataConfig) -> list[Encoded]:
    """Each row's prompt, with the head of the answer that is to be sampled."""
    texts = [_render(row, tokenizer, config) for row in rows]
    leading = tokenizer.leading_ids(config.chat_template)
    encoded = []
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        tokens = np.array(leading + ids, dtype=np.int32)
        encoded.append(Encoded(tokens, np.zeros(len(tokens), dtype=bool), text))
    return encoded


def _render(row: Row, tokenizer: Tokenizer, config: DataConfig) -> str:
    messages = messages_of(row, "prompt")
    try:
        return tokenizer.render_text(messages, config.chat_template, config.chat_template_args)
    except ValueError as error:
        raise ValueError(f"{row.where}: {error}") from error
