"""docs/architecture.md: the calls from the command to the loss."""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"^\| \d+ \| `([\w.]+)` \| `(megarl/[\w/]+\.py)` \|$", re.MULTILINE)


def calls() -> list[tuple[str, str]]:
    """Return (function, file) of each line of the table."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    return LINE.findall(page.split("## From the command to the loss")[1].split("\n## ")[0])


def body_of(function: str, file: str) -> ast.FunctionDef:
    """Return the definition of `function`, or of a method "Class.method", in `file`."""
    node: ast.AST = ast.parse((ROOT / file).read_text())
    for name in function.split("."):
        bodies = [
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.FunctionDef | ast.ClassDef) and child.name == name
        ]
        assert bodies, f"{file} has no {function}"
        node = bodies[0]
    assert isinstance(node, ast.FunctionDef)
    return node


def names_in(node: ast.AST) -> set[str]:
    attributes = {child.attr for child in ast.walk(node) if isinstance(child, ast.Attribute)}
    return attributes | {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def test_from_the_command_to_the_loss() -> None:
    """The page names at most 8 calls over 5 files; each function exists and uses the next."""
    chain = calls()
    assert chain[0] == ("train", "megarl/train.py") and chain[-1][0] == "objective"
    assert len(chain) <= 8 and len({file for _, file in chain}) <= 5
    for (function, file), (following, following_file) in pairwise(chain):
        body_of(following, following_file)
        assert following.split(".")[-1] in names_in(body_of(function, file)), f"{function} does not use {following}"


def test_the_train_command_calls_train() -> None:
    assert "train" in names_in(body_of("train_command", "megarl/cli.py"))
