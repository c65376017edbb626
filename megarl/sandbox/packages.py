"""Installed packages that a program in the sandbox may import."""

from __future__ import annotations

import functools
import importlib.metadata
from pathlib import Path


@functools.cache
def folders_of(names: tuple[str, ...]) -> dict[str, Path]:
    """The folders and files of packages, and of what they need in turn, under the names that are imported.

    Raises ValueError where one is not installed, or installed as a link to a working copy.
    """
    from packaging.requirements import Requirement

    found: dict[str, Path] = {}
    seen: set[str] = set()
    wanted = [Requirement(name) for name in names]
    while wanted:
        requirement = wanted.pop()
        if requirement.name in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(requirement.name)
        try:
            package = importlib.metadata.distribution(requirement.name)
        except importlib.metadata.PackageNotFoundError as error:
            raise ValueError(
                f"the sandbox is to show the package {requirement.name!r}, which is not installed"
            ) from error
        tops = {file.parts[0] for file in package.files or ()} - {"..", "__pycache__", "bin"}
        shown = {top: Path(str(package.locate_file(top))) for top in tops if not top.endswith(".pth")}
        if not any(not top.endswith(".dist-info") for top in shown):
            raise ValueError(
                f"the sandbox is to show the package {requirement.name!r}, which has no files where it is installed: "
                f"install it whole, not as a link to a working copy (pip install -e)"
            )
        found.update(shown)
        wanted += [Requirement(text) for text in package.requires or ()]
    return found
