"""tokens/step_000123.jsonl: the tokens of a few samples, with what the run computed for each. docs/metrics.md describes the keys."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.atomic_files import disk_errors, write_atomically
from megarl.observe.json_lines import json_line
from megarl.observe.run_dir import RunDirectory
from megarl.types import Group, Sample

if TYPE_CHECKING:
    from megarl.data.tokenizer import Tokenizer

MAX_TOKENS = 4096  # of the response, from its first


def token_records(
    group: Group, count: int, vectors: Mapping[int, Mapping[str, np.ndarray]], tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """Return the records of the first `count` samples of `group`, the first group of the batch.

    vectors: the trainers' values of each token, by index of the sample in the batch.
    """
    stored = group.samples[0].data.get()
    texts: dict[int, str] = {}
    records = []
    for number, sample in enumerate(group.samples[:count]):
        tokens, first = stored[sample.index], sample.prompt_length
        part = slice(first, min(sample.length, first + MAX_TOKENS))
        ids = [int(token) for token in tokens.tokens[part]]
        for token in ids:
            if token not in texts:
                texts[token] = token_text(token, tokenizer)
        columns = {"rollout_log_probs": tokens.rollout_log_probs, **vectors.get(number, {})}
        values: dict[str, list[float] | list[int]] = {
            name: [_rounded(value) for value in column[part].tolist()] for name, column in columns.items()
        }
        values["mask"] = [int(value) for value in tokens.loss_mask[part]]
        values["versions"] = _versions(sample)[: len(ids)]
        place = {"group": group.number, "index": sample.index}
        records.append({**place, "tokens": [texts[token] for token in ids], "values": values})
    return records


def token_text(token: int, tokenizer: Tokenizer) -> str:
    """Return the text of a token inside a text, with its leading space: what a second copy of it adds to the first."""
    alone = tokenizer.decode([token], special=True)
    return tokenizer.decode([token, token], special=True).removeprefix(alone)


def _versions(sample: Sample) -> list[int]:
    """Return the version of the weights that sampled each token of the response."""
    starts = [span.start for span in sample.spans] + [sample.response_length]
    lengths = np.diff(starts)
    return np.repeat([span.version for span in sample.spans], lengths).tolist()


def _rounded(value: float) -> float:
    """Round to five significant digits, which keeps the file small."""
    return float(f"{value:.5g}") if math.isfinite(value) else value


def token_path(run_dir: RunDirectory, step: int) -> Path:
    return run_dir.tokens / f"step_{step:06d}.jsonl"


def write_token_values(run_dir: RunDirectory, step: int, records: Sequence[dict[str, Any]]) -> None:
    path = token_path(run_dir, step)
    with disk_errors(path):
        run_dir.tokens.mkdir(parents=True, exist_ok=True)
    write_atomically(path, b"".join(map(json_line, records)))


def read_token_values(run_dir: RunDirectory, step: int, sample: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the record of a sample of samples/, or None if the run has not recorded its tokens. Raises ValueError for a damaged
    line before it."""
    path = token_path(run_dir, step)
    if not path.exists():
        return None
    place = (sample.get("group"), sample.get("index"))
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path.parent.name}/{path.name}, line {number} is damaged: {error}") from error
            if isinstance(record, dict) and (record.get("group"), record.get("index")) == place:
                return record
    return None
