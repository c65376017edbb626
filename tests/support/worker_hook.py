"""Calls functions in vLLM's workers: after the import of megarl's worker module, before a model is built.

tests/latent_site/sitecustomize.py and tests/older_vllm_site/sitecustomize.py use it in every process whose PYTHONPATH has
their folder.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

_WORKER = "megarl.engines.vllm.worker"


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, modules: tuple[str, ...]) -> None:
        self._loader, self._modules = loader, modules

    def create_module(self, spec: Any) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        for name in self._modules:
            importlib.import_module(name).install()


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, modules: tuple[str, ...]) -> None:
        self._modules = modules

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != _WORKER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = _Loader(spec.loader, self._modules)
        return spec


def install_in_workers(*modules: str) -> None:
    """Call `install()` of each of `modules` once megarl's worker module is imported in this process."""
    sys.meta_path.insert(0, _Finder(modules))
