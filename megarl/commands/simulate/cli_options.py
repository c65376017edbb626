"""Command-line options of `simulate`. Imports little, so that `--help` stays fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

DeviceFile = Annotated[
    Optional[Path],
    typer.Option(metavar="FILE", help="YAML file with more devices, as plan's --devices: see docs/planner.md."),
]
Devices = Annotated[
    Optional[int], typer.Option(help="Devices of engines and trainers together. Default: the recipe's.", min=2)
]
ResponseLengths = Annotated[
    Optional[str],
    typer.Option(
        metavar="MEDIAN,P99,MAX|RUN",
        help="Lengths of responses in tokens, or the directory of a run with samples. Default: spread evenly.",
    ),
]
Response = Annotated[
    Optional[float],
    typer.Option(metavar="TOKENS", help="Mean length of evenly spread responses. Default: half of the longest."),
]
Filtered = Annotated[
    Optional[str],
    typer.Option(
        metavar="SHARE|RUN",
        help="Share of the groups that dynamic sampling filters, e.g. 0.5, or the directory of a run. Default: that of the run in "
        "--lengths, else 0.5.",
    ),
]
MaxLag = Annotated[
    Optional[int],
    typer.Option(help="Largest lag of the recommended schedule, in weight versions. Default: any.", min=0),
]
Steps = Annotated[int, typer.Option(help="Measured steps of each simulation.", min=1)]
Seed = Annotated[int, typer.Option(help="Seed of the lengths.", min=0)]
Page = Annotated[Optional[Path], typer.Option(metavar="FILE", help="Also write the result as an HTML page.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]

STEPS = 40
