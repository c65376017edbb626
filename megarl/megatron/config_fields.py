"""Whether the names in `megatron.extra` are fields of Megatron's configuration, before a process starts."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from megarl.registry import nearest

_CLASSES = {
    "core/model_parallel_config.py": ("ModelParallelConfig",),
    "core/transformer/transformer_config.py": ("TransformerConfig", "MLATransformerConfig"),
}


def check_extra(extra: Iterable[str], section: str) -> None:
    """As `check_names`, for whatever configuration the installed Megatron has.

    Its source is read, not imported: that takes seconds, and wants the platform prepared. Says nothing where Megatron is
    not installed on this machine, or with MindSpeed, which adds fields at run time; trainers ask again.
    """
    known = fields_of_megatron()
    if known is None or importlib.util.find_spec("mindspeed") is not None:
        return
    check_names(extra, known, section)


def check_names(extra: Iterable[str], known: Iterable[str], section: str) -> None:
    """Raise ValueError for a name in `section`'s extra that is not `known`, with the nearest that is."""
    for name in extra:
        if name not in known:
            near = nearest(name, known)
            hint = f" Nearest: {near}." if near else ""
            raise ValueError(f"{section}.extra.{name} is no field of Megatron's TransformerConfig.{hint}")


@cache
def fields_of_megatron() -> frozenset[str] | None:
    """Fields of Megatron's TransformerConfig, and of the one for latent attention; None: Megatron is not installed."""
    found: Any = importlib.util.find_spec("megatron")
    for place in found.submodule_search_locations if found else ():
        if all((Path(place) / file).is_file() for file in _CLASSES):
            return frozenset(
                name for file, classes in _CLASSES.items() for name in _annotated(Path(place) / file, classes)
            )
    return None


def _annotated(file: Path, classes: tuple[str, ...]) -> list[str]:
    return [
        statement.target.id
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name in classes
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    ]
