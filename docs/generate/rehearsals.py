"""Plan and rehearse every recipe that changed since its last outcome, and write the table of docs/recipes.md.

``python -m docs.generate.rehearsals [NAME ...]`` only runs the named recipes (quickstart.yaml, tiny/grpo.yaml). Each
outcome is saved to docs/rehearsed.json at once, so an interrupted call can be repeated. ``--page`` runs no recipe,
``--plans`` and ``--rehearsals`` select one of the two commands, and ``--again`` includes unchanged recipes.
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

from docs.generate import recipes as recipes_page
from docs.generate import rehearsed
from docs.generate.rehearsed import NOT_RUN, REFUSED, Outcome, name_of, recipes
from megarl.commands.rehearse.command import RECORD

_TIMEOUT = 1800.0  # seconds per command


def plan(path: Path, outcome: Outcome) -> Outcome:
    """Run `megarl plan` for the hardware in the recipe's header, and record the verdict."""
    began = time.monotonic()
    done = _megarl("plan", str(path))
    seconds = time.monotonic() - began
    if done.returncode == 1 and not done.stdout.strip():  # the planner itself failed, and shows no plan
        print(done.stderr[-2000:], file=sys.stderr, flush=True)
        return replace(outcome, plan=f"failed, {seconds:.0f} s")
    verdict = {0: "passes", 1: "does not fit"}.get(done.returncode, "refused")
    return replace(outcome, plan=f"{verdict}, {seconds:.0f} s")


def rehearse(path: Path, outcome: Outcome) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="megarl-rehearsal-") as folder:
        began = time.monotonic()
        done = _megarl("rehearse", str(path), "--out", f"{folder}/tiny_copy")
        seconds = time.monotonic() - began
        record = Path(folder, "tiny_copy", RECORD)
        started = record.is_file()
        changes = json.loads(record.read_text(encoding="utf-8"))["changes"] if started else []
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr, flush=True)
    outcomes = [change["outcome"] for change in changes]
    return replace(
        outcome,
        rehearsal=REFUSED if done.returncode == 2 and not started else "failed" if done.returncode else "passed",
        seconds=round(seconds, 1),
        date=datetime.date.today().isoformat(),
        kept=outcomes.count("kept"),
        reduced=outcomes.count("reduced"),
        left_out=tuple(change["key"] for change in changes if change["outcome"] == "left out"),
    )


def _megarl(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megarl", *arguments]
    return subprocess.run(command, cwd=rehearsed.ROOT, capture_output=True, text=True, timeout=_TIMEOUT)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.generate.rehearsals", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    for option in ("--page", "--plans", "--rehearsals", "--again"):
        parser.add_argument(option, action="store_true")
    options = parser.parse_args(arguments)
    recipe_paths = {name_of(path): path for path in recipes()}
    if unknown := sorted({*options.names} - recipe_paths.keys()):
        parser.error(f"unknown recipe {', '.join(unknown)}; the recipes are {', '.join(recipe_paths)}")
    record = rehearsed.current(rehearsed.read_record())
    for name in [] if options.page else options.names or recipe_paths:
        for part, run in (("plan", plan), ("rehearsal", rehearse)):
            selected = getattr(options, f"{part}s") or not (options.plans or options.rehearsals)
            if selected and (options.again or getattr(record[name], part) == NOT_RUN):
                record[name] = run(recipe_paths[name], record[name])
                print(f"{name}: {part}: {getattr(record[name], part)}", flush=True)
                rehearsed.write_record(record)
    rehearsed.write_record(record)
    return recipes_page.main([])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
