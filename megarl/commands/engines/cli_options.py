"""Arguments of `megarl engines`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def engines_command(
    run_path: Annotated[Path, typer.Argument(metavar="RUN_DIRECTORY", help="Directory of a live run.")],
    request: Annotated[
        str, typer.Argument(metavar="[list | N | +N | -N]", help="List the engines, or change their number.")
    ] = "list",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """List the engines of a live run, or change their number while the run goes on."""
    from megarl.commands.engines.command import show_engines

    show_engines(run_path, request, as_json=as_json)
