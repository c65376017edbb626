"""`megarl replay FILE.tar`: unpack a bundle, repeat its step, and compare the metrics or the failure."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import megarl
from megarl.checkpoint.next_commands import shown
from megarl.commands.bundle.contents import (
    FILES,
    FUNCTIONS,
    MODULES,
    RECORDED,
    Description,
    installed_libraries,
    portable_error,
)
from megarl.commands.bundle.unpack import unpack
from megarl.commands.replay import check_overrides, compare, run_starts, starts_of
from megarl.errors import as_input_error
from megarl.observe.run_dir import RunDirectory

REPLAY = "replay"  # folder of the new run


def repeat(file: Path, out: Path | None, overrides: Sequence[str]) -> int:
    """Unpack `file` into the new folder `out`, and repeat its step in the folder's `replay`.

    out: None for the file's path without its ending. Returns the exit status: 0 if all metrics are equal and, for a
    failed step, the replay fails with the same error; the training's status if only the replay fails; else 1.
    """
    with as_input_error():
        if out is None and not file.suffix:
            raise ValueError(f"{file} has no ending to leave out: name the folder to unpack it into (--out)")
        folder = Path(os.path.abspath(file.with_suffix("") if out is None else out))
        recorded, target = RunDirectory(folder / RECORDED), RunDirectory(folder / REPLAY)
        check_overrides(overrides)
        description = unpack(file, folder)
        starts = starts_of(recorded, overrides)
    _print(description, folder)
    modules = folder / MODULES
    paths = [str(modules), str(Path(megarl.__file__).parents[1]), os.environ.get("PYTHONPATH")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    # The modules' folder is the working directory, since the present one may have modules of the same names.
    status = run_starts(recorded, target, starts, overrides, environ, modules)
    if description.failure is None or (status and not target.summary.is_file()):  # without a summary, it did not start
        return status or compare(recorded, target, starts)
    differs = recorded.metrics.stat().st_size > 0 and compare(recorded, target, starts)
    failed_alike = _compare_failures(description.step, description.failure, target, status)
    return 0 if failed_alike and not differs else 1


def _print(description: Description, folder: Path) -> None:
    """Print what the bundle contains, and what differs here from the machine that packed it."""
    end = "" if description.failure is None else ", in which it failed"
    print(f"bundle of {description.run}, step {description.step}{end}: unpacked in {shown(folder)}")
    print(f"  it runs {description.processes}")
    code = [
        path for part in (folder / FILES / FUNCTIONS, folder / MODULES) for path in part.rglob("*") if path.is_file()
    ]
    if code:
        names = sorted(path.relative_to(folder).as_posix() for path in code)
        print(f"  it runs code of the bundle: {', '.join(names)}")
    for text in description.left_out:
        print(f"  not in the bundle: {text}")
    here = installed_libraries()
    for name, version in description.libraries.items():
        if here.get(name) != version:
            print(f"  {name} is {here.get(name, 'not installed')} here, and was {version}: the numbers may differ")


def _compare_failures(step: int, expected: str, target: RunDirectory, status: int) -> bool:
    """Print whether the replay failed as the recorded run did. `status`: of its training."""
    summary: dict[str, Any] = json.loads(target.summary.read_text())
    error = portable_error(str(summary["error"]), str(target.path)) if status else "no error"
    if _without_checkpoints(error) == _without_checkpoints(expected):
        print(f"step {step} fails as in the recorded run: {expected}")
        return True
    print(f"step {step} does not fail as in the recorded run:\n  recorded: {expected}\n  replay:   {error}")
    return False


def _without_checkpoints(error: str) -> list[str]:
    """Return the sentences of an error that do not advise which checkpoint to resume from: a replay has fewer checkpoints."""
    return [sentence.strip(". ") for sentence in re.split(r"(?<=\.)\s", error) if "checkpoint" not in sentence]
