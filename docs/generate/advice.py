"""Write docs/advice.md from the rules of advice: ``python -m docs.generate.advice``."""

from __future__ import annotations

from pathlib import Path

from megarl.observe.advice.advise import rules

PAGE = Path(__file__).resolve().parents[1] / "advice.md"

_HEAD = """# Advice

megarl looks for faults in what a run records, and names the setting to change:

```
advice:
  the entropy has collapsed: actor/entropy 0.61 in steps 1 to 5, 0.021 in steps 46 to 50; reward 0.24 in steps 1 to 5, 0.47 in steps 46 to 50
    try algorithm.clip_high=0.28 or algorithm.entropy_coef=0.001 or actor.optimizer.lr=5e-07
```

| place | when |
|---|---|
| the console, notices.jsonl | while the run trains: after 10 steps, then whenever it is a quarter longer; each fault once per start |
| the last lines of `megarl train` | at the end, also after Ctrl-C |
| summary.json, `advice` | at each end: a list of `rule`, `kind`, `what`, `evidence`, `changes` (`key=value`) and `note` |
| report.html, Overview of [`megarl view`](view.md) | for finished, killed and live runs; on live ones also parts that do not answer |

The most important finding comes first: parts that do not answer or fail, then learning, then speed. The first change is the
most promising one. Try one at a time, by adding it to the command. megarl changes nothing.

A healthy run has no advice. Rules compare the median of the first steps with the median of the last steps (a tenth of the
run, 5 to 20 steps each) and need 10 steps. "By more than noise" means 3 standard errors, with the noise between neighbouring
steps. Rules without their metrics are silent. Rules about rewards do not apply to SFT, DPO and distillation, and rules about
time leave out the first step of each start, and steps in which a worker died or the trainers waited for workers to restart.

`python -m docs.generate.advice` writes this page from `megarl/observe/advice/`.
"""
_TITLES = {"liveness": "Parts that do not answer or fail", "learning": "Learning", "speed": "Speed"}


def document() -> str:
    """Return the text of the page."""
    parts = [_HEAD]
    for kind, title in _TITLES.items():
        rows = [f"| `{rule.name}` | {rule.condition} | {rule.reason} |" for rule in rules() if rule.kind == kind]
        parts += [f"## {title}\n", "| rule | condition | reason |\n|---|---|---|", *rows, ""]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(document())
