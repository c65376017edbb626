"""Local modules that a recipe names, and their imports."""

from __future__ import annotations

from pathlib import Path

from megarl.commands.bundle.modules import local_files
from megarl.recipe.load import read_recipe


def test_modules_are_found_without_importing_them(tmp_path: Path) -> None:
    """An import would run the user's code while packing, and leave it in this process."""
    (tmp_path / "package" / "deep").mkdir(parents=True)
    for name, text in {
        "package/__init__.py": "raise SystemExit",
        "package/deep/__init__.py": "",
        "package/deep/loss.py": "from .. import common\nfrom .parts import one\nimport numpy, package.other",
        "package/deep/parts.py": "",
        "package/common.py": "import package.deep.loss",
        "package/other.py": "",
        "package/unused.py": "",
    }.items():
        (tmp_path / name).write_text(text)
    recipe = read_recipe(_empty(tmp_path), ["algorithm.modules=[package.deep.loss,json]"]).recipe
    files, installed = local_files(recipe, [tmp_path])
    assert sorted(files) == [
        "package/__init__.py", "package/common.py", "package/deep/__init__.py", "package/deep/loss.py",
        "package/deep/parts.py", "package/other.py",
    ]  # fmt: skip
    assert installed == ["json"]


def _empty(folder: Path) -> Path:
    (folder / "empty.yaml").write_text("{}")
    return folder / "empty.yaml"
