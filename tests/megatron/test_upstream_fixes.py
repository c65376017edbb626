"""megarl's fixes for other packages are still needed, and docs/upstream.md lists each of them.

If `test_defect_is_still_there` fails after an upgrade, a fix may be removed: see docs/upstream.md.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.upstream_defects import DEFECTS

ROOT = Path(__file__).parents[2]
THIS = "tests/megatron/test_upstream_fixes.py"


@pytest.fixture(scope="module")
def upstream() -> dict[str, Any]:
    """`defects`: the traceback of each check, None while the defect exists."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.upstream_defects"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(result, dict)
    return result


@pytest.mark.stack
@pytest.mark.parametrize("name", DEFECTS)
def test_defect_is_still_there(upstream: dict[str, Any], name: str) -> None:
    defect = upstream["defects"][name]
    assert defect is None, f"{name} has changed upstream: see docs/upstream.md\n{defect}"


def rows() -> list[dict[str, str]]:
    """The table of docs/upstream.md."""
    lines = [line for line in (ROOT / "docs/upstream.md").read_text().splitlines() if line.startswith("|")]
    head, _, *body = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [dict(zip(head, cells, strict=True)) for cells in body]


def functions(file: Path) -> set[str]:
    """Names of the functions, methods included, of a source file."""
    tree = ast.parse(file.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def test_every_row_names_a_fix_and_a_test() -> None:
    for row in rows():
        assert row["version"] and row["symptom"], row
        for cell in ("fix", "test"):
            places = re.findall(r"`([^`:]+)::?([^`:\[]+)(?:\[(\w+)\])?`", row[cell])
            assert places, f"{cell} is not `file:function`: {row[cell]}"
            for file, name, parameter in places:
                path = ROOT / (file if cell == "test" else f"megarl/{file}")
                assert path.is_file() and name in functions(path), f"{path} has no function {name}"
                assert file != THIS or parameter in DEFECTS, f"unknown defect {parameter}"


def test_every_defect_has_one_row() -> None:
    named = re.findall(r"test_defect_is_still_there\[(\w+)\]", (ROOT / "docs/upstream.md").read_text())
    assert sorted(named) == sorted(DEFECTS)
