"""tokens/step_000123.jsonl: the tokens of a few samples, with what the run computed for each. docs/metrics.md describes the keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.observe.run_dir import RunDirectory


def token_path(run_dir: RunDirectory, step: int) -> Path:
    return run_dir.tokens / f"step_{step:06d}.jsonl"


def read_token_values(run_dir: RunDirectory, step: int, sample: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the record of a sample of samples/, or None if the run has not recorded its tokens."""
    path = token_path(run_dir, step)
    if not path.exists():
        return None
    place = (sample.get("group"), sample.get("index"))
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:  # cut short by a crash
                continue
            if isinstance(record, dict) and (record.get("group"), record.get("index")) == place:
                return record
    return None
