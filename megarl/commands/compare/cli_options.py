"""Arguments of `megarl compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from megarl.errors import as_input_error

LogPath = typer.Argument(help="A run's directory, or a verl log: console output, JSONL or TensorBoard events.")


def compare_command(
    run_a: Annotated[Path, LogPath],
    run_b: Annotated[Path, LogPath],
    metric: Annotated[
        Optional[str], typer.Option(help="Metric to compare. Default: the reward, or the loss for SFT.")
    ] = None,
    metric_b: Annotated[Optional[str], typer.Option(help="Name of the metric in RUN_B. Default: the same.")] = None,
    max_error: Annotated[
        Optional[str],
        typer.Option(help="Allowed mean absolute error in percent (4 is 0.04). Default: 4 for reward, 2 for loss."),
    ] = None,
    steps: Annotated[str, typer.Option(metavar="FROM:TO", help="Steps to compare, both included.")] = ":",
    throughput_steps: Annotated[int, typer.Option(min=1, help="Number of first steps to compare throughput over.")] = 4,
    min_throughput_ratio: Annotated[
        Optional[float],
        typer.Option(min=0.0, help="Minimum ratio of RUN_A's to RUN_B's throughput. Default: reported, not checked."),
    ] = None,
    html: Annotated[Optional[Path], typer.Option(help="Also write the comparison as an HTML page.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Compare the reward or loss and the throughput of two runs. Exit status 0 within limits, 1 outside, 2 bad input."""
    from megarl.commands.compare.command import compare as run_compare
    from megarl.commands.compare.command import percentage, step_range
    from megarl.commands.compare.rules import CompareOptions

    with as_input_error():
        first, last = step_range(steps)
        error = None if max_error is None else percentage(max_error)
        options = CompareOptions(metric, metric_b, error, first, last, throughput_steps, min_throughput_ratio)
        within = run_compare(run_a, run_b, options, html=html, as_json=as_json)
    if not within:
        raise typer.Exit(1)
