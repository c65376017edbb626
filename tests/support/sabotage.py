"""The command line with a fault during a save: SABOTAGE=WHAT:STEP python -m tests.support.sabotage train ...

WHAT: `kill-between-files` (rank 1, which has written its tensors), `kill-before-state`, `kill-before-rename`,
`kill-before-retention` (each kills the process with SIGKILL), or `slow` (writing takes seconds longer).
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from megarl.checkpoint import folder as checkpoint
from megarl.checkpoint import saver
from megarl.cli import main


def kill(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before(module: Any, name: str, action: Any, when: Any) -> None:
    """Do `action` before calls of ``module.name`` for which `when` returns True."""
    function = getattr(module, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if when(*args):
            action()
        return function(*args, **kwargs)

    setattr(module, name, wrapped)


def sabotage(fault: str, step: str) -> None:
    name = checkpoint.checkpoint_name(int(step))
    if fault == "kill-before-state":
        before(checkpoint, "write_state", kill, lambda folder, *_: name in str(folder))
    elif fault == "kill-before-rename":
        before(checkpoint, "sync", kill, lambda path: path.name == f".{name}.partial")
    elif fault == "kill-before-retention":
        before(saver.checkpoint, "retain", kill, lambda folder, *_: (folder / name).exists())
    else:
        in_trainers(fault, name)


def in_trainers(fault: str, name: str) -> None:
    """Megatron can only be imported once a trainer has prepared its process: torch.save is patched instead, which
    writes random states, after the tensors and before the receipt."""
    import torch

    if fault == "kill-between-files":
        before(torch, "save", kill, lambda _, file: name in str(file.name) and os.environ["RANK"] == "1")
    else:
        assert fault == "slow"
        before(torch, "save", lambda: time.sleep(6), lambda _, file: name in str(file.name))


if __name__ == "__main__":
    sabotage(*os.environ["SABOTAGE"].split(":"))
    main()
