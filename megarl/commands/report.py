"""Entry point of ``python -m megarl report RUN``."""

from __future__ import annotations

from pathlib import Path

from megarl.observe.report.page import write_report
from megarl.observe.run_dir import RunDirectory


def report(run: Path) -> Path:
    """Write the report of the run directory `run` and return its path. Raises ValueError if `run` has no run."""
    if not run.exists():
        raise ValueError(f"{run} does not exist. Give the directory of a run, as in: megarl report runs/my-run")
    if not run.is_dir():
        raise ValueError(f"{run} is a file. Give the directory of a run: {run.parent}?")
    if not RunDirectory(run).is_run_directory():
        inside = sorted(path.name for path in run.iterdir() if path.is_dir() and RunDirectory(path).is_run_directory())
        hint = f" Runs inside it: {', '.join(inside[:5])}." if inside else ""
        raise ValueError(f"{run} is not a run directory: it has no recipe.resolved.yaml and no metrics.jsonl.{hint}")
    return write_report(run)
