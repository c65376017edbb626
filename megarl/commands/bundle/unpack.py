"""Unpack a bundle into a new folder. Its names are checked: a bundle may come from elsewhere."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from megarl.atomic_files import atomic_directory, disk_errors, write_atomically
from megarl.commands.bundle.contents import DESCRIPTION, FILES, MODULES, RECORDED, Description
from megarl.recipe.load import read_recipe
from megarl.recipe.paths import with_paths
from megarl.recipe.schema import Recipe
from megarl.recipe.text import to_yaml

_MOST_BYTES = 1 << 20  # of the description
_SPARE = 1 << 20  # bytes that stay free on the disk


def is_bundle(path: Path) -> bool:
    return path.is_file() and tarfile.is_tarfile(path)


def unpack(file: Path, folder: Path) -> Description:
    """Unpack the bundle `file` into `folder`, which must not exist; returns its description.

    The recipe's paths then point into `folder`. Raises ValueError for another or a damaged file, for members with unsafe
    names or types, and if the disk is too small; the folder then does not exist.
    """
    if folder.exists():
        raise ValueError(f"{folder} exists: remove it, or name another folder (--out)")
    if not hasattr(tarfile, "data_filter"):
        raise ValueError("this Python extracts no tar file safely: use 3.10.12, 3.11.4 or later")
    try:
        with tarfile.open(file, "r:") as archive:
            members = archive.getmembers()
            _check(members)
            description = _description(archive, members)
            contents = members[1:]
            if (len(contents), sum(member.size for member in contents)) != (description.members, description.size):
                raise tarfile.ReadError(f"it has {len(contents)} of {description.members} files")
            _check_disk(folder, sum(member.size for member in members))
            with disk_errors(folder), atomic_directory(folder) as partial:
                for member in members:
                    archive.extract(member, partial, set_attrs=False, filter="data")
                for recipe in _recipes(partial):
                    absolute = with_paths(_recipe_of(recipe), lambda path: str(folder.absolute() / path))
                    write_atomically(recipe, to_yaml(absolute).encode())
                (partial / MODULES).mkdir(exist_ok=True)
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    except ValueError as error:
        raise ValueError(f"{file} cannot be unpacked: {error}") from error
    return description


def _recipes(folder: Path) -> list[Path]:
    return [folder / RECORDED / "recipe.resolved.yaml", *(folder / RECORDED / "tape").glob("recipe-*.yaml")]


def _recipe_of(file: Path) -> Recipe:
    """Read a recipe of the bundle. Raises ValueError for settings that this megarl does not have: they would be lost."""
    reading = read_recipe(file)
    if reading.errors:
        unreadable = "; ".join(f"{error.setting}: {error.problem}" for error in reading.errors)
        raise ValueError(f"this megarl cannot read its recipe: {unreadable}. Replay it with the megarl that wrote it")
    return reading.recipe


def _check(members: Sequence[tarfile.TarInfo]) -> None:
    """Raise ValueError for a link or a device, and for a name outside the bundle's folders."""
    names = set()
    for member in members:
        path = PurePosixPath(member.name)
        inside = member.name == DESCRIPTION or (len(path.parts) > 1 and path.parts[0] in (RECORDED, FILES, MODULES))
        if not inside or path.is_absolute() or ".." in path.parts or "\\" in member.name:
            raise ValueError(f"the name {member.name!r} is not one of a bundle's")
        if not member.isreg():
            raise ValueError(f"{member.name!r} is a link or a device; a bundle has only files")
        if member.name in names:
            raise ValueError(f"it contains {member.name!r} twice")
        names.add(member.name)


def _description(archive: tarfile.TarFile, members: Sequence[tarfile.TarInfo]) -> Description:
    if not members or members[0].name != DESCRIPTION or members[0].size > _MOST_BYTES:
        raise ValueError(f"it does not begin with {DESCRIPTION}, as a bundle of megarl does")
    stream = archive.extractfile(members[0])
    assert stream is not None, "the member is a regular file"
    return Description.from_json(stream.read())


def _check_disk(folder: Path, size: int) -> None:
    existing = next(parent for parent in folder.absolute().parents if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < size + _SPARE:
        raise ValueError(
            f"it takes {size >> 20} MiB, and {existing} has {free >> 20} MiB free: name another disk (--out)"
        )
