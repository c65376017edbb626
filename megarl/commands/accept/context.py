"""The argument of a stage's `run`: settings, folders, and methods that record checks."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from megarl.commands.accept.result import NOT_RUN, REPORT, RecordedCheck, Value, check_line, limited
from megarl.commands.accept.settings import Settings
from megarl.recipe.schema import Recipe

CHECKS, DOING = "checks.jsonl", "doing.txt"


@dataclass
class StageContext:
    """The context of one stage. `shared` is a folder of all stages; `deadline` is its time limit by time.monotonic()."""

    settings: Settings
    folder: Path
    shared: Path
    deadline: float
    checks: list[RecordedCheck] = field(default_factory=list)

    @property
    def tiny(self) -> bool:
        """True on a CPU."""
        return self.settings.tiny

    @property
    def device(self) -> str:
        """The kind of device, as cluster.device names it."""
        return self.settings.device

    @property
    def devices(self) -> int:
        """Devices that a stage may use, on all nodes together."""
        return self.settings.devices * self.settings.nodes

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    @cached_property
    def recipe(self) -> Recipe | None:
        """The recipe of the command line, or None. Raises RecipeError if it does not load."""
        from megarl.preflight.load import load_recipe
        from megarl.recipe.hub_inputs import with_cached_inputs
        from megarl.recipe.paths import with_absolute_paths

        if not self.settings.recipe:
            return None
        recipe = load_recipe(Path(self.settings.recipe), list(self.settings.overrides))
        return with_cached_inputs(with_absolute_paths(recipe))

    def doing(self, text: str) -> None:
        """Record the current action. If the stage hangs or dies, its reason has this text."""
        (self.folder / DOING).write_text(text, encoding="utf-8")
        print(f"-- {text}", flush=True)

    def record(self, *checks: RecordedCheck) -> None:
        """Append checks, and write them to disk before returning."""
        with (self.folder / CHECKS).open("a", encoding="utf-8") as stream:
            for check in checks:
                stream.write(check_line(check) + "\n")
                print(f"{check.verdict:<8} {check.line()}", flush=True)
            stream.flush()
            os.fsync(stream.fileno())
        self.checks.extend(checks)

    def at_most(self, name: str, value: float, *, limit: float, unit: str = "", cause: str = "") -> None:
        self.record(limited(name, value, "<=", limit, unit=unit, cause=cause))

    def at_least(self, name: str, value: float, *, limit: float, unit: str = "", cause: str = "") -> None:
        self.record(limited(name, value, ">=", limit, unit=unit, cause=cause))

    def equal(self, name: str, value: Value, expected: Value, *, unit: str = "", cause: str = "") -> None:
        self.record(limited(name, value, "==", expected, unit=unit, cause=cause))

    def figure(self, name: str, value: Value, *, unit: str = "") -> None:
        self.record(RecordedCheck(name, REPORT, value, unit=unit))

    def not_run(self, name: str, reason: str) -> None:
        self.record(RecordedCheck(name, NOT_RUN, cause=reason))
