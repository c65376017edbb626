"""What ``python -m megarl rehearse RECIPE [KEY=VALUE ...]`` does."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from megarl.commands.rehearse.changes import Change
from megarl.commands.rehearse.settings import STEPS
from megarl.commands.rehearse.tiny_copy import Twin, make_twin
from megarl.errors import as_input_error, plain
from megarl.observe.metrics import read_metrics
from megarl.preflight.run import LEAST_FREE_BYTES

REPORT, RECORD = "rehearsal.txt", "rehearsal.json"
_WIDTH = 100
_GAP = 0.05  # between engine and trainer, of a tiny model's tokens: in bfloat16 0.01 was measured at most
_PATIENCE = 60.0  # seconds that an interrupted training may take to end
_STOPPED = (130, 143)  # exit statuses of a training that was told to end, and has said so
_TITLES = {"kept": "as in the recipe", "reduced": "reduced", "left out": "could not be exercised"}


def rehearse(
    path: Path, overrides: Sequence[str], *, out: Path | None, processes: int | None, shape: str | None, resume: bool
) -> int:
    """Make the recipe's twin, train it for two steps, and, with `resume`, one more from the checkpoint in processes of their
    own; then say what ran as in the recipe and what did not. Returns the exit status: that of the training, or 1 where
    an update was skipped or a metric is no number.

    out: the folder for the twin and its run; None: a temporary one, which is left there to be looked at.
    """
    with as_input_error():
        folder = _folder(out)
        try:
            twin = make_twin(path, overrides, folder, processes=processes, shape=shape)
        except BaseException:
            for half in folder.iterdir():  # else the next call would be told that the folder is not empty
                shutil.rmtree(half) if half.is_dir() else half.unlink()
            raise
    print(f"the twin: {twin.path}", flush=True)
    began = time.monotonic()
    status = run_twin(twin, resume=resume)
    seconds = time.monotonic() - began
    (folder / REPORT).write_text(table(twin.changes, width=None) + "\n", encoding="utf-8")
    changes = [asdict(change) for change in twin.changes]
    text = json.dumps({"recipe": str(path), "status": status, "seconds": seconds, "changes": changes}, indent=1)
    (folder / RECORD).write_text(text + "\n", encoding="utf-8")
    if status:  # whose cause stands above: it is not to be searched for behind a table
        print(f"\nthe rehearsal failed: megarl train {twin.path} shows it again", file=sys.stderr)
        return status
    print(table(twin.changes, width=_WIDTH))
    print(f"\nthe same in full: {folder / REPORT}; the twin and its run stay there, too")
    wrong = faults(twin, STEPS + resume)
    for line in wrong:
        print(line, file=sys.stderr)
    again = ", one more after a resume" if resume else ""
    print(f"\n{STEPS} steps{again}, in {seconds:.0f} s: {'see above' if wrong else 'nothing is wrong'}")
    return 1 if wrong else 0


def run_twin(twin: Twin, *, resume: bool) -> int:
    """Train it, as a user would; returns the first exit status that is none of success."""
    environ = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "-m", "megarl", "train", str(twin.path)]
    status = _ended(command, environ)
    return (
        _ended([*command, f"train.steps={STEPS + 1}", "train.resume=auto"], environ)
        if resume and not status
        else status
    )


def _ended(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """The exit status of a process. Where this one is interrupted, that one is told, and let put away what it started; it
    says that it was stopped, and this one ends without a word of its own."""
    # In a session of its own: Ctrl-C would reach both, and both would say so.
    with subprocess.Popen(command, env=environ, start_new_session=True) as process:
        try:
            return process.wait()
        except BaseException as error:
            by_hand = isinstance(error, KeyboardInterrupt)
            process.send_signal(signal.SIGINT if by_hand else signal.SIGTERM)
            try:
                status = process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                status = None
            finally:  # also where this one is interrupted again
                if process.poll() is None:
                    process.kill()  # else it would be waited for without end
            if status in _STOPPED:
                raise SystemExit(status) from None
            raise


def faults(twin: Twin, steps: int) -> list[str]:
    """What its metrics show to be wrong, a line each."""
    lines = [
        line for line in read_metrics(Path(twin.recipe.runs_dir) / twin.recipe.name / "metrics.jsonl") if line["step"]
    ]
    found = []
    if [line["step"] for line in lines] != list(range(1, steps + 1)):
        found.append(f"metrics.jsonl has steps {[line['step'] for line in lines]}, not 1 to {steps}")
    for line in lines:
        for name, value in line.items():
            if isinstance(value, float) and not math.isfinite(value):
                found.append(f"step {line['step']}: {name} is {value}")
        fresh = not line.get("rollout/staleness_max")  # samples of earlier weights differ, and should
        if fresh and (gap := line.get("rollout/logprob_gap_mean", 0.0)) > _GAP:
            found.append(
                f"step {line['step']}: engine and trainer differ by {gap:.3f} in a token's log-prob, in the mean"
            )
        if skipped := [name for name in ("actor/skipped_updates", "critic/skipped_updates") if line.get(name)]:
            found.append(f"step {line['step']}: {', '.join(skipped)}")
    return found


def table(changes: Sequence[Change], width: int | None) -> str:
    """Three parts, each setting a line of at most `width` characters; None: whole."""
    parts = []
    for fate, title in _TITLES.items():
        rows = [change for change in changes if change.fate == fate]
        keys = max((len(change.key) for change in rows), default=0)
        parts.append(f"\n{title} ({len(rows)})")
        parts += [_cut(f"  {change.key:<{keys}}  {_words(change)}", width) for change in rows]
    return "\n".join(parts)


def _words(change: Change) -> str:
    if change.fate == "reduced":
        return f"{plain(change.given)} -> {plain(change.now)}: {change.why}"
    return plain(change.given) + (f": {change.why}" if change.why else "")


def _cut(line: str, width: int | None) -> str:
    return line if width is None or len(line) <= width else f"{line[: width - 3]}..."


def _folder(out: Path | None) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="megarl-rehearsal-")) if out is None else _made(out)
    free = shutil.disk_usage(folder).free
    if free < LEAST_FREE_BYTES:
        raise ValueError(
            f"{folder} has {free >> 20} MiB free, and a twin with its run needs {LEAST_FREE_BYTES >> 20}: free some space, "
            "or name another disk with --out"
        )
    return folder


def _made(out: Path) -> Path:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not empty: choose another --out, or move it away")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {out} cannot be made: {error.strerror}") from error
    return out.absolute()
