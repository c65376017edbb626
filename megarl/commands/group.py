"""The group of all commands: errors that typer would hide reach `guarded`."""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from megarl.exit_status import HiddenFromTyper
from megarl.observe.stdout import discard, has_no_reader


class CommandGroup(TyperGroup):
    """Runs a command. A command that prints for a reader that has ended (`megarl keys | head`) ends quietly, with status 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            if not has_no_reader():  # the pipe is another one, e.g. to a process of the run
                raise HiddenFromTyper(error) from error
            discard(sys.stdout)
            raise typer.Exit(1) from error
        except EOFError as error:
            raise HiddenFromTyper(error) from error
