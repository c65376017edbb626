"""Arguments of `megarl convert-config`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from megarl.errors import as_input_error


def convert_config_command(
    file: Annotated[str, typer.Argument(metavar="FILE", help="verl script or command line; - reads standard input.")],
    settings: Annotated[
        Optional[list[str]],
        typer.Argument(
            metavar="[NAME=VALUE]...",
            help="Values of shell variables that the script does not set (1=8 sets $1); names with a dot are recipe settings.",
        ),
    ] = None,
    out: Annotated[Optional[Path], typer.Option(help="Recipe file to write. Default: standard output.")] = None,
    rows: Annotated[
        Optional[int], typer.Option(min=1, help="Number of training rows, to convert epochs to steps.")
    ] = None,
    accept: Annotated[
        Optional[list[str]],
        typer.Option(help="Option of verl to leave out although the run then computes something else; repeatable."),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Convert a verl script to a recipe without running it; stderr lists the options that have no counterpart."""
    from megarl.commands.convert_verl.command import convert_file

    with as_input_error():
        convert_file(file, settings or [], out=out, rows=rows, accepted=accept or [])
