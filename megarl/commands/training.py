"""Options of the commands that train, and of others that read a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe (YAML file).")]
Overrides = Annotated[
    Optional[list[str]], typer.Argument(metavar="[KEY=VALUE]...", help="Settings that override the recipe's.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", help="Print only warnings, errors and the end (observe.console=quiet).")
]
Events = Annotated[
    bool,
    typer.Option(
        "--json", help="Print a JSON object per event, and nothing else (observe.console=json; docs/console.md)."
    ),
]


def train_command(
    recipe: RecipePath, overrides: Overrides = None, quiet: Quiet = False, as_json: Events = False, debug: Debug = False
) -> None:
    """Train a model by the recipe; all output is in runs/<name>/."""
    from megarl.commands.train_with_restarts import run_train_command

    settings = [*(overrides or []), *console_settings(quiet=quiet, as_json=as_json)]
    raise typer.Exit(run_train_command(recipe, settings, debug=debug))


def quickstart_command(overrides: Overrides = None, debug: Debug = False) -> None:
    """Train a tiny random Qwen3-MoE on word problems in the current folder: data, SFT, DAPO. Minutes on two CPU cores."""
    from megarl.commands.quickstart import quickstart

    quickstart(overrides or [])


def console_settings(*, quiet: bool, as_json: bool) -> list[str]:
    """Return the settings for --quiet and --json."""
    if quiet and as_json:
        raise typer.BadParameter("--quiet and --json exclude each other: choose one of them")
    return ["observe.console=quiet"] * quiet + ["observe.console=json"] * as_json
