"""docs/architecture.md: the calls from the command to the loss."""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path

from tests.test_architecture import ROW

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
LINE = re.compile(r"^\| \d+ \| `([\w.]+)` \| `(megarl/[\w/]+\.py)` \|$", re.MULTILINE)


def section(heading: str) -> str:
    return PAGE.read_text().split(f"## {heading}")[1].split("\n## ")[0]


def calls() -> list[tuple[str, str]]:
    """Return (function, file) of each line of the table."""
    return LINE.findall(section("From the command to the loss"))


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
    """Each link is an import and a use, under one name."""
    for function, file, module, name in (
        ("train_command", "megarl/commands/training.py", "megarl.commands.train_with_restarts", "run_train_command"),
        ("run_train_command", "megarl/commands/train_with_restarts.py", "megarl.train", "train"),
    ):
        body = body_of(function, file)
        imports = [node for node in ast.walk(body) if isinstance(node, ast.ImportFrom) and node.module == module]
        assert [(alias.name, alias.asname) for node in imports for alias in node.names] == [(name, None)], function
        assert name in names_in(body)


def test_the_page_is_short() -> None:
    """A reader reads it in a quarter of an hour."""
    words = [word for word in PAGE.read_text().split() if re.search(r"\w", word)]
    assert len(words) <= 3000, f"{len(words)} words"


def test_the_table_of_rooms_is_the_order_that_is_tested() -> None:
    rows = re.findall(r"^\| (\d+) \| (`[^|]+) \| [^|]+\|$", section("Rooms"), re.MULTILINE)
    names = [(name, int(number)) for number, cell in rows for name in re.findall(r"`([^`]+)`", cell)]
    rooms = {name.removesuffix("/").removesuffix(".py"): number for name, number in names}
    assert rooms == {room: number for room, number in ROW.items() if not room.startswith("__")}


def test_files_that_the_page_names_exist() -> None:
    """Names without a folder are in the folder that their sentence names."""
    files = [str(path.relative_to(ROOT)) for folder in ("megarl", "tests") for path in (ROOT / folder).rglob("*.py")]
    for name in re.findall(r"`([\w/]+\.py)`", PAGE.read_text()):
        assert any(f"/{file}".endswith(f"/{name}") for file in files), name
