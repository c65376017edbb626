"""Installed packages that a program in the sandbox may import."""

from __future__ import annotations

import functools
import importlib.metadata
from pathlib import Path


@functools.cache
def folders_of(names: tuple[str, ...]) -> dict[str, Path]:
    """Return the folders and files of packages and their dependencies: import name -> path.

    Raises ValueError if a package is not installed, or is installed in editable mode.
    """
    from packaging.requirements import Requirement

    paths: dict[str, Path] = {}
    seen: set[str] = set()
    pending = [Requirement(name) for name in names]
    while pending:
        requirement = pending.pop()
        if requirement.name in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(requirement.name)
        try:
            package = importlib.metadata.distribution(requirement.name)
        except importlib.metadata.PackageNotFoundError as error:
            raise ValueError(f"the sandbox's packages include {requirement.name!r}, which is not installed") from error
        tops = {file.parts[0] for file in package.files or ()} - {"..", "__pycache__", "bin"}
        shown = {top: Path(str(package.locate_file(top))) for top in tops if not top.endswith(".pth")}
        if not any(not top.endswith(".dist-info") for top in shown):
            raise ValueError(
                f"the sandbox's packages include {requirement.name!r}, which has no files in site-packages: "
                f"install it without pip install -e"
            )
        paths.update(shown)
        pending += [Requirement(text) for text in package.requires or ()]
    return paths
