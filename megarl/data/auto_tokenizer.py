"""Load tokenizers with transformers' AutoTokenizer, without torch: most of AutoTokenizer's import is the import of torch."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from megarl.platform.installed import LateModule

VERSION = "5.19"  # of transformers, to which the names below belong
# Modules that AutoTokenizer's module or a configuration imports, and that import these names from another module if torch is
# installed. Tokenizers need none of them.
NEED_TORCH: dict[str, dict[str, str]] = {
    "transformers.generation.configuration_utils": {
        "WatermarkLogitsProcessor": "transformers.generation.logits_process",
        "SynthIDTextWatermarkLogitsProcessor": "transformers.generation.logits_process",
    },
    "transformers.image_utils": {"torch": "torch"},
    "transformers.modeling_gguf_pytorch_utils": {"torch": "torch"},
    "transformers.modeling_rope_utils": {"torch": "torch"},
}
# Modules that need a class to inherit from: they are imported again where models are used.
IMPORTED_AGAIN = ("transformers.models.auto.modeling_auto", "transformers.models.auto.auto_factory")


def late_class(module: str, name: str) -> Callable[..., Any]:
    """Return a function that imports a class and calls it."""

    def construct(*args: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **options)

    return construct


def load(directory: str, read_config: Callable[[], Any]) -> Any:
    """Return `transformers.AutoTokenizer` of a local directory; no code from the directory is run.

    read_config: reads transformers' configuration of the directory; its result is None where AutoTokenizer reads it. If this process
    has not imported torch, and transformers has the version `VERSION`, torch is not imported, unless the configuration imports it.
    """
    import transformers

    can_hide = "torch" not in sys.modules and transformers.__version__.startswith(f"{VERSION}.")
    with _without_torch() if can_hide else contextlib.nullcontext():
        auto = importlib.import_module("transformers.models.auto.tokenization_auto").AutoTokenizer
        return auto.from_pretrained(directory, config=read_config(), trust_remote_code=False, local_files_only=True)


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    """Hide torch from transformers until the block ends, or until a module imports torch itself.

    Configurations that check their values with `transformers.utils.type_validators` (Llama's) import torch and layers, which
    cannot be imported while torch is hidden.
    """
    import transformers.generation  # packages, which import nothing until a name is read, and which have fewer names without torch
    import transformers.integrations
    import transformers.utils

    hidden = _HiddenTorch(transformers.utils.is_torch_available)
    sys.meta_path.insert(0, hidden)
    try:
        yield
    finally:
        hidden.end()


class _HiddenTorch:
    """A finder of modules, which finds none, and ends the hiding before torch is imported."""

    def __init__(self, has_torch: Callable[[], bool]) -> None:
        """`has_torch`: is_torch_available of transformers."""
        self._has_torch, self._before = has_torch, set(sys.modules)
        for module in _with(has_torch):
            module.is_torch_available = _no_torch  # type: ignore[attr-defined]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torch":
            self.end()

    def end(self) -> None:
        """Show torch again. Names that modules lack after an import without torch are added: they import torch when they are used."""
        if self not in sys.meta_path:
            return
        sys.meta_path.remove(self)
        for module in _with(_no_torch):
            module.is_torch_available = self._has_torch  # type: ignore[attr-defined]
        for name in NEED_TORCH.keys() & sys.modules.keys() - self._before:
            for attribute, source in NEED_TORCH[name].items():
                value = LateModule(source) if attribute == source else late_class(source, attribute)
                setattr(sys.modules[name], attribute, value)
        for name in set(IMPORTED_AGAIN) & sys.modules.keys() - self._before:
            del sys.modules[name]
            parent, _, child = name.rpartition(".")
            vars(sys.modules[parent]).pop(child, None)


def _no_torch() -> bool:
    return False


def _with(function: Callable[[], bool]) -> list[ModuleType]:
    """Return the modules of transformers that have imported `function` as is_torch_available, with `transformers.utils`."""
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "transformers"]
    # Not import_utils, where it is defined: other functions of it decide which names transformers has.
    return [
        module
        for module in modules
        if vars(module).get("is_torch_available") is function and not module.__name__.endswith(".import_utils")
    ]
