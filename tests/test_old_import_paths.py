"""Import paths of users' code from before modules moved."""

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import warnings
from megarl.tools import Answer, Context, tool
from megarl.config import Recipe, RecipeError, load_recipe
import megarl.tools
import megarl, megarl.agents, megarl.recipe

assert (Answer, Context, tool) == (megarl.agents.Answer, megarl.agents.Context, megarl.agents.tool)
assert (Recipe, RecipeError) == (megarl.recipe.Recipe, megarl.recipe.RecipeError)
assert load_recipe is megarl.load_recipe

@tool
def double(number: int) -> int:
    "Double a number."
    return 2 * number

assert double.__megarl_tool__.name == "double"
"""


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / "user.py"
    script.write_text(code)
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True)


def test_old_paths_give_the_same_objects_with_one_warning(tmp_path: Path) -> None:
    done = run(CODE, tmp_path)
    assert done.returncode == 0, done.stderr
    for line, old, new in ((3, "tools", "agents"), (4, "config", "recipe")):
        message = f"user.py:{line}: FutureWarning: megarl.{old} is now megarl.{new}: change the import"
        assert done.stderr.count(message) == 1, done.stderr
    assert done.stderr.count("FutureWarning") == 2


@pytest.mark.parametrize("path", ["megarl.nothing", "megarl.tools.base", "megarl.config.validate"])
def test_other_paths_do_not_exist(path: str, tmp_path: Path) -> None:
    done = run(f"import {path}", tmp_path)
    assert done.returncode == 1 and f"No module named '{path}'" in done.stderr


def test_new_paths_give_no_warning(tmp_path: Path) -> None:
    done = run(
        "from megarl.agents import tool\nfrom megarl.recipe import Recipe\nfrom megarl import load_recipe", tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
