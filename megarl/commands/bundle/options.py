"""Choose what `megarl replay` does: repeat a run, pack a bundle, or repeat a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megarl.commands.bundle.pack import pack
from megarl.commands.bundle.repeat import repeat
from megarl.commands.bundle.unpack import is_bundle
from megarl.commands.replay import replay
from megarl.errors import InputError, as_input_error


def replay_or_bundle(
    run: Path, overrides: Sequence[str], *, name: str | None, bundle: Path | None, step: int | None, out: Path | None
) -> int:
    """Run `megarl replay` with its options; returns the exit status. InputError for options that do not fit together."""
    file = run.is_file()
    if file and not is_bundle(run):
        raise InputError(f"{run} is neither a run's directory nor a bundle (a .tar file)")
    unused = {
        "--name": name is not None and (file or bundle is not None),
        "--bundle": bundle is not None and file,
        "--step": step is not None and bundle is None,
        "--out": out is not None and not file,
        "settings (KEY=VALUE)": bool(overrides) and bundle is not None,
    }
    if wrong := [option for option, is_unused in unused.items() if is_unused]:
        doing = "repeating a bundle" if file else "packing a bundle" if bundle is not None else "repeating a run"
        raise InputError(f"{doing} takes no {' and no '.join(wrong)}; see megarl replay --help")
    if bundle is not None:
        with as_input_error():
            pack(run, bundle, step)
        return 0
    return repeat(run, out, overrides) if file else replay(run, name, overrides)
