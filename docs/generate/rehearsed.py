"""The outcomes of plans and rehearsals: `docs/rehearsed.json`, and the table of docs/recipes.md.

``python -m docs.generate.rehearsals`` writes the file. The digest of an outcome identifies the version of the recipe.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from megarl.preflight.load import load_recipe
from megarl.recipe.schema import Recipe
from megarl.recipe.text import settings_of, shape_of

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "docs" / "rehearsed.json"
NOT_RUN, REFUSED = "not run", "refused"
_DEFAULTS = settings_of(Recipe())

HEAD = """
## Planned and rehearsed

Results of `python -m megarl plan` ([planner.md](planner.md)) and `python -m megarl rehearse` ([rehearsal.md](rehearsal.md)) for
each recipe. A rehearsal trains a tiny copy of the recipe, with a small model and small batches, on two CPU cores: evaluation if
the recipe has one, two steps with weight sync and checkpoints, and a third step after a resume. It passes if all steps run, every
metric is finite, no update is skipped, and engine and trainer agree on the tokens' log-probs. The machines were busy with other
work, so the seconds are upper bounds. The last column lists settings that a CPU cannot run; all others ran, unchanged or reduced.
Refused are models that vLLM's CPU build cannot sample from ([models.md](models.md#not-supported)).
Models that read images ran with a stand-in for torchvision (`tests/stand_ins`); vLLM only needs its names.

| recipe | hardware | plan | rehearsal | settings kept, reduced | could not be exercised |
|---|---|---|---|---|---|
"""
TAIL = """
`python -m docs.generate.rehearsals` plans and rehearses each recipe that changed since its last outcome, and updates this table.
"""


@dataclass(frozen=True)
class Outcome:
    """The outcomes for one version of a recipe. `plan` is the verdict; `rehearsal` is passed, failed, refused, or not run."""

    digest: str
    plan: str = NOT_RUN
    rehearsal: str = NOT_RUN
    seconds: float = 0.0  # duration of the rehearsal
    date: str = ""  # date of the rehearsal
    kept: int = 0
    reduced: int = 0
    left_out: tuple[str, ...] = ()


def recipes() -> list[Path]:
    """Return the recipes that set model, data and algorithm, so that they can be run."""
    folder = ROOT / "recipes"
    return [path for part in ("", "cuda", "tiny") for path in sorted((folder / part).glob("*.yaml"))]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT / "recipes").as_posix()


def digest_of(path: Path) -> str:
    """Return a digest of the model's shape and of all settings that differ from their defaults.

    It does not depend on which base file sets a value, or on the values of the defaults.
    """
    settings = {key: value for key, value in settings_of(load_recipe(path)).items() if _DEFAULTS[key] != value}
    text = json.dumps([settings, shape_of(path)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_record() -> dict[str, Outcome]:
    """Read the recorded outcomes by recipe name."""
    entries = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}
    return {name: Outcome(**{**entry, "left_out": tuple(entry["left_out"])}) for name, entry in entries.items()}


def current(record: dict[str, Outcome]) -> dict[str, Outcome]:
    """Return an outcome for each existing recipe: the recorded one, or an empty one if the recipe changed."""
    outcomes = {}
    for path in recipes():
        digest = digest_of(path)
        kept = record.get(name_of(path), Outcome(digest))
        outcomes[name_of(path)] = kept if kept.digest == digest else Outcome(digest)
    return outcomes


def write_record(record: dict[str, Outcome]) -> None:
    text = json.dumps({name: asdict(record[name]) for name in sorted(record)}, indent=1)
    partial = RECORD.with_suffix(".partial")
    partial.write_text(text + "\n", encoding="utf-8")
    partial.rename(RECORD)


def table(record: dict[str, Outcome]) -> str:
    """Return the section of docs/recipes.md with one row per recipe of `record`."""
    paths = {name_of(path): path for path in recipes()}
    return HEAD + "\n".join(_row(name, paths[name], record[name]) for name in paths if name in record) + "\n" + TAIL


def _row(name: str, path: Path, outcome: Outcome) -> str:
    ran = outcome.rehearsal not in (NOT_RUN, REFUSED)
    cells = [
        f"[{name}](../recipes/{name})",
        _hardware(path, load_recipe(path)),
        outcome.plan,
        f"{outcome.rehearsal}, {outcome.seconds:.0f} s, {outcome.date}" if ran else outcome.rehearsal,
        f"{outcome.kept}, {outcome.reduced}" if ran else "-",
        ", ".join(f"`{key}`" for key in outcome.left_out) or "nothing" if ran else "-",
    ]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _hardware(path: Path, recipe: Recipe) -> str:
    """Return the hardware in the recipe's header, or the number of its devices."""
    header = re.search(r"^# Hardware: (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    if header:
        return header[1]
    return "two CPU cores" if recipe.cluster.device == "cpu" else f"{recipe.cluster.trainers} devices"
