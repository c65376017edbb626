"""The user's Python modules that a recipe names, and the local modules that they import. This file imports none of them."""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib.metadata import packages_distributions
from pathlib import Path

from megarl.recipe.schema import Recipe

_YAML = (".yaml", ".yml")


def named_modules(recipe: Recipe) -> dict[str, str]:
    """Return the user's modules that a recipe names, each with a setting that names it. Files are not modules."""
    named = {module: "algorithm.modules" for module in recipe.algorithm.modules}
    named |= {_module_of(function): setting for function, setting in _named_functions(recipe)}
    return {module: setting for module, setting in named.items() if not module.endswith((".py", *_YAML))}


def named_files(recipe: Recipe) -> list[tuple[str, str]]:
    """Return each file with code that the recipe names, with its setting: `file.py` of functions and classes, and YAML of verl."""
    files = [(_module_of(function), setting) for function, setting in _named_functions(recipe)]
    return [(file, setting) for file, setting in files if file.endswith((".py", *_YAML))]


def _named_functions(recipe: Recipe) -> list[tuple[str, str]]:
    """Return the user's functions and classes (`module:name`, `file.py:name`) and YAML files, each with its setting."""
    agent = recipe.agent
    named = [(tool, "agent.tools") for tool in agent.tools]
    named += [(agent.interaction or "", "agent.interaction"), (agent.loop or "", "agent.loop")]
    named += [(name, "reward") for name in recipe.reward.own_functions]
    return [(name, setting) for name, setting in named if ":" in name or name.endswith(_YAML)]


def local_files(recipe: Recipe, roots: Sequence[Path] | None = None) -> tuple[dict[str, Path], list[str]]:
    """Return the files of local modules by their path below their root, and installed modules that the recipe names.

    `roots`: folders to search, in order; None: the current folder and the entries of PYTHONPATH. Packages' `__init__.py`
    are among the files. Raises ValueError for a module or a file that the recipe names and that is not found.
    """
    roots = search_roots() if roots is None else roots
    named = named_modules(recipe)
    imported: list[str] = []
    for file, setting in named_files(recipe):
        if not Path(file).is_file():
            raise ValueError(f"{setting} names {file}, which does not exist here: pack where the run's files are")
        if file.endswith(_YAML):
            named |= dict.fromkeys(_modules_of_classes(Path(file), setting), file)
        else:
            imported += _imports(Path(file), "")
    files: dict[str, Path] = {}
    installed = []
    for module, place in named.items():
        if not _add(module, roots, files):
            if module.partition(".")[0] not in {*sys.stdlib_module_names, *packages_distributions()}:
                places = ", ".join(map(str, roots))
                raise ValueError(
                    f"{place} names the module {module!r}, which is not in {places}: start in the run's folder"
                )
            installed.append(module)
    for module in imported:
        _add(module, roots, files)
    return files, installed


def _modules_of_classes(file: Path, setting: str) -> Iterator[str]:
    """Yield the module of each class in a YAML file of verl. `setting`: the recipe key that names the file.

    Raises ValueError if the file has another form.
    """
    if setting == "agent.loop":
        from megarl.agents.custom.verl_loops import loop_entries

        entries, field = loop_entries(file), "_target_"
    else:
        from megarl.agents.verl_tools import entries_of

        entries, field = entries_of(file, "tools" if setting == "agent.tools" else "interaction"), "class_name"
    from megarl.agents.verl_tools import module_and_class

    for entry in entries:
        module, _ = module_and_class(entry.get(field), f"{field} in {file}")
        yield module


def search_roots() -> list[Path]:
    """Return the folders from which a run imports the user's modules: the current one, then PYTHONPATH."""
    entries = [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib")}
    return [path for entry in dict.fromkeys(entries) if (path := Path(entry).resolve()) not in installed]


def _module_of(function: str) -> str:
    return function.partition(":")[0]


def _add(module: str, roots: Sequence[Path], files: dict[str, Path]) -> bool:
    """Add the files of a module and of its imports; returns False if it is not local."""
    parts = module.split(".")
    if parts[0] == "megarl" or parts[0] in sys.stdlib_module_names:
        return False
    for root in roots:
        file = _file_of(root, parts)
        if file is None:
            continue
        packages = [root.joinpath(*parts[:end], "__init__.py") for end in range(1, len(parts))]
        for path in [*(package for package in packages if package.is_file()), file]:
            name = path.relative_to(root).as_posix()
            if name not in files:
                files[name] = path
                package = ".".join(path.parent.relative_to(root).parts)
                for imported in _imports(path, package):
                    _add(imported, roots, files)
        return True
    return False


def _file_of(root: Path, parts: Sequence[str]) -> Path | None:
    for file in (root.joinpath(*parts, "__init__.py"), root.joinpath(*parts[:-1], f"{parts[-1]}.py")):
        if file.is_file():
            return file
    return None


def _imports(file: Path, package: str) -> Iterator[str]:
    """Yield the modules that a file may import: `from a import b` may name the module a.b. `package`: of the file."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)
