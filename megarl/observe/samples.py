"""samples/step_000123.jsonl: what the policy wrote, with what it was paid for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from megarl.observe.files import disk_errors, json_line, read_lines, write_whole
from megarl.observe.run_dir import RunDirectory


class SampleRecord(TypedDict, total=False):
    """One sample, for people. Further keys are kept as they are."""

    prompt: str
    response: str
    reward: float
    parts: dict[str, float]  # what the reward is made of
    # Within the response: the token of it that ends the step, counted from 0, and the step's reward.
    steps: list[tuple[int, float]]
    prompt_length: int  # tokens
    response_length: int  # tokens
    finish_reason: str
    version: int  # of the weights that wrote it
    staleness: int  # versions behind the policy that trained on it
    data_source: str
    group: int
    index: int  # within the group
    ground_truth: Any


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
    write_whole(path, b"".join(json_line(dict(record)) for record in chosen))
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
