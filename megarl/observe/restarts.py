"""Messages between a training process and the command that restarts it (`train.restarts`).

With it, `megarl train` starts the training as a child process (megarl/commands/train_with_restarts.py). The two share a file for the
cause of an end, and a variable for the cause of the last restart.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from megarl.errors import ProcessFailure
from megarl.recipe.schema import TrainConfig

REPORT = "MEGARL_END_REPORT"  # file in which the training process writes its `End`
AFTER = "MEGARL_RESTARTED_AFTER"  # cause of the restart; empty at the first start


@dataclass(frozen=True)
class End:
    """Cause of the end of a training process. `process_failed`: a trainer, engine or other process died, hung or lost a connection."""

    cause: str
    process_failed: bool

    @classmethod
    def of(cls, error: BaseException) -> End:
        return cls(f"{type(error).__name__}: {error}", isinstance(error, ProcessFailure))

    @classmethod
    def read(cls, file: Path) -> End | None:
        """Return the reported end; None if the process ended without a report, as after a kill."""
        text = file.read_text() if file.exists() else ""
        return cls(**json.loads(text)) if text else None


def restarts_by_command() -> bool:
    """Return whether this is the child of a command that restarts the run: it prints how the run continues."""
    return REPORT in os.environ


def restart_cause() -> str:
    """Return why `megarl train` has started this run again; "" if it has not."""
    return os.environ.get(AFTER, "")


def restart_notices(train: TrainConfig) -> list[str]:
    """Return a notice of the cause of this restart, or that nothing will restart this run although `train.restarts` is set."""
    after = os.environ.get(AFTER)
    if after:
        return [f"restarted after: {after}"]
    if after is None and train.restarts and train.replay is None:
        return ["train.restarts has no effect here: only `megarl train` on Ray starts a run again"]
    return []


@contextlib.contextmanager
def reporting_end() -> Iterator[None]:
    """Write the cause to the file that `REPORT` names, if it is set, when the body raises."""
    file = os.environ.get(REPORT)
    try:
        yield
    except BaseException as error:
        if file is not None:
            Path(file).write_text(json.dumps(asdict(End.of(error))))
        raise
