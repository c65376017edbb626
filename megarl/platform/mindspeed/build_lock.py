"""Serialize MindSpeed's operator builds on a machine, with a lock that ends with its process.

MindSpeed compiles operators at first use, which all ranks of a node reach at about the same time. torch builds in one of
them; the others wait until a file `lock` in the operator's folder disappears (`torch.utils.cpp_extension`). A process that
is killed during the build leaves that file, and the next run would wait forever.

Each machine has a separate build folder: nodes often share a home directory, and not every network file system makes locks
visible to other nodes.
"""

from __future__ import annotations

import fcntl
import os
import socket
import sys
from pathlib import Path
from typing import Any

OPERATORS = (
    "FusionAttentionV2OpBuilder",
    "GMMOpBuilder",
    "GMMV2OpBuilder",
    "GroupMatmulAddOpBuilder",
    "MatmulAddOpBuilder",
    "MoeTokenPermuteOpBuilder",
    "MoeTokenUnpermuteOpBuilder",
    "RingAttentionUpdateOpBuilder",
    "RotaryPositionEmbeddingOpBuilder",
    "fused_adamw_v2_builder.FusedAdamWV2OpBuilder",
)
"""Builders in `mindspeed.op_builder` of the operators that megarl's recipes and common MindSpeed settings use."""


def separate_build_folder() -> None:
    """Set TORCH_EXTENSIONS_DIR to a folder of this machine and Python version, unless it is set."""
    from torch.utils.cpp_extension import get_default_build_root

    name = f"{socket.gethostname()}-py{sys.version_info.major}{sys.version_info.minor}"
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(get_default_build_root()) / name))


def build_in_turn(builder: Any) -> None:
    """Serialize calls of `builder.load`, a method of MindSpeedOpBuilder, among the processes of a machine. Idempotent.

    The first process compiles an operator; the others load the result.
    """
    load = builder.load
    if getattr(load, "in_turn", False):
        return
    loaded: dict[str, Any] = {}  # by operator: MindSpeed calls `load` at every use

    def load_in_turn(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.name not in loaded:
            loaded[self.name] = _load(self, load, *args, **kwargs)
        return loaded[self.name]

    load_in_turn.in_turn = True  # type: ignore[attr-defined]
    builder.load = load_in_turn


def _load(builder: Any, load: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.cpp_extension import _get_build_directory

    folder = Path(_get_build_directory(builder.name, False))
    # The name must not end in "lock": MindSpeed removes the whole folder if it finds such a file (megatron_adaptor.py).
    with (folder.parent / f".{builder.name}.turn").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)  # stale: living processes wait in flock
        return load(builder, *args, **kwargs)
