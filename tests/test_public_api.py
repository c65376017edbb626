"""`megarl.train` stays the public function after the module of that name is imported."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import megarl.train as module
import megarl
from megarl import train
module.train.__code__ = (lambda recipe: recipe).__code__
assert train("a") == megarl.train("b").replace("b", "a") == module("a") == "a"
"""


def test_train_is_a_function_after_its_module_is_imported() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True)
