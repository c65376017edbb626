"""Which recipes have been planned and rehearsed, and what came of it: `docs/rehearsed.json`, and the table of docs/recipes.md.

``python -m docs.generate.rehearsals`` fills the file. An outcome belongs to the recipe as it was then: by its digest.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from megarl.preflight.load import load_recipe
from megarl.recipe.header import shape_of
from megarl.recipe.load import flat_settings, to_yaml
from megarl.recipe.schema import Recipe

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs" / "rehearsed.json"
NOT_RUN = "not run"
_DEFAULTS = flat_settings(to_yaml(Recipe()))

HEAD = """
## Planned and rehearsed

What `python -m megarl plan` ([planner.md](planner.md)) and `python -m megarl rehearse` ([rehearsal.md](rehearsal.md)) say of each
recipe. A rehearsal trains the recipe's twin, its model and batches shrunk, on two CPU cores: evaluation where the recipe has
one, two steps with weight exchange and checkpoints, a third after a resume. It passes where all of it was done, no metric is
without a number, no update was skipped, and engine and trainer agree on the tokens' log-probs. Seconds are of machines
that did other work at the same time. The last column names what a CPU could not do: all else ran, as it is or reduced.
Models that read images had a stand-in for torchvision (`tests/stand_ins`), of which vLLM wants names alone.

| recipe | hardware | plan | rehearsal | settings kept, reduced | could not be exercised |
|---|---|---|---|---|---|
"""
TAIL = """
This table is made by `python -m docs.generate.rehearsals`, which plans and rehearses each recipe that has changed since.
"""


@dataclass(frozen=True)
class Outcome:
    """`digest`: of the recipe that it belongs to. `plan`: the words on it; `rehearsal`: passed, failed, or not run."""

    digest: str
    plan: str = NOT_RUN
    rehearsal: str = NOT_RUN
    seconds: float = 0.0  # that the rehearsal took
    date: str = ""  # of the rehearsal
    kept: int = 0
    reduced: int = 0
    left_out: tuple[str, ...] = ()


def recipes() -> list[Path]:
    """Those that say which model, data and algorithm, and so can be run."""
    folder = ROOT / "recipes"
    return [*sorted(folder.glob("*.yaml")), *sorted((folder / "tiny").glob("*.yaml"))]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT / "recipes").as_posix()


def digest_of(path: Path) -> str:
    """Of every setting that is not the default, whichever file says it, and of the shape. A new default changes nothing."""
    settings = {
        key: value for key, value in flat_settings(to_yaml(load_recipe(path))).items() if _DEFAULTS[key] != value
    }
    text = json.dumps([settings, shape_of(path)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_record() -> dict[str, Outcome]:
    """Of each recipe its outcome, as it is kept."""
    found = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}
    return {name: Outcome(**{**entry, "left_out": tuple(entry["left_out"])}) for name, entry in found.items()}


def current(record: dict[str, Outcome]) -> dict[str, Outcome]:
    """Of each recipe that there is: its outcome, or, of one that has changed since, none."""
    found = {}
    for path in recipes():
        digest = digest_of(path)
        kept = record.get(name_of(path), Outcome(digest))
        found[name_of(path)] = kept if kept.digest == digest else Outcome(digest)
    return found


def write_record(record: dict[str, Outcome]) -> None:
    text = json.dumps({name: asdict(record[name]) for name in sorted(record)}, indent=1)
    partial = RECORD.with_suffix(".partial")
    partial.write_text(text + "\n", encoding="utf-8")
    partial.rename(RECORD)


def table(record: dict[str, Outcome]) -> str:
    """A row for each recipe of `record`."""
    paths = {name_of(path): path for path in recipes()}
    return HEAD + "\n".join(_row(name, paths[name], record[name]) for name in paths if name in record) + "\n" + TAIL


def _row(name: str, path: Path, outcome: Outcome) -> str:
    ran = outcome.rehearsal != NOT_RUN
    cells = [
        f"[{name}](../recipes/{name})",
        _hardware(path, load_recipe(path)),
        outcome.plan,
        f"{outcome.rehearsal}, {outcome.seconds:.0f} s, {outcome.date}" if ran else NOT_RUN,
        f"{outcome.kept}, {outcome.reduced}" if ran else "-",
        ", ".join(f"`{key}`" for key in outcome.left_out) or "nothing" if ran else "-",
    ]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _hardware(path: Path, recipe: Recipe) -> str:
    """As the recipe's head says, or else by its processes."""
    said = re.search(r"^# Hardware: (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    if said:
        return said[1]
    return "two CPU cores" if recipe.cluster.device == "cpu" else f"{recipe.cluster.trainers} devices"
