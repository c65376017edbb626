"""samples/step_000123.jsonl: what the policy wrote, with what it was paid for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from megarl.atomic_files import disk_errors, write_atomically
from megarl.batching.packing import split_evenly
from megarl.observe.json_lines import json_line, read_lines
from megarl.observe.run_dir import RunDirectory
from megarl.types import Group, Sample, SampleTokens, Turn

if TYPE_CHECKING:
    from megarl.data.tokenizer import Tokenizer


class TurnRecord(TypedDict, total=False):
    """One of a sample's turns, as `Turn` says; what has its default value is left out."""

    role: str
    text: str
    tokens: int
    name: str
    arguments: dict[str, Any]
    failure: str
    seconds: float
    reward: float


class SampleRecord(TypedDict, total=False):
    """One sample, for people. Further keys are kept as they are."""

    prompt: str
    response: str
    turns: list[TurnRecord]  # what an agent loop's response is made of
    reward: float
    reason: str  # why the scorer gave it, in its words
    parts: dict[str, float]  # what the reward is made of
    # Within the response: the token of it that ends the step, counted from 0, and the step's reward.
    steps: list[tuple[int, float]]
    prompt_length: int  # tokens
    response_length: int  # tokens
    finish_reason: str
    version: int  # of the weights that wrote it
    staleness: int  # versions behind the policy that trained on it
    tool_use: dict[str, float]  # of an agent loop: see `ToolUse`
    data_source: str
    row: str  # of the data: names the prompt over runs
    group: int
    index: int  # within the group


def records_of(groups: Sequence[Group], step: int, wanted: int, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Records of `wanted` whole groups, spread over the batch that `step` trained on. Other groups' vectors stay where
    they are."""
    records: list[dict[str, Any]] = []
    for run in split_evenly(len(groups), wanted) if wanted else []:
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
    """Write at most `limit` of `records`; returns how many were written.

    Whole groups are chosen, evenly over the batch, so that siblings can be compared; groups are told apart by
    ``group``. Where not even one group fits, its first samples are written.
    """
    chosen = choose(records, limit)
    path = sample_path(run_dir, step)
    with disk_errors(path):
        run_dir.samples.mkdir(parents=True, exist_ok=True)
    write_atomically(path, b"".join(json_line(dict(record)) for record in chosen))
    return len(chosen)


def choose(records: Sequence[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """At most `limit` of `records`: whole groups, evenly over the batch, in their order."""
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
    """The steps that have samples, in order."""
    if not run_dir.samples.is_dir():
        return []
    names = [path.stem.removeprefix("step_") for path in run_dir.samples.glob("step_*.jsonl")]
    return sorted(int(name) for name in names if name.isdigit())


def read_samples(run_dir: RunDirectory, step: int) -> list[dict[str, Any]]:
    """The records of `step`; a line that is no record is left out."""
    return read_lines(sample_path(run_dir, step))[0]


def discard_samples_after(run_dir: RunDirectory, step: int) -> int:
    """For a resume after `step`: later files move to samples/discarded/. Returns how many."""
    later = [number for number in sample_steps(run_dir) if number > step]
    if later:
        discarded = run_dir.samples / "discarded"
        discarded.mkdir(exist_ok=True)
        for number in later:
            path = sample_path(run_dir, number)
            path.replace(discarded / path.name)
    return len(later)
