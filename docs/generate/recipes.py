"""Write docs/recipes.md from the schema: ``python -m docs.generate.recipes`` (--check: only test if it is up to date)."""

from __future__ import annotations

import dataclasses
import re
import sys
import typing
from pathlib import Path
from typing import Any

from docs.generate import rehearsed
from megarl.recipe.load import section_types, yaml_word
from megarl.recipe.schema import Recipe

HEAD = """# Recipes

A recipe is a YAML file with the settings that differ from the defaults below:

```yaml
base: base/dapo.yaml
model: {path: /models/Qwen3-30B-A3B}
rollout: {samples_per_prompt: 16}
```

`base:` names a parent file or a list of parent files, relative to the recipe. Later parents override earlier ones, the
recipe overrides its parents, and `key=value` on the command line overrides everything. A run writes all its settings to
`runs/<name>/recipe.resolved.yaml`. A list with one entry needs no brackets: `train_files: train.parquet`.

An unknown key, a wrong type, a value out of bounds or an impossible combination ends the command before any process
starts. The message names the file, the key, the problem and the remedy (exit status 2).

`python -m docs.generate.recipes` writes this page from the dataclasses in `megarl/recipe/`, the only place with defaults.
"""


def document() -> str:
    """Return the text of the page."""
    top = [field for field in dataclasses.fields(Recipe) if not _is_section(Recipe, field.name)]
    parts = [HEAD, "## Top level\n", _table(Recipe, [field.name for field in top], "")]
    for field in dataclasses.fields(Recipe):
        if _is_section(Recipe, field.name):
            parts += _section(section_types(Recipe)[field.name], field.name)
    return "\n".join(parts) + "\n" + rehearsed.table(rehearsed.read_record())


def _section(section: type, name: str) -> list[str]:
    assert section.__doc__
    keys = [field.name for field in dataclasses.fields(section) if not _is_section(section, field.name)]
    parts = [f"\n## {name}\n\n{' '.join(section.__doc__.split())}\n", _table(section, keys, f"{name}.")]
    for field in dataclasses.fields(section):
        if _is_section(section, field.name):
            parts += _section(section_types(section)[field.name], f"{name}.{field.name}")
    return parts


def _is_section(owner: type, name: str) -> bool:
    return dataclasses.is_dataclass(section_types(owner)[name])


def _table(section: type, names: list[str], prefix: str) -> str:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    fields = {field.name: field for field in dataclasses.fields(section)}
    for name in names:
        field = fields[name]
        bounds = [f"{label} {field.metadata[bound]:g}" for bound, label in _BOUNDS if bound in field.metadata]
        meaning = field.metadata["doc"] + (f" ({', '.join(bounds)})" if bounds else "")
        cells = [f"`{prefix}{name}`", _type(section_types(section)[name]), _default(field), meaning]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


_BOUNDS = (("at_least", "at least"), ("above", "above"), ("at_most", "at most"))


def _type(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Union:
        return " | ".join("null" if part is type(None) else _type(part) for part in typing.get_args(kind))
    if typing.get_origin(kind) is typing.Literal:
        return " | ".join(f"`{yaml_word(value)}`" for value in typing.get_args(kind))
    return kind.__name__ if not typing.get_args(kind) else re.sub(r"(?:\w+\.)+(\w+)", r"\1", str(kind))


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"`{list(value) if isinstance(value, tuple) else value}`" if value != "" else "(empty)"


def main(arguments: list[str]) -> int:
    path = Path(__file__).resolve().parents[1] / "recipes.md"
    text = document()
    if "--check" in arguments:
        if path.read_text() != text:
            print(f"{path} is out of date: run python -m docs.generate.recipes", file=sys.stderr)
            return 1
        return 0
    path.write_text(text)
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
