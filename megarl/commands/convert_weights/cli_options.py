"""Arguments of `megarl convert-weights`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from megarl.errors import as_input_error


def convert_weights_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Hugging Face model with FP8 or MXFP4 weights.")],
    out: Annotated[
        Path,
        typer.Option(help="Folder for the bfloat16 model. Repeat the command to resume an interrupted conversion."),
    ],
    workers: Annotated[
        Optional[int],
        typer.Option(
            min=1, help="Number of processes, about 0.5 GB each. Default: 4, or the number of cores if lower."
        ),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Convert FP8 (DeepSeek-V3) or MXFP4 (gpt-oss) weights to bfloat16, which the trainer reads. Needs no accelerator."""
    from megarl.commands.convert_weights.command import convert

    with as_input_error():
        convert(folder, out, workers)
