"""Write docs/recipes.md from the schema: ``python -m docs.generate.recipes`` (--check: only test if it is up to date)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from docs.generate import rehearsed
from megarl.commands.keys.describe import Section, sections

HEAD = """# Recipes

A recipe is a YAML file with the settings that differ from the defaults below:

```yaml
base: base/dapo.yaml
model: {path: /models/Qwen3-30B-A3B}
rollout: {samples_per_prompt: 16}
```

`base:` names a parent file or a list of parent files, relative to the recipe. Later parents override earlier ones, the
recipe overrides its parents, and `key=value` on the command line overrides everything. Values are YAML, but a text
stays as typed (`name=007`). Quote a text that begins with a quote, a bracket or one of `| > & * !`, or that YAML reads as null or
a switch (yes, no, on, off): `"name='yes'"`. In a file, quote a text that looks like a number.
A run writes all its settings to `runs/<name>/recipe.resolved.yaml`. A list with one entry needs no brackets: `train_files: train.parquet`.

An unknown key, a wrong type, a value out of bounds or an impossible combination ends the command before any process
starts. The message names the file, the key, the problem and the remedy (exit status 2).

`python -m docs.generate.recipes` writes this page from the dataclasses in `megarl/recipe/`, the only place with defaults.
"""


def document() -> str:
    """Return the text of the page."""
    parts = [HEAD]
    for section in sections():
        parts += [f"\n## {section.name}\n\n{section.meaning}\n" if section.name else "## Top level\n", _table(section)]
    return "\n".join(parts) + "\n" + rehearsed.table(rehearsed.read_record())


def _table(section: Section) -> str:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key in section.keys:
        meaning = key.meaning + (f" ({', '.join(key.bounds)})" if key.bounds else "")
        cells = [f"`{key.key}`", key.type, _default(key.default), meaning]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def _default(value: Any) -> str:
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
