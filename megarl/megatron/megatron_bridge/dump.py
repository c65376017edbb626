"""Print Megatron-Bridge's mappings and provider of models as JSON. `reader.py` starts this module as a separate process.

Standard input: `{"folder": a folder with megatron/bridge or "", "configs": [fields of a config.json, ...]}`. Standard output: a
list with the result of `dump` for each, in one line. Text that imports print goes to standard error.

Nothing is computed with Megatron-Bridge: names of parameters and fields of a configuration are read. Packages that it imports
and that are absent here (kernels, loggers) are therefore replaced by empty modules, and the dump names them.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from typing import Any

_MAY_BE_ABSENT = (
    "accelerate", "causal_conv1d", "datasets", "fla", "hydra", "mamba_ssm", "megatron.energon", "mlflow", "modelopt", "nemo_run",
    "nvidia_resiliency_ext", "omegaconf", "open_clip", "qwen_vl_utils", "timm", "transformer_engine",
    "transformer_engine_torch", "triton", "wandb",
)  # fmt: skip
"""Packages that Megatron-Bridge 0.3.1 and the parts of Megatron-Core under it import, and that names and fields do not need."""

_HOOKS = ("maybe_modify_loaded_hf_weight", "maybe_modify_converted_hf_weight", "build_conversion_tasks")


class _Absent(type):
    """The class of every name in an absent package: usable as a base class, as a decorator and as a namespace.

    A class that derives from such a name makes objects as usual.
    """

    def __getattr__(cls, name: str) -> Any:
        return _absent(name)

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        if cls.__bases__ != (object,):
            return super().__call__(*arguments, **named)
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else _absent(cls.__name__)


def _absent(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Absent(name, (), {})


class _AbsentPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds empty modules for the packages in `_MAY_BE_ABSENT`. Last on sys.meta_path: installed packages come first."""

    def __init__(self) -> None:
        self.packages: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        package = next((each for each in _MAY_BE_ABSENT if name == each or name.startswith(f"{each}.")), None)
        if package is None:
            return None
        self.packages.add(package)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__dict__.update(__version__="0", __getattr__=_absent)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave the module empty."""


class ConfigFields:
    """A model's configuration as Megatron-Bridge reads it: fields as attributes, sections too. Records the fields that are read."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = {
            name: ConfigFields(value) if name.endswith("_config") and isinstance(value, dict) else value
            for name, value in fields.items()
        }
        self._read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self._fields:
            raise AttributeError(name)
        self._read.add(name)
        return self._fields[name]


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold; a function or class as "module.name"."""
    if isinstance(value, functools.partial):
        return _plain(value.func)
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if callable(value):
        return f"{getattr(value, '__module__', '?')}.{getattr(value, '__qualname__', type(value).__name__)}"
    return str(value)


def _default(field: Any) -> Any:
    if field.default is not dataclasses.MISSING:
        return _plain(field.default)
    return _plain(field.default_factory()) if field.default_factory is not dataclasses.MISSING else None


def _mapping(mapping: Any) -> dict[str, Any]:
    """Return a mapping's class, names and other constructor arguments (`permute_dims`, for one)."""
    kind = type(mapping)
    options = {
        name: _plain(value)
        for name, value in vars(mapping).items()
        if name == "permute_dims" or (name.startswith("transpose") and value)
    }
    return {
        "type": kind.__name__,
        "module": kind.__module__,
        "parameter": mapping.megatron_param,
        "tensors": _plain(mapping.hf_param),
        "options": {name: value for name, value in options.items() if value is not None},
    }


def _provider(provider: Any) -> dict[str, Any]:
    from megatron.core.transformer import MLATransformerConfig

    defaults = {field.name: _default(field) for field in dataclasses.fields(MLATransformerConfig)}
    fields = {field.name: _plain(getattr(provider, field.name)) for field in dataclasses.fields(provider)}
    own = {field.name: _default(field) for field in dataclasses.fields(provider)}
    defines = next(each for each in type(provider).__mro__ if "provide" in vars(each))
    return {
        "type": type(provider).__name__,
        "provide": f"{defines.__module__}.{defines.__qualname__}",
        "fields": fields,
        "defaults": {**own, **{name: value for name, value in defaults.items() if name in own}},
    }


def find_absent(folder: str) -> _AbsentPackages:
    """Make Megatron-Bridge importable: from `folder`, if it is not "", with empty modules for absent packages."""
    if folder:
        sys.path.append(folder)  # `megatron` is a namespace of both packages
    import megatron.core  # noqa: F401  -- its own checks for absent packages come before the empty modules
    import transformers  # noqa: F401

    finder = _AbsentPackages()
    sys.meta_path.append(finder)
    return finder


def dump(finder: _AbsentPackages, config: dict[str, Any]) -> dict[str, Any]:
    """Return Megatron-Bridge's entry for a model: `version`, `bridges` (names of architectures), `absent` packages, and
    for an architecture that it knows its `bridge`, `hooks`, `mappings`, `provider` and the `read` fields, or an `error`.

    Raises ImportError if Megatron-Bridge cannot be imported.
    """
    from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge, get_model_bridge
    from megatron.bridge.package_info import __version__

    bridges = {
        key if isinstance(key, str) else key.__name__: make
        for key, make in get_model_bridge._exact_types.items()  # its dispatcher; AutoBridge reads the same
    }
    result: dict[str, Any] = {"version": __version__, "bridges": sorted(bridges)}
    name = next((each for each in config.get("architectures") or () if each in bridges), None)
    if name is not None:
        bridge, fields = bridges[name](None), ConfigFields(config)
        try:
            provider = bridge.provider_bridge(types.SimpleNamespace(config=fields))
            bridge.hf_config = fields  # its converter sets this before it asks for the mappings
            registry = bridge.mapping_registry()
        except Exception as error:  # noqa: BLE001 -- the package's code may raise anything at fields that it does not expect
            failed = {"bridge": type(bridge).__name__, "error": f"{type(error).__name__}: {error}"}
            return {**result, **failed, "absent": sorted(finder.packages)}
        result |= {
            "bridge": type(bridge).__name__,
            "hooks": [hook for hook in _HOOKS if getattr(type(bridge), hook) is not getattr(MegatronModelBridge, hook)],
            "mappings": [_mapping(mapping) for mapping in registry.mappings],
            "provider": _provider(provider),
            "read": sorted(fields._read),
        }
    return {**result, "absent": sorted(finder.packages)}


def main() -> None:
    """Read the request from standard input, and write the dump to standard output."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    finder = find_absent(request["folder"])
    print(json.dumps([dump(finder, config) for config in request["configs"]]), file=answer, flush=True)


if __name__ == "__main__":
    main()
