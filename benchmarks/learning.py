"""Run the recipes of recipes/tiny, with overrides from the command line, and write their results to docs/learned.json.

    bash launch/quickstart.sh                                # makes the initial model and the data
    python -m benchmarks.learning [NAME ...] [key=value ...]

NAME is a file in recipes/tiny without .yaml; the default is all of them. A run takes one or two minutes on two CPU cores.
docs/learned.json keeps the results of other recipes. ``python -m docs.generate.algorithms`` makes the table of
docs/algorithms.md from it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "recipes" / "tiny"
RESULTS = ROOT / "docs" / "learned.json"
RUNS = ROOT / "runs" / "learning"
MEASURES = ("eval/pass@1", "eval/loss")


def learned(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the number of steps and the first and last evaluation from a run's metrics."""
    measure = next(name for name in MEASURES if any(name in line for line in lines))
    values = [line[measure] for line in lines if measure in line]
    return {"measure": measure, "before": values[0], "after": values[-1], "steps": lines[-1]["step"]}


def learn(name: str, overrides: list[str]) -> dict[str, Any]:
    """Run ``recipes/tiny/NAME.yaml``. Raises CalledProcessError if the run fails; its output is on the console."""
    shutil.rmtree(RUNS / name, ignore_errors=True)
    settings = [f"name={name}", f"runs_dir={RUNS}", "train.save_at_end=false", *overrides]
    command = [sys.executable, "-m", "megarl", "train", str(RECIPES / f"{name}.yaml"), *settings]
    subprocess.run(command, cwd=ROOT, check=True)
    return learned([json.loads(line) for line in (RUNS / name / "metrics.jsonl").read_text().splitlines()])


def main() -> None:
    names = [word for word in sys.argv[1:] if "=" not in word]
    overrides = [word for word in sys.argv[1:] if "=" in word]
    for name in names or sorted(path.stem for path in RECIPES.glob("*.yaml")):
        result = learn(name, overrides)
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps({**results, name: result}, indent=1, sort_keys=True) + "\n")
        print(f"{name}: {result}", flush=True)


if __name__ == "__main__":
    main()
