"""Arguments of `megarl serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer


def serve_command(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe (YAML file).")],
    overrides: Annotated[
        Optional[list[str]], typer.Argument(metavar="[KEY=VALUE]...", help="Settings that override the recipe's.")
    ] = None,
    name: Annotated[
        Optional[str], typer.Option(help="Name of the model for clients, e.g. Qwen/Qwen3-8B. Default: model.path.")
    ] = None,
    port: Annotated[Optional[int], typer.Option(min=0, max=65535, help="Port; 0: any. Default: 8451.")] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Others than 127.0.0.1 open the server to the network.")
    ] = "127.0.0.1",
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Serve the recipe's model to a training loop elsewhere: the operations of the Tinker API, for its client."""
    from megarl.commands.serve.command import serve_recipe
    from megarl.preflight.load import load_recipe

    serve_recipe(load_recipe(recipe, overrides or []), host=host, port=port, name=name)
