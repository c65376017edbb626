"""Samples in report.html: a selection of each step's samples, with long texts cut."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megarl.errors import cut_middle
from megarl.observe.json_lines import json_line, strict
from megarl.observe.run_dir import RunDirectory
from megarl.observe.samples import choose, read_samples, sample_steps

MAX_SAMPLE_STEPS = 120
MAX_SAMPLES_A_STEP = 16
MAX_TEXT = 6_000  # characters per prompt, response or reason
MAX_NAME = 80  # characters per name of a tool or argument, which the policy generates
MAX_ARGUMENTS = 20  # per call
MAX_TURNS = 60  # per sample
TURNS_BYTES = 16_000  # all texts of the turns of one sample
SAMPLES_BYTES = 4 << 20  # all embedded samples


def embedded_samples(run_dir: RunDirectory) -> tuple[list[dict[str, Any]], str]:
    """Return ``{step, records}`` for each selected step, and a note about the samples left out."""
    steps = sample_steps(run_dir)
    if not steps:
        return [], "No samples were written."
    count = min(len(steps), MAX_SAMPLE_STEPS)
    chosen = [steps[round(i * (len(steps) - 1) / max(1, count - 1))] for i in range(count)]
    budget = SAMPLES_BYTES // count
    embedded, shown, total = [], 0, 0
    for step in chosen:
        records = read_samples(run_dir, step)
        total += len(records)
        kept: list[dict[str, Any]] = []
        size = 0
        for record in map(shortened, choose(records, MAX_SAMPLES_A_STEP)):
            size += len(json_line(record))
            if kept and size > budget:
                break
            kept.append(record)
        shown += len(kept)
        embedded.append({"step": step, "records": kept})
    note = f"{shown:,} of the {total:,} samples in {count:,} of {len(steps):,} files"
    return embedded, f"{note}; samples/ has all."


def shortened(record: dict[str, Any]) -> dict[str, Any]:
    """Return `record` with long texts cut in the middle. If it has turns, they replace the response."""
    short_record = dict(record)
    if turns := _turns(record):
        short_record["turns"] = turns
        short_record.pop("response", None)
    else:
        short_record.pop("turns", None)
        short_record["response"] = str(record.get("response", ""))
    for name in ("prompt", "response", "reason"):
        if name in short_record or name == "prompt":
            short_record[name] = cut_middle(str(short_record.get(name, "")), MAX_TEXT)
    return short_record


def _turns(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the record's turns for the page, with arguments as (name, text).

    Of many turns only the first and the last are kept. Their texts have at most `TURNS_BYTES` in total: the longest texts
    are cut.
    """
    recorded = record.get("turns")
    turns = [turn for turn in recorded if isinstance(turn, dict)] if isinstance(recorded, list) else []
    half = MAX_TURNS // 2
    left_out = len(turns) - 2 * half
    if left_out > 0:
        turns = [*turns[:half], *turns[-half:]]
    plain = [_plain_turn(turn) for turn in turns]
    texts = [text for turn in plain for text in (turn["text"], *(text for _, text in turn["arguments"]))]
    most = _fair_length([len(text.encode("utf-8", "backslashreplace")) for text in texts], TURNS_BYTES)
    for turn in plain:
        turn["text"] = _cut_bytes(turn["text"], most)
        turn["arguments"] = [(name, _cut_bytes(text, most)) for name, text in turn["arguments"]]
    if left_out > 0:
        plain.insert(half, {"role": "left out", "text": f"{left_out:,} turns left out here", "arguments": []})
    return plain


def _plain_turn(turn: dict[str, Any]) -> dict[str, Any]:
    arguments = turn.get("arguments")
    pairs = list(arguments.items()) if isinstance(arguments, dict) else []
    shown = [(cut_middle(str(name), MAX_NAME), _text(value)) for name, value in pairs[:MAX_ARGUMENTS]]
    if len(pairs) > MAX_ARGUMENTS:
        shown.append(("…", f"{len(pairs) - MAX_ARGUMENTS:,} arguments left out here"))
    name = cut_middle(str(turn.get("name", "")), MAX_NAME)
    kept: dict[str, Any] = {key: turn[key] for key in ("role", "tokens", "failure", "seconds", "reward") if key in turn}
    return {**kept, "text": str(turn.get("text", "")), "name": name, "arguments": shown}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(strict(value), ensure_ascii=False)


def _fair_length(lengths: Sequence[int], budget: int) -> int:
    """Return the largest L for which texts of `lengths`, each cut to at most L, fit into `budget` together.

    Example: lengths 10, 10 and 100 with a budget of 50: L is 30, and only the longest text is cut.
    """
    left, waiting = budget, sorted(lengths)
    for place, length in enumerate(waiting):
        share = left // (len(waiting) - place)
        if length > share:
            return share
        left -= length
    return max(lengths, default=0)


def _cut_bytes(text: str, most: int) -> str:
    """Return `text`, or its two ends if it has more than `most` bytes of UTF-8. The mark of the cut is not counted."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= most:
        return text
    half = most // 2
    ends = [part.decode("utf-8", "ignore") for part in (data[:half], data[len(data) - half :])]
    return f"{ends[0]}\n[… {len(text) - sum(map(len, ends)):,} characters left out here …]\n{ends[1]}"
