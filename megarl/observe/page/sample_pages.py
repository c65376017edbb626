"""Pages of samples. A page reads its files from an offset on, and no further than it needs."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.observe.page.followed_file import line_at, lines_from
from megarl.observe.run_dir import RunDirectory
from megarl.observe.samples import sample_path

PAGE = 64  # samples per page, then the group in progress is completed
PAGE_BYTES = 8 << 20  # read for one page
LONGEST_LINE = 32 << 20  # bytes of one sample
MAX_GROUP = 4096  # samples of one group in a page
SNIPPET = 160  # characters
MAX_DAMAGED = 20  # damaged lines that a page names
SETTLED = 2.0  # seconds after which a folder's time of change shows every change
_NAME = re.compile(r"step_(\d{1,18})\.jsonl")


class SampleFiles:
    """The steps with samples, listed again only if the folder has changed."""

    def __init__(self, run_dir: RunDirectory) -> None:
        self._run_dir = run_dir
        self._steps: list[int] = []
        self._listed: tuple[int, float] | None = None  # time of change of the folder, and when it was listed

    def steps(self) -> list[int]:
        """Return the steps in order. Reads only the folder."""
        try:
            changed = self._run_dir.samples.stat().st_mtime_ns
        except FileNotFoundError:
            self._steps, self._listed = [], None
            return self._steps
        if self._listed is None or self._listed[0] != changed or self._listed[1] < changed / 1e9 + SETTLED:
            listed = time.time()
            names = [match for path in self._run_dir.samples.iterdir() if (match := _NAME.fullmatch(path.name))]
            self._steps = sorted(int(match[1]) for match in names)
            self._listed = (changed, listed)
        return self._steps


@dataclass(frozen=True)
class SampleFilter:
    """Conditions on samples and their groups; None or "" accepts all."""

    least: float | None = None  # reward
    most: float | None = None
    source: str = ""
    finish: str = ""
    text: str = ""  # in prompt, response, reason or turns; any case
    tools: str = ""  # "called" | "failed"
    spread: str = ""  # rewards of the group: "some" | "none"
    staleness: int | None = None  # at least

    def accepts_group(self, records: Sequence[Mapping[str, Any]]) -> bool:
        if not self.spread:
            return True
        rewards = [_number(record.get("reward")) for record in records]
        different = {reward for reward in rewards if not math.isnan(reward)}
        return (len(different) > 1) == (self.spread == "some")

    def accepts(self, record: Mapping[str, Any]) -> bool:
        reward = _number(record.get("reward"))
        return (
            (self.least is None or reward >= self.least)
            and (self.most is None or reward <= self.most)
            and (not self.source or record.get("data_source") == self.source)
            and (not self.finish or record.get("finish_reason") == self.finish)
            and (not self.tools or _used_tools(record, self.tools))
            and (self.staleness is None or _number(record.get("staleness")) >= self.staleness)
            and (not self.text or self.text.lower() in _all_text(record).lower())
        )


@dataclass
class SamplePage:
    """Samples that pass a filter, in whole groups.

    ``groups``: step, group, row, data source, rewards of all its samples, and ``samples``, the accepted ones, as brief
    records with ``offset``. ``next``: [step, offset] where the next page begins; None at the end. ``looked_at``: samples
    read. ``damaged``: a sentence per line that could not be read.
    """

    groups: list[dict[str, Any]] = field(default_factory=list)
    next: tuple[int, int] | None = None
    looked_at: int = 0
    bytes_read: int = 0
    damaged: list[str] = field(default_factory=list)


def sample_page(
    run_dir: RunDirectory, steps: Sequence[int], start: tuple[int, int], conditions: SampleFilter
) -> SamplePage:
    """Return the samples from `start` (step, offset) on: to the end of that step's file, then the files of earlier steps.

    Ends after `PAGE` accepted samples or `PAGE_BYTES`, at the end of a group.
    """
    page, accepted = SamplePage(), 0
    for step in [step for step in reversed(steps) if step <= start[0]]:
        path = sample_path(run_dir, step)
        begin = start[1] if step == start[0] else 0
        try:
            for members in read_groups(path, begin, page):
                if accepted >= PAGE or page.bytes_read >= PAGE_BYTES:
                    page.next = (step, members[0][0])
                    return page
                page.looked_at += len(members)
                page.bytes_read += sum(len(line) + 1 for _, line, _ in members)
                if group := accepted_group(step, members, conditions):
                    accepted += len(group["samples"])
                    page.groups.append(group)
        except FileNotFoundError:
            page.damaged.append(f"{path.name} has been removed while it was read.")
    return page


Member = tuple[int, bytes, dict[str, Any]]
"""Offset, line and record of a sample."""


def read_groups(path: Path, offset: int, page: SamplePage) -> Iterator[list[Member]]:
    """Yield runs of adjacent samples with the same group number; names damaged lines in `page`."""
    members: list[Member] = []
    for begin, line in lines_from(path, offset):
        record = _parsed(line)
        if record is None:
            page.bytes_read += len(line) + 1
            if line.strip() and len(page.damaged) < MAX_DAMAGED:
                page.damaged.append(f"{path.name}, byte {begin:,}: not a sample.")
            continue
        number = record.get("group")
        if members and (number is None or number != members[0][2].get("group") or len(members) >= MAX_GROUP):
            yield members
            members = []
        members.append((begin, line, record))
    if members:
        yield members


def accepted_group(step: int, members: Sequence[Member], conditions: SampleFilter) -> dict[str, Any] | None:
    """Return a group as in `SamplePage.groups`; None if no sample of it passes `conditions`."""
    records = [record for _, _, record in members]
    if not conditions.accepts_group(records):
        return None
    samples = [{"offset": offset, **_brief(record)} for offset, _, record in members if conditions.accepts(record)]
    if not samples:
        return None
    first = records[0]
    return {
        "step": step,
        "group": first.get("group"),
        "row": first.get("row"),
        "data_source": first.get("data_source"),
        "rewards": [record.get("reward") for record in records],
        "samples": samples,
    }


def read_sample(run_dir: RunDirectory, step: int, offset: int) -> dict[str, Any]:
    """Return the record at `offset` of a step's file. Raises ValueError if there is none."""
    path = sample_path(run_dir, step)
    if not path.exists():
        raise ValueError(f"step {step} has no samples")
    record = _parsed(line_at(path, offset, LONGEST_LINE))
    if record is None:
        raise ValueError(f"{path.name}, byte {offset:,}: not a sample")
    return record


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _brief(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the list of samples shows of a record."""
    turns = _turns(record)
    replies = [str(turn.get("text", "")) for turn in turns if turn.get("role") == "assistant"]
    text = replies[-1] if replies else str(record.get("response", ""))
    use = record.get("tool_use")
    names = ("reward", "index", "finish_reason", "response_length", "staleness")
    return {
        **{name: record[name] for name in names if name in record},
        "snippet": text.strip()[-SNIPPET:],
        "calls": use.get("calls", 0) if isinstance(use, dict) else 0,
        "failures": use.get("failures", 0) if isinstance(use, dict) else 0,
    }


def _turns(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    turns = record.get("turns")
    return [turn for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []


def _used_tools(record: Mapping[str, Any], how: str) -> bool:
    brief = _brief(record)
    return bool(brief["failures"] if how == "failed" else brief["calls"])


def _all_text(record: Mapping[str, Any]) -> str:
    texts = [record.get("prompt"), record.get("response"), record.get("reason"), record.get("row")]
    for turn in _turns(record):
        texts += [turn.get("name"), turn.get("text"), json.dumps(turn.get("arguments", {}), ensure_ascii=False)]
    return "\n".join(str(text) for text in texts if text is not None)


def _number(value: Any) -> float:
    """Return a number of a record, which has "NaN" and infinities as strings; NaN for other values."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
