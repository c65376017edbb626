"""Options of the command `plan`, as the command line declares them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

DeviceName = Annotated[
    Optional[str], typer.Option(help="Device, e.g. 910B, H100. Unset: that of the `Hardware` in the recipe's head.")
]
Memory = Annotated[Optional[float], typer.Option(help="Its memory in GiB, in place of --device.", min=0)]
HostMemory = Annotated[Optional[float], typer.Option(help="GiB of a machine's host, in place of the device's.", min=0)]
DevicesFile = Annotated[
    Optional[Path], typer.Option(metavar="FILE", help="YAML with devices of your own: docs/planner.md.")
]
CalibrationFile = Annotated[
    Optional[Path],
    typer.Option(metavar="FILE", help="Rates and factors that the device reached: of --calibrate or accept."),
]
Response = Annotated[
    Optional[float],
    typer.Option(metavar="TOKENS", help="Mean response that seconds are estimated for; unset: half of the longest."),
]
CalibratedRun = Annotated[
    Optional[Path], typer.Option(metavar="RUN", help="Fit the device to a run of this recipe, and show how well.")
]
FittedFile = Annotated[
    Optional[Path], typer.Option(metavar="FILE", help="With --calibrate: the fit, for --calibration.")
]
Page = Annotated[Optional[Path], typer.Option(metavar="FILE", help="Also write the plan as a page.")]
AsJson = Annotated[bool, typer.Option("--json", help="The whole plan as an object, in place of the tables.")]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Refuse what cannot be checked here, e.g. data that is not on this machine."),
]
Search = Annotated[
    bool, typer.Option("--search", help="Look for the fastest layouts that fit, in place of the recipe's own.")
]
Seconds = Annotated[Optional[float], typer.Option(help="With --search: how long to look; unset: 120.", min=1)]
