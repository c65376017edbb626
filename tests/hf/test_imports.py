"""Every module of `megarl.hf` can be the first that a process imports."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import importlib, pkgutil, sys
import megarl.hf
modules = [module.name for module in pkgutil.walk_packages(megarl.hf.__path__, "megarl.hf.")]
assert "megarl.hf.families.tables.family_table" in modules
for name in modules:
    for loaded in [loaded for loaded in sys.modules if loaded.split(".")[0] == "megarl"]:
        del sys.modules[loaded]
    importlib.import_module(name)
"""


def test_each_module_can_be_imported_first() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
