"""The recipes that come with megarl: in a checkout, or among the files of an installed wheel."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import megarl
from megarl.errors import InputError

_QUICKSTART = "quickstart.yaml"
_INSTALLED = f"share/megarl/recipes/{_QUICKSTART}"  # below the environment: [options.data_files] in setup.cfg


def recipes_folder(package: Path = Path(megarl.__file__).parent) -> Path:
    """Return the folder of the recipes, relative to the current folder if it is below it.

    package: the folder of the imported package. Raises InputError if neither a checkout nor an installed wheel has them.
    """
    checkout = package.parent / "recipes"
    if (checkout / _QUICKSTART).is_file():
        return checkout.relative_to(Path.cwd()) if checkout.is_relative_to(Path.cwd()) else checkout
    for found in importlib.metadata.distributions(name="megarl", path=[str(package.parent)]):
        for file in found.files or ():
            if file.as_posix().endswith(_INSTALLED) and (path := Path(str(file.locate())).resolve()).is_file():
                return path.parent
    raise InputError(
        f"the recipes of megarl are missing: {package} is neither in a checkout nor from a complete wheel. Install the wheel again, "
        "or run the command in a clone of the repository"
    )
