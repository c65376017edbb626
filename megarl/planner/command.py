"""The command `plan`: what each stage of a recipe holds and needs, beside a device's memory."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from megarl import model_configs
from megarl.config.errors import InputError, blaming_input
from megarl.config.load import load_recipe
from megarl.config.schema import Recipe
from megarl.planner.stages import Stage, left_out, stages
from megarl.platform.memory import DEVICES
from megarl.registry import nearest

ASSUMED = (
    "Every micro batch is full (actor.max_tokens_per_micro_batch, or one sequence of the longest length), and the "
    "pipeline full of them.",
    "Experts are sent equally many tokens.",
    "Layers, attention and Adam are megarl's own on torch's kernels; fused ones of a device's own libraries keep less.",
    "Not counted: what communication libraries and drivers take, fragmentation, the engine, and another role on the same "
    "device.",
)


def plan(
    path: Path,
    overrides: Sequence[str],
    *,
    model: str | None,
    device: str | None,
    memory: float | None,
    as_json: bool,
) -> int:
    """Print the plan. 1 where some phase needs more than the device has, else 0."""
    recipe = load_recipe(path, overrides)
    limit = memory if memory is not None else _memory_of(device)
    with blaming_input():
        actor = _config(recipe.model.path, model, path)
        critic = actor
        if recipe.critic.model_path:
            critic = _config(recipe.critic.model_path, model, path)
        found = stages(recipe, actor, critic)
    notes = [*_notes(recipe, found), *ASSUMED]
    if as_json:
        print(json.dumps({"memory_gib": limit, "stages": [asdict(stage) for stage in found], "assumed": notes}))
    else:
        console = Console(width=100)
        console.print(_table(found, limit))
        for note in notes:
            console.print(f"- {note}", style="dim", highlight=False)
    return int(limit is not None and any(gib(_peak(stage)[1]) > limit for stage in found))


def _memory_of(device: str | None) -> float | None:
    if device is None or device in DEVICES:
        return DEVICES[device] if device else None
    near = nearest(device, list(DEVICES))
    hint = f" Nearest: {near}." if near else ""
    raise InputError(f"--device {device} is not known; {', '.join(DEVICES)} are.{hint} Others: --memory GIB.")


def _config(directory: str, model: str | None, recipe: Path) -> dict[str, Any]:
    """The model's config.json: of `model`, of `directory`, or of the shape that the recipe's head names."""
    if model is not None:
        return model_configs.read(model)
    own = Path(directory) / "config.json"
    if own.is_file():
        return dict(json.loads(own.read_text(encoding="utf-8")))
    shape = re.search(r"^# Shape: (.*)$", recipe.read_text(encoding="utf-8"), re.MULTILINE)
    if shape is None:
        raise InputError(
            f"{directory or 'model.path'} has no config.json here, and {recipe} names no Shape: give --model, one of "
            f"{', '.join(model_configs.names())}."
        )
    return model_configs.read(shape[1])


def _notes(recipe: Recipe, found: list[Stage]) -> list[str]:
    unknown = sorted({*left_out(recipe.megatron), *left_out(recipe.critic.megatron)})
    notes = [
        f"Activations are not known: {reason}." for reason in sorted({s.not_counted for s in found if s.not_counted})
    ]
    if unknown:
        notes.append(
            f"Left out of megatron.extra, since only what adapts Megatron to the device knows them: {', '.join(unknown)}."
        )
    if "swap_optimizer" in unknown:
        notes.append("With swap_optimizer, master weights and moments are on the host; its own parts were not run.")
    return notes


def _peak(stage: Stage) -> tuple[str, int]:
    """The phase that needs the most of the device, and its bytes."""
    return max(((name, phase.device) for name, phase in stage.phases.items()), key=lambda pair: pair[1])


_PASSES = ("log_probs", "update", "optimizer")


def _table(found: list[Stage], limit: float | None) -> Table:
    """What a rank holds, what each pass takes beyond, and the peak."""
    table = Table(
        title="GiB of a rank, by pipeline stage", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for name in ("stage", "params", "weights", "grads", "optim", "forward", "update", "Adam", "peak", "host"):
        table.add_column(name, justify="right" if name != "stage" else "left", no_wrap=True)
    if limit is not None:
        table.add_column(f"of {limit:g}", no_wrap=True)
    for stage in found:
        held, here = stage.held, stage.phases
        passes = [here[name].device - here["resident"].device for name in _PASSES if name in here]
        phase, most = _peak(stage)
        cells = [
            f"{stage.role} {stage.number}",
            f"{held.parameters / 1e9:.2f} B",
            *(f"{gib(size):.1f}" for size in (held.weights, held.gradients, held.masters + held.moments)),
            *([f"+{gib(size):.1f}" for size in passes] or ["?"] * len(_PASSES)),
            f"{gib(most):.1f}",
            f"{gib(max(one.host for one in stage.phases.values())):.1f}",
        ]
        if limit is not None:
            enough = "fits" if stage.activations else "not known"
            cells.append(enough if gib(most) <= limit else f"-{gib(most) - limit:.1f} {phase}")
        table.add_row(*cells)
    return table


def gib(size: int) -> float:
    return size / 2**30
