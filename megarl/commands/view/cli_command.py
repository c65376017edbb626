"""Arguments of `megarl view`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer


def view_command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Directories of runs, live or finished.")],
    follow: Annotated[bool, typer.Option("--follow", help="Let the page show new lines within two seconds.")] = False,
    port: Annotated[
        Optional[int], typer.Option(min=0, max=65535, help="Port; 0: any. Default: the first free one from 8421 on.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Others than 127.0.0.1 open the page to the network.")
    ] = "127.0.0.1",
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Show runs on a page in the browser, also while they train: curves, time, samples token by token, recipes."""
    from megarl.commands.view.command import view

    view(runs, follow=follow, host=host, port=port)
