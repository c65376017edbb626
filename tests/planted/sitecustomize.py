"""Plant a fault in every Python process that starts with this folder on its PYTHONPATH.

PLANTED_FAULT=MODULE:FUNCTION names a function of a module in this folder, which receives the patched module, and
PLANTED_IN=NAME the module to patch, as soon as that one has been imported. Production code has no hook for it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from typing import Any


class _Planting(importlib.abc.MetaPathFinder):
    """Finds PLANTED_IN as it would be found, and lets the fault change it after its import."""

    def __init__(self, target: str, fault: str) -> None:
        self.target, self.fault = target, fault

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self.target:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        assert spec is not None and spec.loader is not None, name
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            source, function = self.fault.split(":")
            getattr(importlib.import_module(source), function)(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if os.environ.get("PLANTED_IN"):
    import importlib.util

    sys.meta_path.insert(0, _Planting(os.environ["PLANTED_IN"], os.environ["PLANTED_FAULT"]))
