"""MindSpeed's settings and the functions that megarl depends on, from its sources: `python -m megarl.platform.mindspeed_keys SOURCE`.

SOURCE is a checkout, or the folder that holds the installed package `mindspeed`. Nothing of it is imported: that would
want torch_npu and CANN. Writes a table beside this file (`mindspeed_tables/`), one for each version, from which a
recipe is checked where MindSpeed is not installed.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from megarl.platform.mindspeed_calls import read_calls

TABLES = Path(__file__).parent / "mindspeed_tables"
_FEATURES = Path("mindspeed", "features_manager")
_KINDS = {"int": "int", "float": "float", "str": "text"}


@dataclass(frozen=True)
class Table:
    """MindSpeed's settings. Of each, `options` has the values that it may have, as a list, or what kind they are of:
    "flag", "int", "float", "text". `switches` are names that turn a feature on without being an option of MindSpeed's:
    fields or arguments of Megatron's. `calls`: arguments and attributes by place, see `mindspeed_calls.read_calls`."""

    version: str  # as its setup.py says: branches of different Megatrons may call themselves the same
    source: str  # the commit that the table was made from
    options: dict[str, str | list[str | int]] = field(default_factory=dict)
    switches: list[str] = field(default_factory=list)
    calls: dict[str, list[str]] = field(default_factory=dict)


def read_source(source: Path) -> Table:
    """The table of the MindSpeed in `source`; of which commit it is, is not said. Raises ValueError where there is none, and
    for one that is written in another way than those that are known."""
    index = source / _FEATURES / "__init__.py"
    if not index.is_file():
        raise ValueError(f"{source} holds no {_FEATURES / '__init__.py'}: give a checkout of MindSpeed 0.12 or later")
    options: dict[str, str | list[str | int]] = {}
    added: list[tuple[str, str]] = []  # choices that one feature adds to another's option
    switches: set[str] = set()
    for file in _files_of_features(index):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        try:
            options.update(_options(tree))
            added += _added_choices(tree)
            switches.update(_switches(tree))
        except ValueError as error:
            raise ValueError(
                f"{file}, {error}: this MindSpeed is newer than megarl knows; install core_r0.16.0, or report it"
            ) from None
    for dest, choice in added:
        choices = options.get(dest)  # None: an option of Megatron's
        if isinstance(choices, list) and choice not in choices:
            choices.append(choice)
    return Table(
        _version(source), "", dict(sorted(options.items())), sorted(switches - options.keys()), read_calls(source)
    )


def _files_of_features(index: Path) -> list[Path]:
    """The files that the list of features is made of; others lie there unused."""
    root = index.parent.parent.parent
    files: set[Path] = set()
    for node in ast.walk(ast.parse(index.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("mindspeed.features_manager."):
            continue
        place = root / Path(*str(node.module).split("."))
        if place.is_dir():  # a package that hands names on: those of its own files
            files.update(place.glob("*.py"))
        else:
            files.add(place.with_suffix(".py"))
    return sorted(files)


def _calls(tree: ast.Module, name: str) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node) == name)


def _options(tree: ast.Module) -> dict[str, str | list[str | int]]:
    constants = _constants(tree)
    return dict(_option(call, constants) for call in _calls(tree, "add_argument"))


def _added_choices(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(option, value that it may have as well)"""
    constants = _constants(tree)
    for call in _calls(tree, "add_parser_argument_choices_value"):
        flag, choice = (_constant(argument, constants) for argument in call.args[1:3])
        yield _dest(str(flag)), str(choice)


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Names that a module gives to values at its top."""
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
        raise ValueError(f"line {node.lineno}: {ast.unparse(node)} is no value that its source alone tells") from None


def _dest(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _option(call: ast.Call, constants: dict[str, ast.expr]) -> tuple[str, str | list[str | int]]:
    """What argparse would make of `add_argument`: the name of the value, and which values it may have."""
    given = {word.arg: word.value for word in call.keywords}
    flags = [str(_constant(argument, constants)) for argument in call.args]
    dest = (
        str(_constant(given["dest"], constants)) if "dest" in given else _dest(next(f for f in flags if f[:2] == "--"))
    )
    if "choices" in given:
        choices = _constant(given["choices"], constants)
        assert isinstance(choices, (list, tuple))
        return dest, list(choices)
    if "action" in given:
        return dest, "flag"
    kind = given.get("type")
    return dest, _KINDS.get(kind.id, "text") if isinstance(kind, ast.Name) else "text"


def _switches(tree: ast.Module) -> Iterator[str]:
    """Names of features that are on where the arguments have them; of level 0, a feature is on always."""
    for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        methods = {f.name: f for f in owner.body if isinstance(f, ast.FunctionDef)}
        start, asks = methods.get("__init__"), methods.get("is_need_apply")
        if start is None or (asks is not None and "self.feature_name" not in ast.unparse(asks)):
            continue  # the latter looks at other things than its name
        defaults = start.args.args[len(start.args.args) - len(start.args.defaults) :]
        own = {argument.arg: value for argument, value in zip(defaults, start.args.defaults, strict=True)}
        for call in (node for node in ast.walk(start) if isinstance(node, ast.Call) and _called(node) == "__init__"):
            given = {word.arg: word.value for word in call.keywords}
            words = [*call.args, *(given[name] for name in ("feature_name", "optimization_level") if name in given)]
            values = [_constant(word, own) for word in words]
            if len(values) < 2 or values[1] != 0:
                yield _dest(str(values[0]))


def _version(source: Path) -> str:
    setup = source / "setup.py"
    found = (
        re.search(r"^__version__ = ['\"](.+)['\"]", setup.read_text(encoding="utf-8"), re.M)
        if setup.is_file()
        else None
    )
    return found[1] if found else ""


def _commit(source: Path) -> str:
    asked = subprocess.run(["git", "-C", str(source), "rev-parse", "HEAD"], capture_output=True, text=True)
    return asked.stdout.strip()


def write(table: Table) -> Path:
    """The file of a version, in a form of which a change shows line by line."""
    path = TABLES / f"{table.version}.json"
    path.write_text(json.dumps(asdict(table), indent=1) + "\n")
    return path


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        found = read_source(Path(argument))
        print(write(replace(found, source=_commit(Path(argument)))))
