"""Registries that map names in recipes to functions.

>>> LOSSES = Registry("policy loss")
>>> @LOSSES.register("reinforce")
... def reinforce(inputs, settings): ...
>>> LOSSES["reinforce"]  # an unknown name raises ValueError with the nearest registered name
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def import_user_module(module: str) -> ModuleType:
    """Import a user's module from the current directory or PYTHONPATH. Raises whatever the import raises."""
    _add_current_directory()
    return _with_modules_of_verl(lambda: importlib.import_module(module))


def _with_modules_of_verl(load: Callable[[], ModuleType]) -> ModuleType:
    """Call `load`. If it fails because verl's __init__ needs a package that is absent, call it again without that __init__.

    Reward functions and tools import single modules of verl, which need fewer packages than verl's trainers.
    """
    try:
        return load()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        spec = None if "verl" in sys.modules or missing == "verl" else importlib.util.find_spec("verl")
        if spec is None or not spec.submodule_search_locations:
            raise
        package = importlib.util.module_from_spec(spec)
        package.__doc__ = f"verl without its __init__, which needs {error.name}"
        sys.modules["verl"] = package
        return load()


def can_be_found(module: str) -> bool:
    """Return whether the package of a user's module is in the current directory or the environment. Nothing is imported."""
    _add_current_directory()
    return importlib.util.find_spec(module.partition(".")[0]) is not None


def _add_current_directory() -> None:
    """Let imports search the current directory: unlike python -m, an installed command does not add it."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)


def _import_file(file: Path) -> ModuleType:
    """Import a user's file once per process. A digest in the module's name keeps math.py from replacing `math`."""
    name = f"{file.stem}_{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    if not file.is_file():
        raise FileNotFoundError(f"no such file: {file.absolute()}")
    _add_current_directory()
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, file
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that `name` is most likely a misspelling of, or None."""
    lowered = {candidate.lower(): candidate for candidate in candidates}
    matches = difflib.get_close_matches(name.lower(), list(lowered), n=1, cutoff=0.6)
    return lowered[matches[0]] if matches else None


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown `name`: "; did you mean 'x'?", or "." without a near candidate."""
    close = nearest(name, candidates)
    return f"; did you mean {close!r}?" if close else "."


def import_function(path: str, label: str) -> Callable[..., Any]:
    """Import the function or class `path`: ``module:name`` as `import_user_module` does, or ``file.py:name``.

    Raises ValueError, with `label` in front of the path, if the import fails or the module has no such function.
    """
    module_name, _, name = path.partition(":")
    is_file = module_name.endswith(".py")
    try:
        module = (
            _with_modules_of_verl(lambda: _import_file(Path(module_name)))
            if is_file
            else import_user_module(module_name)
        )
    except Exception as error:
        places = "" if is_file else f". It is searched in {Path.cwd()} and on PYTHONPATH"
        raise ValueError(
            f"{label} {path!r}: importing {module_name!r} failed with {type(error).__name__}: {error}{places}"
        ) from error
    function: Any = getattr(module, name, None)
    if not callable(function):
        functions = [
            key for key, value in vars(module).items() if inspect.isfunction(value) or _is_class_of(value, module)
        ]
        raise ValueError(
            f"{label} {path!r}: {module_name} has no function {name!r}{did_you_mean(name, functions)} "
            f"Its functions and classes: {', '.join(sorted(functions)) or 'none'}"
        )
    return typing.cast("Callable[..., Any]", function)


def _is_class_of(value: Any, module: ModuleType) -> bool:
    return inspect.isclass(value) and value.__module__ == module.__name__


class Registry(Generic[T]):
    """A mapping from names to registered entries."""

    def __init__(self, kind: str):
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        def add(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self.kind} '{name}' is already registered: choose another name")
            self._entries[name] = entry
            return entry

        return add

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            raise ValueError(self.unknown(name))
        return self._entries[name]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        return sorted(self._entries)

    def unknown(self, name: str) -> str:
        """Return the error message for a name without an entry."""
        return f"unknown {self.kind} '{name}'{did_you_mean(name, self._entries)} Known: {', '.join(self.names())}."
