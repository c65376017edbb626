"""`megarl report RUN`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megarl.errors import as_input_error


def report_command(
    run_path: Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory.")],
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Write RUN/report.html: the page of `megarl view` with the run's data, in one file that works offline."""
    with as_input_error():
        path = report(run_path)
    typer.echo(path)


def report(run: Path) -> Path:
    """Write the report of the run directory `run` and return its path. Raises ValueError if `run` has no run."""
    from megarl.observe.page.report import write_report
    from megarl.observe.run_dir import RunDirectory

    RunDirectory(run).require("report")
    return write_report(run)
