"""Arguments of `megarl init`. Options answer the questions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer


def init_command(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="Recipe to write; it must not exist.")] = Path(
        "recipe.yaml"
    ),
    task: Annotated[
        Optional[str], typer.Option(help="grpo, dapo (reinforcement learning), sft (demonstrations) or dpo (pairs).")
    ] = None,
    model: Annotated[
        Optional[str], typer.Option(help="Folder of a Hugging Face model, or a name on the hub, e.g. Qwen/Qwen3-8B.")
    ] = None,
    data: Annotated[
        Optional[str],
        typer.Option(help="Training rows: .parquet or .jsonl files with commas between them, or hf://org/name/split."),
    ] = None,
    devices: Annotated[
        Optional[str],
        typer.Option(help="Number and kind, e.g. '8 H100', '2 x 8 910B' (machines x devices), '8 cuda', '2 cpu'."),
    ] = None,
    reward: Annotated[
        Optional[str],
        typer.Option(
            help="For grpo and dapo: a scorer, your module:function or file.py:function, or rows: each row's data_source selects."
        ),
    ] = None,
    defaults: Annotated[
        bool, typer.Option("--defaults", help="Ask nothing: questions without an option have their defaults.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Ask at most five questions, and write a recipe that loads and plans. Options answer questions beforehand."""
    from megarl.commands.init.command import InitOptions, init

    init(file, InitOptions(task, model, data, devices, reward), ask=not defaults)
