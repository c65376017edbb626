"""samples/step_000123.jsonl: responses of the policy, with their rewards. docs/metrics.md describes the keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.atomic_files import disk_errors, write_atomically
from megarl.batching.packing import split_evenly
from megarl.observe.json_lines import json_line, read_lines
from megarl.observe.run_dir import RunDirectory
from megarl.types import Group, Sample, SampleTokens, Turn

if TYPE_CHECKING:
    from megarl.data.tokenizer import Tokenizer


def sample_records(groups: Sequence[Group], step: int, count: int, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the records of `count` whole groups, spread evenly over the batch that `step` trained on.

    Only the vectors of these groups are fetched.
    """
    records: list[dict[str, Any]] = []
    for run in split_evenly(len(groups), count) if count else []:
        group = groups[run.start]
        vectors = group.samples[0].data.get()
        prompt = tokenizer.decode(vectors[0].tokens[: group.samples[0].prompt_length].tolist())
        records += [_record(group, sample, vectors[sample.index], prompt, step) for sample in group.samples]
    return records


def _record(group: Group, sample: Sample, vectors: SampleTokens, prompt: str, step: int) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "response": vectors.text,
        **({"turns": [_turn(turn) for turn in vectors.turns]} if vectors.turns else {}),
        "reward": sample.reward,
        **({"reason": vectors.reason} if vectors.reason else {}),
        "parts": sample.reward_parts,
        "steps": [(token - sample.prompt_length, reward) for token, reward in sample.steps],
        "prompt_length": sample.prompt_length,
        "response_length": sample.response_length,
        "finish_reason": sample.finish_reason,
        "version": sample.version,
        **({"spans": [[span.start, span.version] for span in sample.spans]} if len(sample.spans) > 1 else {}),
        "staleness": step - 1 - sample.version,
        **({"tool_use": asdict(sample.tool_use)} if sample.tool_use is not None else {}),
        "data_source": group.data_source,
        "row": group.prompt_uid,
        "group": group.number,
        "index": sample.index,
    }


def _turn(turn: Turn) -> dict[str, Any]:
    plain = asdict(Turn(turn.role, turn.text))
    return {name: value for name, value in asdict(turn).items() if name in ("role", "text") or value != plain[name]}


def sample_path(run_dir: RunDirectory, step: int) -> Path:
    return run_dir.samples / f"step_{step:06d}.jsonl"


def write_samples(run_dir: RunDirectory, step: int, records: Sequence[dict[str, Any]], limit: int) -> int:
    """Write at most `limit` of `records`. Returns the number of records written.

    `choose` selects whole groups, spread evenly over the batch, so that samples of one prompt can be compared. The key
    ``group`` identifies a group. If no whole group fits, the first samples of a group are written.
    """
    chosen = choose(records, limit)
    path = sample_path(run_dir, step)
    with disk_errors(path):
        run_dir.samples.mkdir(parents=True, exist_ok=True)
    write_atomically(path, b"".join(json_line(dict(record)) for record in chosen))
    return len(chosen)


def choose(records: Sequence[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """Return at most `limit` of `records`: whole groups, spread evenly over the batch, in their order."""
    if len(records) <= limit:
        return list(records)
    groups: dict[Any, list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault(record.get("group"), []).append(record)
    all_groups = list(groups.values())
    count = max(1, limit * len(all_groups) // len(records))
    chosen: list[dict[str, Any]] = []
    for i in range(count):
        group = all_groups[i * len(all_groups) // count]
        chosen += group[: limit - len(chosen)]
    return chosen


def sample_steps(run_dir: RunDirectory) -> list[int]:
    """Return the steps that have samples, in order."""
    return steps_in(run_dir.samples)


def steps_in(folder: Path) -> list[int]:
    """Return the steps N of the files step_N.jsonl, in order."""
    if not folder.is_dir():
        return []
    names = [path.stem.removeprefix("step_") for path in folder.glob("step_*.jsonl")]
    return sorted(int(name) for name in names if name.isdigit())


def read_samples(run_dir: RunDirectory, step: int) -> list[dict[str, Any]]:
    """Return the records of `step`, without invalid lines."""
    return read_lines(sample_path(run_dir, step))[0]


def discard_steps_after(folder: Path, step: int) -> int:
    """Move the files step_N.jsonl after `step` to discarded/ in `folder`, for a resume. Returns their number."""
    later = [number for number in steps_in(folder) if number > step]
    if later:
        discarded = folder / "discarded"
        discarded.mkdir(exist_ok=True)
        for number in later:
            path = folder / f"step_{number:06d}.jsonl"
            path.replace(discarded / path.name)
    return len(later)
