"""Operators that MindSpeed compiles at their first use: in turn on a machine, whatever became of an earlier process.

Every rank of a node meets an operator at about the same time. torch builds it in one of them, and lets the others wait for
a file, `lock`, in the operator's folder to go (`torch.utils.cpp_extension`). A process that is killed while it compiles
leaves that file, and the next run would wait for ever. The lock here ends with its process.

Machines never share a build folder: nodes often share a home directory, and not every network file system shows the lock of
one node to another.
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
"""Builders below `mindspeed.op_builder` of the operators that recipes of ours and common settings of MindSpeed use."""


def separate_build_folder() -> None:
    """Let torch build below a folder of this machine and Python, unless the environment names one (TORCH_EXTENSIONS_DIR)."""
    from torch.utils.cpp_extension import get_default_build_root

    name = f"{socket.gethostname()}-py{sys.version_info.major}{sys.version_info.minor}"
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(get_default_build_root()) / name))


def build_in_turn(builder: Any) -> None:
    """Let the processes of a machine call `builder.load`, a method of MindSpeedOpBuilder, one after the other.

    The first one compiles; those behind it load what it has built. Idempotent.
    """
    load = builder.load
    if getattr(load, "in_turn", False):
        return
    loaded: dict[str, Any] = {}  # by operator: `load` is called whenever one is used

    def load_in_turn(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.name not in loaded:
            loaded[self.name] = _load(self, load, *args, **kwargs)
        return loaded[self.name]

    load_in_turn.in_turn = True  # type: ignore[attr-defined]
    builder.load = load_in_turn


def _load(builder: Any, load: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.cpp_extension import _get_build_directory

    folder = Path(_get_build_directory(builder.name, False))
    # No name that ends in "lock": MindSpeed removes the whole folder where it sees one (megatron_adaptor.py).
    with (folder.parent / f".{builder.name}.turn").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)  # whoever made it has died: every other process waits above
        return load(builder, *args, **kwargs)
