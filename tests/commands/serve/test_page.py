"""The commands of docs/serve.md and of `megarl serve --help` start beside the quickstart's runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megarl.commands.examples import EXAMPLES
from megarl.preflight.load import load_recipe

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
LINES = [*re.findall(r"^megarl serve .+$", PAGE, re.MULTILINE), *EXAMPLES["serve"]]
CALLS = re.findall(r'load_recipe\("([^"]+)", (\[[^\]]*\])\)', PAGE)


@pytest.mark.parametrize("line", LINES)
def test_a_command_has_a_run_of_its_own(line: str) -> None:
    """The quickstart has made runs/quickstart, and a second run in the same directory is refused."""
    recipe, *settings = shlex.split(line.partition(" --")[0])[2:]
    assert load_recipe(ROOT / recipe, settings).name not in ("quickstart", "quickstart-sft")


def test_the_session_in_python_has_a_run_of_its_own() -> None:
    ((recipe, settings),) = CALLS
    assert load_recipe(ROOT / recipe, re.findall(r'"([^"]+)"', settings)).name not in ("quickstart", "quickstart-sft")
