"""Writes docs/doctor.md from the checks and the sets of versions: ``python -m docs.generate.doctor``."""

from __future__ import annotations

from pathlib import Path

from megarl.commands.doctor.catalogue import CHECKS, MORE
from megarl.commands.doctor.versions import LEAST, SETS
from megarl.platform.version_sets import VersionSet

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "doctor.md"

_HEAD = """# Is this machine fit for the run?

```bash
python -m megarl doctor                                    # this machine
python -m megarl doctor recipes/quickstart.yaml            # and what the recipe needs: model, data, scorers, devices
python -m megarl doctor recipes/quickstart.yaml --json     # for scripts: a list of {check, status, text, remedy, host, rank}
bash launch/multinode.sh -- python -m megarl doctor recipes/quickstart.yaml     # on every node of a cluster
```

A line a check: `ok`, `warning` (it may do) or `FAIL` (it will not), what was found, and after `->` what to do. Exit status
0 where nothing failed, 1 where something did, 2 where the recipe does not load. Nothing is changed, started or installed;
files that are written to see whether they can be are deleted. It takes 10 to 30 seconds, most of them for the imports, and
with a recipe what reading its data takes, which the run then finds in the cache.

A check that raises is itself a `FAIL`, and one that does not end in time as well (a file system that hangs); the others
run. What does not concern a machine has no line there: the checks of one kind of device show where there are such devices or
their software, or where the recipe's `cluster.device` names them.

Over several nodes: where `RAY_ADDRESS` or `cluster.ray_address` names a Ray cluster, every node is looked at, in a process
with the environment that the run's processes would have there. Nodes with failures come first, and of each only what is
not ok is shown (`--json` has all). `--no-nodes` looks at this machine alone, `--nodes` looks for a Ray that runs on it.
The recipe's own part is read on the machine where the command runs, as a run's controller would read it.

This page is made by `python -m docs.generate.doctor` from `megarl/doctor/`.

## What is looked at
"""

_SETS = """
## Versions that go together

A machine is held to the set, of those for its platform, that most of what is installed is of. Other versions are a
warning: they may work, and nobody has seen it. The CPU's set is what megarl is tested with; the others are read from the
packages' own tables, and were not run here. They stand in `megarl/platform/*_kind.py`.
"""


def document() -> str:
    """The whole page."""
    checks = [f"| `{one.name}` | {one.looks_at} |" for one in CHECKS]
    more = [f"| `{name}` | {what} |" for name, what in MORE.items()]
    least = [f"- {one.package} before {one.version}: {one.what}" for one in LEAST]
    parts = [_HEAD, "| check | what it holds to what |\n|---|---|", *checks]
    parts += ["\nWith a recipe, or a cluster:\n", "| check | what it holds to what |\n|---|---|", *more]
    parts += [_SETS, _table(), "\nToo old, whatever the set:\n", *least]
    return "\n".join(parts) + "\n"


def _table() -> str:
    names = list(dict.fromkeys(name for one in SETS for name in one.packages))
    system = list(dict.fromkeys(name for one in SETS for name in one.system))
    rows = [
        ["", *(one.name for one in SETS)],
        ["---"] * (len(SETS) + 1),
        ["Python", *(", ".join(one.python) for one in SETS)],
        *([name, *(one.system.get(name, "") for one in SETS)] for name in system),
        *([name, *(_wanted(one, name) for one in SETS)] for name in names),
        ["how to get it", *map(_how, SETS)],
        ["remark", *(one.remark for one in SETS)],
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _how(one: VersionSet) -> str:
    return f"`{one.install}`" if one.install.startswith(("bash ", "pip ")) else one.install


def _wanted(one: VersionSet, name: str) -> str:
    if name not in one.packages:
        return ""
    return one.packages[name].removeprefix("==") or "any"


if __name__ == "__main__":
    PAGE.write_text(document())
