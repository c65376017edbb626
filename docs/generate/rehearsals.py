"""Plans and rehearses every recipe that has changed since it last was, and writes the table of docs/recipes.md.

``python -m docs.generate.rehearsals [NAME ...]``: of those recipes alone (quickstart.yaml, tiny/grpo.yaml). Each outcome is
kept in docs/rehearsed.json as soon as it is known, so that it can be interrupted and goes on where it was.
``--page`` runs nothing; ``--plans`` and ``--rehearsals`` one of the two; ``--again`` also what has not changed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from docs.generate import recipes as document
from docs.generate import rehearsed
from docs.generate.rehearsed import NOT_RUN, Outcome, name_of, recipes
from megarl.commands.rehearse.command import RECORD

_PATIENCE = 1800.0  # seconds that one may take


def plan(path: Path, outcome: Outcome) -> Outcome:
    """What `plan` says of the recipe, on the hardware that its head names."""
    began = time.monotonic()
    done = _megarl("plan", str(path))
    seconds = time.monotonic() - began
    words = {0: "passes", 1: "does not fit"}.get(done.returncode, "refused")
    return replace(outcome, plan=f"{words}, {seconds:.0f} s")


def rehearse(path: Path, outcome: Outcome) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="megarl-rehearsal-") as folder:
        began = time.monotonic()
        done = _megarl("rehearse", str(path), "--out", f"{folder}/twin")
        seconds = time.monotonic() - began
        record = Path(folder, "twin", RECORD)
        changes = json.loads(record.read_text(encoding="utf-8"))["changes"] if record.is_file() else []
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr, flush=True)
    fates = [change["fate"] for change in changes]
    return replace(
        outcome,
        rehearsal="failed" if done.returncode else "passed",
        seconds=round(seconds, 1),
        date=datetime.date.today().isoformat(),
        kept=fates.count("kept"),
        reduced=fates.count("reduced"),
        left_out=tuple(change["key"] for change in changes if change["fate"] == "left out"),
    )


def _megarl(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megarl", *arguments]
    return subprocess.run(command, cwd=rehearsed.ROOT, capture_output=True, text=True, timeout=_PATIENCE)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.generate.rehearsals", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    for option in ("--page", "--plans", "--rehearsals", "--again"):
        parser.add_argument(option, action="store_true")
    given = parser.parse_args(arguments)
    known = {name_of(path): path for path in recipes()}
    if unknown := sorted({*given.names} - known.keys()):
        parser.error(f"there is no recipe {', '.join(unknown)}; there are {', '.join(known)}")
    record = rehearsed.current(rehearsed.read_record())
    for name in [] if given.page else given.names or known:
        for part, run in (("plan", plan), ("rehearsal", rehearse)):
            wanted = getattr(given, f"{part}s") or not (given.plans or given.rehearsals)
            if wanted and (given.again or getattr(record[name], part) == NOT_RUN):
                record[name] = run(known[name], record[name])
                print(f"{name}: {part}: {getattr(record[name], part)}", flush=True)
                rehearsed.write_record(record)
    rehearsed.write_record(record)
    return document.main([])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
