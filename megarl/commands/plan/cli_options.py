"""Command-line options of `plan`. Imports little, so that `--help` stays fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

DeviceName = Annotated[
    Optional[str], typer.Option(help="Device, e.g. 910B, H100. Unset: from `# Hardware:` in the recipe's head.")
]
Memory = Annotated[Optional[float], typer.Option(help="Memory of the device in GiB, instead of the table's.", min=0)]
HostMemory = Annotated[
    Optional[float], typer.Option(help="Host memory of a machine in GiB, instead of the table's.", min=0)
]
DevicesFile = Annotated[
    Optional[Path], typer.Option(metavar="FILE", help="YAML file with more devices: see docs/planner.md.")
]
CalibrationFile = Annotated[
    Optional[Path],
    typer.Option(metavar="FILE", help="Measured rates and factors of the device, from --calibrate or accept."),
]
Response = Annotated[
    Optional[float],
    typer.Option(metavar="TOKENS", help="Mean response length for the estimate; unset: half of the longest."),
]
CalibratedRun = Annotated[
    Optional[Path],
    typer.Option(metavar="RUN", help="Fit the device to a run of this recipe, and print the deviations."),
]
FittedFile = Annotated[
    Optional[Path], typer.Option(metavar="FILE", help="With --calibrate: write the calibration, for --calibration.")
]
Page = Annotated[Optional[Path], typer.Option(metavar="FILE", help="Also write the plan as an HTML page.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the plan as JSON instead of tables.")]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Refuse checks that are impossible here, e.g. of data that is not on this machine."),
]
Search = Annotated[
    bool, typer.Option("--search", help="Search for the fastest layouts that fit, instead of planning the recipe's.")
]
Seconds = Annotated[Optional[float], typer.Option(help="With --search: seconds of the search; unset: 120.", min=1)]
