"""Entry point of ``python -m megarl model``: facts about a model, without a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

app = typer.Typer(help="Facts about a model, without a recipe.", no_args_is_help=True, add_completion=False)


@app.callback()
def model() -> None:
    """Facts about a model, without a recipe."""


@app.command()
def check(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Folder or file of a config.json, a name on the hub (Qwen/Qwen3-8B), or a published model (Qwen3-8B).",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> int:
    """Say whether megarl trains a model, by its config.json, with all reasons against it. Exit status 1 if it does not."""
    from megarl.commands.model.check import check_model_of
    from megarl.errors import as_input_error

    with as_input_error():
        return check_model_of(model, as_json=as_json)


@app.command()
def table(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A model that megarl has no table for: as for `megarl model check`."),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The table, JSON, for the recipe's model.table.")],
    megatron_bridge: Annotated[
        Optional[str],
        typer.Option(
            "--megatron-bridge",
            metavar="FOLDER",
            help="Folder with Megatron-Bridge (pip install --no-deps --target FOLDER). Unset: this environment's.",
        ),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> int:
    """Write the table of a model's family from Megatron-Bridge, or say why it cannot be used. Exit status 1 if it cannot."""
    from megarl.atomic_files import check_new
    from megarl.commands.model.table import write_table
    from megarl.errors import as_input_error

    with as_input_error():
        check_new("--out", out)
        return write_table(model, out, megatron_bridge)
