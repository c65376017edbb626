"""Writes docs/supported_recipes.md from the heads of recipes.

``python -m docs.generate.supported_recipes``. A recipe for a row of the public tables of supported models says so in its head,
in lines of ``# Name: text``; the other columns are read off the recipe itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from megarl.preflight.load import load_recipe
from megarl.recipe.schema import Recipe

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "supported_recipes.md"

HEAD = """# Recipes for the models of verl's Ascend tables

One recipe for each row of the tables in verl's Ascend quick start, with the settings of the row's public script, and for both scripts
of verl's precision report for Ascend, on the Megatron actor. None has been run at its size yet. What tests hold: each loads, its layout divides the model's real
config.json (`megarl/model_configs/`), its processes fill the devices that its head names, its batches divide, and its twin
(`megarl rehearse RECIPE`: the model and batches shrunk, what the layout cuts cut in two) trains on two CPU cores.

What is different in all of them:

- FSDP's sharding becomes Megatron's layout, which the recipe's head explains; `Shape` there names the config.json.
- A micro batch is counted in tokens (`actor.max_tokens_per_micro_batch`), not in samples, and is always packed.
- A row's mini batch of prompts is `actor.mini_batches`, how many of them a step has; a warm-up of so many steps is that
  many times these, as the optimizer's steps are counted.
- MindSpeed's `use_flash_attn`, which the scripts on Megatron set, is in no recipe: `megatron.extra.use_flash_attn=true` on
  the command line sets it where the platform does not.
- Settings that neither megarl nor Megatron needs (remove-padding, torch.compile, FSDP's) have no counterpart.
- `megarl convert-config` ([from_verl.md](from_verl.md)) turns a script of your own into a recipe.

| row: algorithm, model, backend, engine | hardware, nodes x devices | recipe | trainers: TP, PP, CP, EP, ETP | engines x TP | prompts x samples, mini batches |
|---|---|---|---|---|---|
"""
TAIL = """
The row with sglang has megarl's SGLang engine, written to SGLang's sources and run on no device yet. In it a sample has a seed
of its own, so SGLang runs in its deterministic mode.

This page is made by `python -m docs.generate.supported_recipes`.
"""


@dataclass(frozen=True)
class Row:
    """A recipe and what its head says. `nodes`, `per_node`: machines, and devices of each."""

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
    """The recipes that name a row, in the order of their files. Raises ValueError for a head that lacks a line."""
    return [row for path in sorted((ROOT / "recipes").glob("*.yaml")) if (row := _read(path))]


def document() -> str:
    """The whole page."""
    return HEAD + "\n".join(_line(row, load_recipe(row.path)) for row in rows()) + "\n" + TAIL


def _read(path: Path) -> Row | None:
    head = dict(re.findall(r"^# (Row|Hardware|Versions|Shape): (.*)$", path.read_text(), re.MULTILINE))
    if "Row" not in head:
        return None
    places = re.fullmatch(r"(.+), (\d+) x (\d+)", head.get("Hardware", ""))
    if places is None or not {"Versions", "Shape"} <= head.keys():
        raise ValueError(f"{path}: the head needs Row, Hardware (NAME, NODES x DEVICES), Versions and Shape")
    return Row(path, head["Row"], places[1], int(places[2]), int(places[3]), head["Shape"])


def _line(row: Row, recipe: Recipe) -> str:
    megatron, rollout = recipe.megatron, recipe.rollout
    sizes = [megatron.tensor_parallel, megatron.pipeline_parallel, megatron.context_parallel, megatron.expert_parallel]
    learns = f"{recipe.cluster.trainers}: {', '.join(map(str, [*sizes, megatron.expert_tensor_parallel or 1]))}"
    samples = recipe.train.source == "rollout"
    batch = (
        f"{recipe.data.prompts_per_step} x {rollout.samples_per_prompt if samples else 1}, {recipe.actor.mini_batches}"
    )
    cells = [
        row.name.replace(" | ", ", "),
        f"{row.hardware}, {row.nodes} x {row.per_node}",
        f"[{row.path.name}](../recipes/{row.path.name})",
        learns,
        _engines(recipe) if samples else "-",
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
