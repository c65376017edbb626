"""Command-line options of `megarl replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

RunOrFile = Annotated[Path, typer.Argument(metavar="RUN|FILE", help="Directory of a run, or a bundle.")]
Name = Annotated[
    Optional[str],
    typer.Option(help="Name of the new run, beside RUN; with a slash: its path. Default: RUN's, with -replay."),
]
Bundle = Annotated[
    Optional[Path], typer.Option(help="Pack what repeats a step of RUN into this new .tar file, and run nothing.")
]
Step = Annotated[
    Optional[int],
    typer.Option(min=1, help="With --bundle: the step. Default: the one in which RUN failed, else its last one."),
]
Out = Annotated[Optional[Path], typer.Option(help="New folder to unpack FILE into. Default: FILE without its ending.")]
