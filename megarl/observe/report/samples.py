"""The samples in report.html: some of each step's, cut to what a page can hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megarl.observe.json_lines import json_line, strict
from megarl.observe.run_dir import RunDirectory
from megarl.observe.samples import choose, read_samples, sample_steps

MAX_SAMPLE_STEPS = 120
MAX_SAMPLES_A_STEP = 16
MAX_TEXT = 6_000  # characters of one prompt, response or reason
MAX_NAME = 80  # characters of a tool's or an argument's name: the policy writes them
MAX_ARGUMENTS = 20  # of one call
MAX_TURNS = 60  # of one sample
TURNS_BYTES = 16_000  # of all texts of one sample's turns
SAMPLES_BYTES = 4 << 20  # of all embedded samples


def embedded_samples(run_dir: RunDirectory) -> tuple[list[dict[str, Any]], str]:
    """(per step: {step, records}, what was left out, in words)."""
    steps = sample_steps(run_dir)
    if not steps:
        return [], "No samples were written."
    count = min(len(steps), MAX_SAMPLE_STEPS)
    chosen = [steps[round(i * (len(steps) - 1) / max(1, count - 1))] for i in range(count)]
    budget = SAMPLES_BYTES // count
    embedded, shown, there = [], 0, 0
    for step in chosen:
        records = read_samples(run_dir, step)
        there += len(records)
        kept: list[dict[str, Any]] = []
        size = 0
        for record in map(shortened, choose(records, MAX_SAMPLES_A_STEP)):
            size += len(json_line(record))
            if kept and size > budget:
                break
            kept.append(record)
        shown += len(kept)
        embedded.append({"step": step, "records": kept})
    note = f"{shown:,} of the {there:,} samples in {count:,} of {len(steps):,} files"
    return embedded, f"{note}; all of them are in samples/."


def shortened(record: dict[str, Any]) -> dict[str, Any]:
    """`record` with its long texts cut in the middle. Where it has turns, these are its response."""
    short_record = dict(record)
    if turns := _turns(record):
        short_record["turns"] = turns
        short_record.pop("response", None)
    else:
        short_record.pop("turns", None)
        short_record["response"] = str(record.get("response", ""))
    for name in ("prompt", "response", "reason"):
        if name in short_record or name == "prompt":
            short_record[name] = _cut(str(short_record.get(name, "")), MAX_TEXT)
    return short_record


def _turns(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The record's turns as the page shows them: arguments as (name, text), of many turns the first and the last, and all
    their texts together no more than `TURNS_BYTES` long, at the expense of the longest."""
    given = record.get("turns")
    turns = [turn for turn in given if isinstance(turn, dict)] if isinstance(given, list) else []
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
    shown = [(_cut(str(name), MAX_NAME), _text(value)) for name, value in pairs[:MAX_ARGUMENTS]]
    if len(pairs) > MAX_ARGUMENTS:
        shown.append(("…", f"{len(pairs) - MAX_ARGUMENTS:,} arguments left out here"))
    name = _cut(str(turn.get("name", "")), MAX_NAME)
    kept: dict[str, Any] = {key: turn[key] for key in ("role", "tokens", "failure", "seconds", "reward") if key in turn}
    return {**kept, "text": str(turn.get("text", "")), "name": name, "arguments": shown}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(strict(value), ensure_ascii=False)


def _fair_length(lengths: Sequence[int], budget: int) -> int:
    """The greatest L for which texts of `lengths`, none left longer than L, have room in `budget` together.

    Example: 10, 10 and 100 in 50: the short ones are left alone, L is 30.
    """
    left, waiting = budget, sorted(lengths)
    for place, length in enumerate(waiting):
        share = left // (len(waiting) - place)
        if length > share:
            return share
        left -= length
    return max(lengths, default=0)


def _cut(text: str, most: int) -> str:
    """`text`, or its two ends where it has more than `most` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters left out here …]\n{text[len(text) - half :]}"


def _cut_bytes(text: str, most: int) -> str:
    """The same, where `most` is in bytes of UTF-8, the mark of the cut not counted."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= most:
        return text
    half = most // 2
    ends = [part.decode("utf-8", "ignore") for part in (data[:half], data[len(data) - half :])]
    return f"{ends[0]}\n[… {len(text) - sum(map(len, ends)):,} characters left out here …]\n{ends[1]}"
