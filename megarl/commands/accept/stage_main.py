"""The process of one stage: `python -m megarl.commands.accept.stage_main DIR NUMBER SECONDS`.

Exit status 0: `run` returned; 1: it raised (the last line of stderr says what)."""

from __future__ import annotations

import os
import resource
import sys
import time
import traceback
from pathlib import Path

from megarl.commands.accept.catalogue import STAGES
from megarl.commands.accept.context import StageContext
from megarl.commands.accept.settings import read_settings

ERROR = "error.txt"


def main() -> None:
    directory, number, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    stage = next(stage for stage in STAGES if stage.number == number)
    # A process that is aborted for its stacks must not leave the memory of a device on the disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    folder = stage.folder(directory)
    shared = directory / "shared"
    shared.mkdir(exist_ok=True)
    context = StageContext(read_settings(directory), folder, shared, time.monotonic() + seconds)
    status = 0
    try:
        stage.function()(context)
    except Exception as error:  # noqa: BLE001 - whatever a stage raises is its result
        traceback.print_exc()
        (folder / ERROR).write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads of libraries must not keep a stage that has its result


if __name__ == "__main__":
    main()
