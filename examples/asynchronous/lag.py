"""Print the age of the tokens that a run trained on, in weight versions, and the seconds of its steps.

python -m examples.asynchronous.lag runs/asynchronous
"""

import json
import sys
from pathlib import Path

COLUMNS = {
    "step": "step",
    "reward": "rollout/rewards/mean",
    "versions per sample": "rollout/spans_mean",
    "mean lag": "rollout/staleness_mean",
    "largest lag": "rollout/staleness_max",
    "s waiting": "timing_s/gen",
    "s": "timing_s/step",
}


def table(run: Path) -> str:
    """Return a line per step with the columns of `COLUMNS`; "-" where a step has no such metric."""
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [[number(step.get(metric)) for metric in COLUMNS.values()] for step in steps if step["step"] > 0]
    return "\n".join(
        "  ".join(cell.rjust(len(name)) for name, cell in zip(COLUMNS, row, strict=True))
        for row in [list(COLUMNS), *rows]
    )


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


if __name__ == "__main__":
    print(table(Path(sys.argv[1])))
