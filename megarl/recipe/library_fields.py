"""Read the fields of a library's class from its source, without an import, and check values against their annotations."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from megarl.registry import nearest

Fields = dict[str, ast.expr]
"""The annotation of each field."""

_WORDS: dict[str, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "true or false"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
}


def fields_of(file: Path, *classes: str) -> Fields:
    """Return the annotated fields of `classes`."""
    return {
        statement.target.id: statement.annotation
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name in classes
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }


def problem(owner: str, declared: ast.expr, value: Any) -> tuple[str, str] | None:
    """Return (problem, remedy) if `value` does not fit the annotation of a field; None if it fits or the type is not checked.

    Only bool, int, float and Literal are checked. `owner`: the owner of the field in the message.
    """
    kinds = _alternatives(declared)
    if value is None and "None" in map(ast.unparse, kinds):
        return None
    kinds = [kind for kind in kinds if ast.unparse(kind) != "None"]
    if len(kinds) != 1:
        return None
    (kind,) = kinds
    if checked := _WORDS.get(ast.unparse(kind)):
        types, words = checked
        fits = isinstance(value, types) and (bool in types or not isinstance(value, bool))
        return None if fits else (f"{owner} expects {words}", f"give {words}")
    if isinstance(kind, ast.Subscript) and ast.unparse(kind.value) == "Literal":
        choices = ast.literal_eval(kind.slice)
        choices = choices if isinstance(choices, tuple) else (choices,)
        if value not in choices:
            near = nearest(str(value), map(str, choices))
            return f"{owner} accepts {', '.join(map(str, choices))}", f"write {near}" if near else "write one of these"
    return None


def _alternatives(declared: ast.expr) -> list[ast.expr]:
    """Return the parts of `A | B`, `Optional[A]` and `Union[A, B]`."""
    if isinstance(declared, ast.BinOp) and isinstance(declared.op, ast.BitOr):
        return [*_alternatives(declared.left), *_alternatives(declared.right)]
    if isinstance(declared, ast.Subscript) and ast.unparse(declared.value) in ("Optional", "Union"):
        parts = declared.slice.elts if isinstance(declared.slice, ast.Tuple) else [declared.slice]
        none = [ast.Constant(None)] if ast.unparse(declared.value) == "Optional" else []
        return [*(kind for part in parts for kind in _alternatives(part)), *none]
    return [declared]
