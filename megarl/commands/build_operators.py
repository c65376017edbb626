"""Compile MindSpeed's operators while building an image: `python -m megarl.commands.build_operators`.

torch stores them in TORCH_EXTENSIONS_DIR. If an operator fails to compile, the reason is printed and the exit status is
1. A run compiles missing operators in its first step.
"""

from __future__ import annotations

import importlib
import sys
import time

from megarl.platform.mindspeed.build_lock import OPERATORS
from megarl.platform.npu import NPUPlatform


def main() -> int:
    NPUPlatform().prepare()
    failed = 0
    for operator in OPERATORS:
        module, _, name = f"mindspeed.op_builder.{operator}".rpartition(".")
        began = time.perf_counter()
        try:
            getattr(importlib.import_module(module), name)().load(verbose=False)
        except Exception as error:  # noqa: BLE001 -- any compiler or loader error is reported, and the next one tried
            failed += 1
            print(f"{name} was not built: {type(error).__name__}: {error}", file=sys.stderr)
        else:
            print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
