"""Samples in report.html: a selection of each step's samples, with long texts cut, and the tokens of some."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.errors import cut_middle, pluralize
from megarl.observe.json_lines import json_line, read_lines, strict
from megarl.observe.page.sample_pages import Member, SampleFilter, SamplePage, accepted_group, read_groups
from megarl.observe.run_dir import RunDirectory
from megarl.observe.samples import choose, sample_path, sample_steps
from megarl.observe.token_values import token_path

MAX_SAMPLE_STEPS = 120
MAX_SAMPLES_A_STEP = 16
MAX_TEXT = 6_000  # characters per prompt, response or reason
MAX_NAME = 80  # characters per name of a tool or argument, which the policy generates
MAX_ARGUMENTS = 20  # per call
MAX_TURNS = 60  # per sample
TURNS_BYTES = 16_000  # all texts of the turns of one sample
SAMPLES_BYTES = 4 << 20  # all embedded samples
MAX_TOKENS = 1024  # per sample with token values
TOKENS_BYTES = 3 << 20  # all embedded token values


@dataclass
class EmbeddedSamples:
    """Samples for report.html.

    ``groups``: from the newest step back, as in `SamplePage.groups`, each sample with ``record``: the shortened record with
    its ``token_values`` (see `ViewedRun.sample`). ``steps``: those with samples. ``note``: what was left out.
    """

    groups: list[dict[str, Any]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    note: str = ""


def embedded_samples(run_dir: RunDirectory) -> EmbeddedSamples:
    """Return samples of up to `MAX_SAMPLE_STEPS` steps, spread over the run."""
    steps = sample_steps(run_dir)
    if not steps:
        return EmbeddedSamples()
    count = min(len(steps), MAX_SAMPLE_STEPS)
    chosen = [steps[round(i * (len(steps) - 1) / max(1, count - 1))] for i in range(count)]
    by_step: dict[int, list[dict[str, Any]]] = {}
    page = SamplePage()
    total = 0
    for step in chosen:
        members = list(read_groups(sample_path(run_dir, step), 0, page))
        total += sum(map(len, members))
        by_step[step] = _chosen_groups(step, members, SAMPLES_BYTES // count)
    samples = [sample for step in chosen for group in by_step[step] for sample in group["samples"]]
    note = f"{len(samples):,} of the {total:,} samples in {count:,} of {len(steps):,} files; samples/ has all."
    note += _add_tokens(run_dir, by_step)
    groups = [group for step in reversed(chosen) for group in by_step[step]]
    return EmbeddedSamples(groups, chosen, " ".join([note, *page.damaged]))


def _chosen_groups(step: int, groups: Sequence[list[Member]], budget: int) -> list[dict[str, Any]]:
    """Return `groups` with at most `MAX_SAMPLES_A_STEP` shortened samples, which have at most `budget` bytes, or one sample."""
    chosen = choose([record for members in groups for _, _, record in members], MAX_SAMPLES_A_STEP)
    kept: dict[int, dict[str, Any]] = {}  # by id of the record
    size = 0
    for record in chosen:
        short_record = shortened(record)
        size += len(json_line(short_record))
        if kept and size > budget:
            break
        kept[id(record)] = short_record
    listed = []
    for members in groups:
        group = accepted_group(step, members, SampleFilter())
        assert group is not None, "a filter without conditions accepts every group"
        pairs = zip(group["samples"], members, strict=True)
        group["samples"] = [
            {**brief, "record": kept[id(record)]} for brief, (_, _, record) in pairs if id(record) in kept
        ]
        if group["samples"]:
            listed.append(group)
    return listed


def _add_tokens(run_dir: RunDirectory, by_step: Mapping[int, Sequence[dict[str, Any]]]) -> str:
    """Add ``token_values`` or ``token_damage`` to the records of `by_step`. Returns a sentence about tokens left out, or "".

    Of a long response the first `MAX_TOKENS` tokens are taken. The newest step has its tokens, then steps spread over the
    run, until all have `TOKENS_BYTES`.
    """
    steps = list(by_step)
    size, shown, recorded = 0, 0, 0
    for step in (steps[i] for i in spread(len(steps))):
        path = token_path(run_dir, step)
        if not path.exists():
            continue
        whole = size >= TOKENS_BYTES
        lines, bad = ([], 0) if whole else read_lines(path)
        found = {(line.get("group"), line.get("index")): line for line in lines}
        for sample in (sample for group in by_step[step] for sample in group["samples"]):
            record = sample["record"]
            values = found.get((record.get("group"), record.get("index")))
            if values is not None and size < TOKENS_BYTES:
                record["token_values"] = cut_tokens(values)
                size += len(json_line(record["token_values"]))
                shown += 1
            elif bad:
                record["token_damage"] = f"{path.parent.name}/{path.name} has damaged lines."
            elif whole or values is not None:
                record["token_damage"] = (
                    "The report has tokens of other samples only; megarl view shows all that are recorded."
                )
        recorded += 1
    if not recorded or size < TOKENS_BYTES:
        return ""
    return f" Tokens of {pluralize(shown, 'sample')}; tokens/ has all."


def cut_tokens(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of tokens/ with the first `MAX_TOKENS` tokens; ``left_out`` is the number of the others."""
    tokens, values = record.get("tokens"), record.get("values")
    if not isinstance(tokens, list) or not isinstance(values, dict):
        return {}
    columns = {name: column[:MAX_TOKENS] for name, column in values.items() if isinstance(column, list)}
    return {"tokens": tokens[:MAX_TOKENS], "values": columns, "left_out": max(0, len(tokens) - MAX_TOKENS)}


def spread(count: int) -> list[int]:
    """Return the numbers 0 to count - 1 from the last on, first far apart and then ever closer: 4 is [3, 1, 2, 0]."""
    order: dict[int, None] = {}
    distance = count
    while distance:
        order.update(dict.fromkeys(range(count - 1, -1, -distance)))
        distance //= 2
    return list(order)


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
