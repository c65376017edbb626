"""MindSpeed's settings, read from its sources.

The sources are parsed, not imported: an import would need torch_npu and CANN. `tables/` has a recorded table per
version, for recipe checks on machines without MindSpeed; tests/support/mindspeed_calls.py writes it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

TABLES = Path(__file__).parent / "tables"
_FEATURES = Path("mindspeed", "features_manager")
_KINDS = {"int": "int", "float": "float", "str": "text"}


@dataclass(frozen=True)
class Table:
    """Settings of a MindSpeed version.

    options: allowed values by option, as a list, or their type: "flag", "int", "float", "text". switches: fields or
    arguments of Megatron that turn on a feature of MindSpeed.
    """

    version: str  # from setup.py; branches for different Megatrons may have the same version
    source: str  # commit of the sources
    options: dict[str, str | list[str | int]] = field(default_factory=dict)
    switches: list[str] = field(default_factory=list)


def read_source(source: Path) -> Table:
    """Read the table of the MindSpeed in `source`, with an empty commit: a checkout, or the folder with the installed package.

    Raises ValueError if `source` does not contain MindSpeed, or a version with unsupported source code.
    """
    index = source / _FEATURES / "__init__.py"
    if not index.is_file():
        raise ValueError(f"{source} has no {_FEATURES / '__init__.py'}: use a checkout of MindSpeed 0.12 or later")
    options: dict[str, str | list[str | int]] = {}
    added: list[tuple[str, str]] = []  # choices that a feature adds to the option of another
    switches: set[str] = set()
    for file in _files_of_features(index):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        try:
            options.update(_options(tree))
            added += _added_choices(tree)
            switches.update(_switches(tree))
        except ValueError as error:
            raise ValueError(
                f"{file}, {error}: megarl does not support this MindSpeed version yet; install core_r0.16.0, or report it"
            ) from None
    for dest, choice in added:
        choices = options.get(dest)  # None: a Megatron option
        if isinstance(choices, list) and choice not in choices:
            choices.append(choice)
    return Table(_version(source), "", dict(sorted(options.items())), sorted(switches - options.keys()))


def _files_of_features(index: Path) -> list[Path]:
    """Source files of the listed features; the folder contains unused files too."""
    root = index.parent.parent.parent
    files: set[Path] = set()
    for node in ast.walk(ast.parse(index.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("mindspeed.features_manager."):
            continue
        module = root / Path(*str(node.module).split("."))
        if module.is_dir():  # a package that re-exports names of its files
            files.update(module.glob("*.py"))
        else:
            files.add(module.with_suffix(".py"))
    return sorted(files)


def _calls(tree: ast.Module, name: str) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node) == name)


def _options(tree: ast.Module) -> dict[str, str | list[str | int]]:
    constants = _constants(tree)
    return dict(_option(call, constants) for call in _calls(tree, "add_argument"))


def _added_choices(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(option, additional choice) pairs."""
    constants = _constants(tree)
    for call in _calls(tree, "add_parser_argument_choices_value"):
        flag, choice = (_constant(argument, constants) for argument in call.args[1:3])
        yield _dest(str(flag)), str(choice)


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Values assigned to names at the top level of a module."""
    return {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _constant(node: ast.expr, constants: dict[str, ast.expr]) -> object:
    try:
        return ast.literal_eval(constants[node.id] if isinstance(node, ast.Name) else node)
    except (KeyError, ValueError):
        raise ValueError(f"line {node.lineno}: {ast.unparse(node)} is not a literal value") from None


def _dest(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _option(call: ast.Call, constants: dict[str, ast.expr]) -> tuple[str, str | list[str | int]]:
    """Name and allowed values of the option that a call of `add_argument` defines."""
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    flags = [str(_constant(argument, constants)) for argument in call.args]
    if "dest" in keywords:
        dest = str(_constant(keywords["dest"], constants))
    else:
        dest = _dest(next(flag for flag in flags if flag[:2] == "--"))
    if "choices" in keywords:
        choices = _constant(keywords["choices"], constants)
        assert isinstance(choices, (list, tuple))
        return dest, list(choices)
    if "action" in keywords:
        return dest, "flag"
    kind = keywords.get("type")
    return dest, _KINDS.get(kind.id, "text") if isinstance(kind, ast.Name) else "text"


def _switches(tree: ast.Module) -> Iterator[str]:
    """Names of features that an argument of the same name turns on. Features of level 0 are always on and left out."""
    for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        methods = {method.name: method for method in owner.body if isinstance(method, ast.FunctionDef)}
        init, condition = methods.get("__init__"), methods.get("is_need_apply")
        if init is None or (condition is not None and "self.feature_name" not in ast.unparse(condition)):
            continue  # its condition does not depend on the feature's name
        optional = init.args.args[len(init.args.args) - len(init.args.defaults) :]
        defaults = {argument.arg: value for argument, value in zip(optional, init.args.defaults, strict=True)}
        for call in (node for node in ast.walk(init) if isinstance(node, ast.Call) and _called(node) == "__init__"):
            keywords = {keyword.arg: keyword.value for keyword in call.keywords}
            named = (keywords[name] for name in ("feature_name", "optimization_level") if name in keywords)
            values = [_constant(argument, defaults) for argument in (*call.args, *named)]
            if len(values) < 2 or values[1] != 0:
                yield _dest(str(values[0]))


def _version(source: Path) -> str:
    setup = source / "setup.py"
    text = setup.read_text(encoding="utf-8") if setup.is_file() else ""
    match = re.search(r"^__version__ = ['\"](.+)['\"]", text, re.M)
    return match[1] if match else ""
