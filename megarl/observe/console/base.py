"""The base of all consoles."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


class Console:
    """Shows a run. All calls come from the controller. Methods that a console leaves out do nothing."""

    def phase(self, name: str | None) -> None:
        """Show `name` as the running phase; None: no phase is running."""

    def reached(self, text: str, seconds: float) -> None:
        """Show the progress of the start; `seconds`: time since its beginning."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a finished step; 0 is the evaluation before the first step."""

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the results of the evaluation after `step`, named eval/...; they are also in the step's metrics."""

    def checkpoint(self, step: int, path: Path) -> None:
        """Show that the checkpoint of `step` is complete."""

    def notice(self, text: str, warning: bool) -> None:
        """Print a message that stays on the screen."""

    def close(self) -> None:
        """Restore the terminal. Later calls of this method do nothing; notices are still printed."""

    def end(self, status: str, error: str | None) -> None:
        """Show the end of the session, as the last call. status: finished, failed or stopped. error: None if there is none."""
