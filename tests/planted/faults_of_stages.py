"""Stages that pass, fail, raise, hang and die, in place of the stage of environment."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

CHILD = """import os, sys, time
def waiting_child():
    open(sys.argv[1], "w").write(str(os.getpid()))
    time.sleep(600)
waiting_child()"""


def passes(module: Any) -> None:
    def run(context: Any) -> None:
        context.at_most("gap", 0.01, limit=0.02, unit="nats")

    module.run = run


def fails(module: Any) -> None:
    def run(context: Any) -> None:
        context.at_most("gap", 0.01, limit=0.02, unit="nats")
        context.at_most("attention backward", 0.5, limit=0.01, cause="the kernel is wrong at [3, 1]")
        context.at_least("speed", float("nan"), limit=1.0)

    module.run = run


def raises(module: Any) -> None:
    def run(context: Any) -> None:
        context.doing("opening the engine")
        raise RuntimeError("no such engine")

    module.run = run


def hangs(module: Any) -> None:
    def run(context: Any) -> None:
        context.at_most("gap", 0.01, limit=0.02, unit="nats")
        context.doing("all_reduce over ranks 0 and 1")
        subprocess.Popen([sys.executable, "-c", CHILD, str(context.folder / "child.txt")])
        time.sleep(600)

    module.run = run


def dies(module: Any) -> None:
    def run(context: Any) -> None:
        context.doing("a kernel that crashes")
        os.kill(os.getpid(), 11)

    module.run = run


def reads_settings(module: Any) -> None:
    def run(context: Any) -> None:
        context.equal("recipe", context.recipe.name, "quickstart")
        context.not_run("device transport", "no device")

    module.run = run
