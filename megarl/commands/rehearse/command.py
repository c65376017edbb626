"""Entry point of ``python -m megarl rehearse RECIPE [KEY=VALUE ...]``."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from megarl.atomic_files import make_empty_folder
from megarl.commands.child import run_child
from megarl.commands.rehearse.changes import Change
from megarl.commands.rehearse.settings import STEPS
from megarl.commands.rehearse.tiny_copy import TinyCopy, make_tiny_copy
from megarl.errors import as_input_error, command_name, cut_end, plain
from megarl.observe.metrics import read_metrics
from megarl.preflight.run_directory import LEAST_FREE_BYTES

REPORT, RECORD = "rehearsal.txt", "rehearsal.json"
_WIDTH = 100
_MAX_GAP = 0.05  # mean log-prob difference between engine and trainer; at most 0.01 was measured in bfloat16
_TITLES = {"kept": "as in the recipe", "reduced": "reduced", "left out": "could not be exercised"}


def rehearse(
    path: Path, overrides: Sequence[str], *, out: Path | None, processes: int | None, shape: str | None, resume: bool
) -> int:
    """Train a tiny copy of the recipe for two steps, print its changes, and return the exit status.

    The exit status is the training's, or 1 if an update was skipped, a metric is not finite, or engine and trainer
    disagree. With `resume`, new processes train one more step from the checkpoint.

    out: the folder for the tiny copy and its run; None: a temporary folder, which is kept.
    """
    with as_input_error():
        folder = _folder(out)
        try:
            tiny = make_tiny_copy(path, overrides, folder, processes=processes, shape=shape)
        except BaseException:
            for incomplete in folder.iterdir():  # otherwise the next call fails because the folder is not empty
                shutil.rmtree(incomplete) if incomplete.is_dir() else incomplete.unlink()
            if out is None:
                folder.rmdir()
            raise
    print(f"tiny copy: {tiny.path}", flush=True)
    began = time.monotonic()
    status, repeat = train_copy(tiny, resume=resume)
    seconds = time.monotonic() - began
    (folder / REPORT).write_text(table(tiny.changes, width=None) + "\n", encoding="utf-8")
    changes = [vars(change) for change in tiny.changes]
    text = json.dumps({"recipe": str(path), "status": status, "seconds": seconds, "changes": changes}, indent=1)
    (folder / RECORD).write_text(text + "\n", encoding="utf-8")
    if status:  # print no table: it would hide the training's error message
        print(f"\nthe rehearsal failed; to repeat the failure: {repeat}", file=sys.stderr)
        return status
    print(table(tiny.changes, width=_WIDTH))
    print(f"\nfull table: {folder / REPORT}; the tiny copy and its run are in the same folder")
    problems = faults(tiny, STEPS + resume)
    for line in problems:
        print(line, file=sys.stderr)
    resumed = ", and one more after a resume" if resume else ""
    print(f"\n{STEPS} steps{resumed}, in {seconds:.0f} s: {'see the problems above' if problems else 'no problems'}")
    return 1 if problems else 0


def train_copy(tiny: TinyCopy, *, resume: bool) -> tuple[int, str]:
    """Run `megarl train` on the tiny copy, and once more to resume it.

    Return the first exit status that is not 0, and a command that repeats the last run. The first run is repeated under
    another name, since its own folder may hold results.
    """
    environ = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command, resumed = ["train", str(tiny.path)], [f"train.steps={STEPS + 1}", "train.resume=auto"]
    status, repeat = run_child([sys.executable, "-m", "megarl", *command], environ), ["name=again"]
    if resume and not status:
        status, repeat = run_child([sys.executable, "-m", "megarl", *command, *resumed], environ), resumed
    return status, f"{command_name()} {shlex.join([*command, *repeat])}"


def faults(tiny: TinyCopy, steps: int) -> list[str]:
    """Return the problems in the run's metrics, one line each."""
    metrics = Path(tiny.recipe.runs_dir) / tiny.recipe.name / "metrics.jsonl"
    lines = [line for line in read_metrics(metrics) if line["step"]]
    problems = []
    if [line["step"] for line in lines] != list(range(1, steps + 1)):
        problems.append(f"metrics.jsonl has steps {[line['step'] for line in lines]}, not 1 to {steps}")
    for line in lines:
        for name, value in line.items():
            if isinstance(value, float) and not math.isfinite(value):
                problems.append(f"step {line['step']}: {name} is {value}")
        fresh = not line.get("rollout/staleness_max")  # samples of earlier weights are expected to differ
        if fresh and (gap := line.get("rollout/logprob_gap_mean", 0.0)) > _MAX_GAP:
            problems.append(
                f"step {line['step']}: log-probs of engine and trainer differ by {gap:.3f} on average over tokens"
            )
        if skipped := [name for name in ("actor/skipped_updates", "critic/skipped_updates") if line.get(name)]:
            problems.append(f"step {line['step']}: {', '.join(skipped)}")
    return problems


def table(changes: Sequence[Change], width: int | None) -> str:
    """Format the changes in three sections, one line per setting, of at most `width` characters (None: no limit)."""
    parts = []
    for outcome, title in _TITLES.items():
        rows = [change for change in changes if change.outcome == outcome]
        keys = max((len(change.key) for change in rows), default=0)
        parts.append(f"\n{title} ({len(rows)})")
        lines = [f"  {change.key:<{keys}}  {_describe(change)}" for change in rows]
        parts += lines if width is None else [cut_end(line, width) for line in lines]
    return "\n".join(parts)


def _describe(change: Change) -> str:
    if change.outcome == "reduced":
        return f"{plain(change.before)} -> {plain(change.after)}: {change.reason}"
    return plain(change.before) + (f": {change.reason}" if change.reason else "")


def _folder(out: Path | None) -> Path:
    folder = Path(tempfile.gettempdir())
    if out is not None:
        make_empty_folder("--out", out)
        folder = out.absolute()
    free = shutil.disk_usage(folder).free
    if free < LEAST_FREE_BYTES:
        raise ValueError(
            f"{folder} has {free >> 20} MiB free, and a tiny copy with its run needs {LEAST_FREE_BYTES >> 20}: free some "
            "space, or choose another disk with --out"
        )
    return Path(tempfile.mkdtemp(prefix="megarl-rehearsal-")) if out is None else folder
