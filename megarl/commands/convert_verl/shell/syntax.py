"""Syntax trees of bash scripts, from shfmt (https://github.com/mvdan/sh). Parsing runs nothing of the script."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sysconfig
from typing import Any

from megarl.errors import InputError

Node = dict[str, Any]
"""A node as `shfmt --to-json` prints it, with two more keys: Line, its first line, and Source, its text."""

INSTALL = "pip install shfmt-py==4.2.0"
_SECONDS = 15  # a launch script takes some milliseconds; time and memory grow with the square of the nesting
_ERROR = re.compile(r"(?:.*:)?(\d+):\d+: (.*)")


def parse(text: str, line: int = 1) -> list[Node]:
    """Return the statements of a bash script. `line`: number of its first line.

    Raises InputError if bash could not parse the script either, or if shfmt is not installed.
    """
    source = text.replace("\r\n", "\n").encode("utf-8", "replace")
    command = [_shfmt(), "--to-json", "--language-dialect=bash"]
    try:
        done = subprocess.run(command, input=source, capture_output=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise InputError(f"shfmt has not parsed the script within {_SECONDS} s: it is nested too deeply") from error
    if done.returncode:
        message = done.stderr.decode(errors="replace").strip()
        if match := _ERROR.match(message):
            raise InputError(f"line {int(match[1]) + line - 1}: {match[2]}")
        if "max depth" in message:
            raise InputError("the script is nested too deeply")
        raise InputError(f"shfmt cannot parse the script: {message}")
    try:
        tree: Node = json.loads(done.stdout)
        _annotate(tree, source, line - 1)
    except RecursionError as error:
        raise InputError("the script is nested too deeply") from error
    return tree.get("Stmts", [])


def literal(word: Node) -> str | None:
    """Return the characters of a word without quotes and expansions, else None."""
    parts = word.get("Parts", [])
    return None if any(part["Type"] != "Lit" for part in parts) else "".join(part.get("Value", "") for part in parts)


def children(node: Node) -> list[Node]:
    """Return the nodes directly below `node`."""
    values = [item for value in node.values() for item in (value if isinstance(value, list) else [value])]
    return [value for value in values if isinstance(value, dict)]


def _shfmt() -> str:
    program = shutil.which("shfmt", path=sysconfig.get_path("scripts")) or shutil.which("shfmt")
    if program is None:
        raise InputError(f"convert-config parses scripts with shfmt, which is not installed: {INSTALL}")
    return program


def _annotate(node: Node, source: bytes, offset: int) -> None:
    start, end = node.pop("Pos", None), node.pop("End", None)
    if isinstance(node.get("Op"), int):
        raise InputError(f"the installed shfmt is older than version 4: {INSTALL}")
    for child in children(node):
        _annotate(child, source, offset)
    if start and end:
        node["Line"] = start["Line"] + offset
        node["Source"] = source[start["Offset"] : end["Offset"]].decode(errors="replace")
