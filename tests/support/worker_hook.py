"""Calls functions once a module is imported, for example in vLLM's workers: after megarl's worker module, before a model is built.

The modules sitecustomize.py of tests/latent_site, tests/older_vllm_site and benchmarks/paced_site use it, in every process with
their folder on its PYTHONPATH.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_WORKER = "megarl.engines.vllm.worker"


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, call: Callable[[ModuleType], None]) -> None:
        self._loader, self._call = loader, call

    def create_module(self, spec: Any) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._call(module)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, module: str, call: Callable[[ModuleType], None]) -> None:
        self._module, self._call = module, call

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self._module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = _Loader(spec.loader, self._call)
        return spec


def after_import(module: str, call: Callable[[ModuleType], None]) -> None:
    """Call `call` with `module` once it is imported in this process."""
    sys.meta_path.insert(0, _Finder(module, call))


def install_in_workers(*modules: str) -> None:
    """Call `install()` of each of `modules` once megarl's worker module is imported in this process."""

    def install(_: ModuleType) -> None:
        for name in modules:
            importlib.import_module(name).install()

    after_import(_WORKER, install)
