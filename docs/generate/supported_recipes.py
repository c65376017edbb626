"""Write docs/supported_recipes.md from the headers of recipes: ``python -m docs.generate.supported_recipes``.

A recipe for a row of the public tables of supported models has lines ``# Name: text`` in its header. The other columns are
computed from the recipe.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from docs.generate import verl_rows
from megarl.preflight.load import load_recipe
from megarl.recipe.schema import Recipe

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "supported_recipes.md"

HEAD = """# Recipes for the models of verl's Ascend tables

There is one recipe for each row of the tables of verl's Ascend documentation that megarl can run, with the settings of the row's
public script, and one for each script of verl's precision report for Ascend, with the Megatron actor.
[Rows of verl's table](#rows-of-verls-table) lists all 41 rows of 2026-08. None has run at full size yet. Tests check that
each recipe loads, that its layout divides the model's real config.json (`megarl/hf/published/`), that its processes fill the
devices named in its header, that its batches divide, and that its tiny copy (`megarl rehearse RECIPE`) trains on two CPU cores.

Differences from the scripts:

- Megatron's layout replaces FSDP's sharding. The recipe's header explains the layout; `Shape` names the config.json.
- The size of a micro batch is a number of tokens (`actor.max_tokens_per_micro_batch`), and samples are always packed.
- `actor.mini_batches` is the number of mini batches per step, not their size. A warm-up counts optimizer steps, so it is the
  script's number of steps times `actor.mini_batches`.
- No recipe has MindSpeed's `use_flash_attn`, which the Megatron scripts set. If the platform does not set it, pass
  `megatron.extra.use_flash_attn=true` on the command line.
- Settings that neither megarl nor Megatron needs (remove-padding, torch.compile, FSDP options) have no counterpart.
- `megarl convert-config` ([from_verl.md](from_verl.md)) converts other scripts.

| row: algorithm, model, backend, engine | hardware, nodes x devices | recipe | trainers: TP, PP, CP, EP, ETP | engines x TP | prompts x samples, mini batches |
|---|---|---|---|---|---|
"""
TAIL = """
Rows with sglang use megarl's SGLang engine, which follows SGLang's sources and has not run on a device yet
([ascend.md](ascend.md#sglang) lists its packages). Samples have no seeds (`rollout.seeded: auto`): SGLang reads seeds only in its
deterministic mode.

## Rows of verl's table

{ROWS}

`python -m docs.generate.supported_recipes` writes this page.
"""


@dataclass(frozen=True)
class Row:
    """A recipe and its header. `per_node` is the number of devices per node."""

    path: Path
    name: str
    hardware: str
    nodes: int
    per_node: int
    shape: str

    @property
    def devices(self) -> int:
        return self.nodes * self.per_node


def rows() -> list[Row]:
    """Return the recipes that name a row, sorted by file. Raises ValueError if a header is incomplete."""
    return [row for path in sorted((ROOT / "recipes").glob("*.yaml")) if (row := _read(path))]


def document() -> str:
    """Return the text of the page."""
    return (
        HEAD
        + "\n".join(_line(row, load_recipe(row.path)) for row in rows())
        + "\n"
        + TAIL.format(ROWS=verl_rows.table())
    )


def _read(path: Path) -> Row | None:
    head = dict(re.findall(r"^# (Row|Hardware|Versions|Shape): (.*)$", path.read_text(), re.MULTILINE))
    if "Row" not in head:
        return None
    places = re.fullmatch(r"(.+), (\d+) x (\d+)", head.get("Hardware", ""))
    if places is None or not {"Versions", "Shape"} <= head.keys():
        raise ValueError(f"{path}: the header needs Row, Hardware (NAME, NODES x DEVICES), Versions and Shape")
    return Row(path, head["Row"], places[1], int(places[2]), int(places[3]), head["Shape"])


def _line(row: Row, recipe: Recipe) -> str:
    megatron, rollout = recipe.megatron, recipe.rollout
    sizes = [megatron.tensor_parallel, megatron.pipeline_parallel, megatron.context_parallel, megatron.expert_parallel]
    trainers = f"{recipe.cluster.trainers}: {', '.join(map(str, [*sizes, megatron.expert_tensor_parallel or 1]))}"
    generates = recipe.train.source == "rollout"
    batch = f"{recipe.data.prompts_per_step} x {rollout.samples_per_prompt if generates else 1}, {recipe.actor.mini_batches}"
    cells = [
        row.name.replace(" | ", ", "),
        f"{row.hardware}, {row.nodes} x {row.per_node}",
        f"[{row.path.name}](../recipes/{row.path.name})",
        trainers,
        _engines(recipe) if generates else "-",
        batch,
    ]
    return f"| {' | '.join(cells)} |"


def _engines(recipe: Recipe) -> str:
    rollout = recipe.rollout
    groups = f", in groups of {rollout.data_parallel}" if rollout.data_parallel > 1 else ""
    return f"{rollout.engines} x {rollout.tensor_parallel}{groups}"


if __name__ == "__main__":
    PAGE.write_text(document(), encoding="utf-8")
    print(f"wrote {PAGE}")
