"""Read a recipe from YAML files and the command line, in layers: schema <- base files <- recipe <- command line; check types.

Unknown keys and wrong types are errors here; megarl/preflight/ checks values. `base:` names a parent file or a list of them,
relative to the file that contains it. Later parents win.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import pickle
import typing
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megarl.errors import ReadingError, RecipeError, command_name
from megarl.recipe.former_names import suggestion, with_present_names
from megarl.recipe.key import choices_of, is_text, section_types, type_name, type_of, without_none
from megarl.recipe.paths import missing_base
from megarl.recipe.schema import Recipe
from megarl.registry import nearest

COMMAND_LINE = "command line"
STEPS, EPOCHS = "train.steps", "train.epochs"
UNKNOWN_KEY = "unknown key"
OPEN = "???"
"""A value that the recipe leaves open: it must be given before the recipe is used."""
_YAML_STARTS = tuple("'\"[{|>&*!")  # of a value that is not a plain text in YAML
LONGEST_NAME = 255
"""Bytes of a file or folder name."""
Layer = dict[str, Any]
"""The content of one file of a recipe, or of the command line."""


@dataclass(frozen=True)
class Reading:
    """A recipe as its files and the command line set it.

    `origins`: for each key that is set, the path of the file or "command line". `errors`: unknown keys and values of a wrong
    type; the recipe has the value of the layer below, or the default, in their place.
    """

    recipe: Recipe
    origins: dict[str, str]
    errors: list[RecipeError]


def read_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Reading:
    """Read the recipe at `path` and apply dotted `overrides` ("rollout.temperature=0.7"). Values are not checked.

    Raises RecipeError for a missing file and for YAML that does not parse.
    """
    merged = _defaults()
    origins: dict[str, str] = {}
    command_line, errors = _parse_overrides(overrides)
    left_open: dict[str, str] = {}
    for origin, layer in [*((str(file), layer) for file, layer in layers(Path(path))), (COMMAND_LINE, command_line)]:
        errors += _merge(merged, layer, origin, left_open)
        origins.update(dict.fromkeys(_leaves(layer), origin))
        errors += _drop_other_length(merged, layer, origin, origins)
    for key, origin in left_open.items():
        remedy = f"write a value into the recipe, or add {key}=VALUE to the command"
        errors.append(ReadingError(key, "the recipe leaves this value open", remedy, value=OPEN, origin=origin))
    return Reading(_to_object(merged, str(path)), origins, errors)


def _drop_other_length(
    merged: DictConfig, layer: Layer, origin: str, origins: dict[str, str]
) -> Iterator[ReadingError]:
    """Reset `train.steps` of the layers below if `layer` sets `train.epochs`, and the reverse. Yield an error if it sets both."""
    present = [key for key in (STEPS, EPOCHS) if value_in(layer, key) is not None]
    if len(present) == 2:
        problem = f"{STEPS} sets the length of the run, too"
        yield ReadingError(EPOCHS, problem, "leave one out", value=value_in(layer, EPOCHS), origin=origin)
    for key in present[:1]:
        other = STEPS if key == EPOCHS else EPOCHS
        if origins.pop(other, None) is not None:
            OmegaConf.update(merged, other, OmegaConf.select(_defaults(), other))


def _defaults() -> DictConfig:
    """Return a new recipe of defaults. Unpickling is five times as fast as a copy by OmegaConf."""
    return typing.cast("DictConfig", pickle.loads(_pickled_defaults()))  # noqa: S301 - made in this process


@functools.cache
def _pickled_defaults() -> bytes:
    return pickle.dumps(OmegaConf.structured(Recipe), protocol=pickle.HIGHEST_PROTOCOL)


def value_in(layer: Layer, key: str) -> Any:
    """Return the value that a layer sets for a dotted key; None if it sets none, or leaves it open."""
    value: Any = layer
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return None if value == OPEN else value


def layers(path: Path) -> list[tuple[Path, Layer]]:
    """Return the files of the recipe at `path` with the content of each, base files first.

    Raises RecipeError as `read_recipe` does.
    """
    return list(_file_layers(path, ()))


def _file_layers(path: Path, children: tuple[Path, ...]) -> Iterator[tuple[Path, Layer]]:
    """Yield the base files of `path`, deepest first, then `path` itself."""
    named_by = f"{children[-1]}: base" if children else COMMAND_LINE
    if path.resolve() in [child.resolve() for child in children]:
        raise RecipeError("base", f"{path} is among its own base files", "remove one of them", origin=str(children[-1]))
    content = _read_yaml(path, named_by)
    bases = content.pop("base", [])
    for base in bases if isinstance(bases, list) else [bases]:
        if not isinstance(base, str):
            raise RecipeError(
                "base", "a base must be a file name", "write base: other.yaml", value=base, origin=str(path)
            )
        file = path.parent / base
        if len(file.name) <= LONGEST_NAME and not file.is_file():
            raise missing_base(base, path)
        yield from _file_layers(file, (*children, path))
    yield path, content


def _read_yaml(path: Path, named_by: str) -> Layer:
    if len(path.name) > LONGEST_NAME:
        problem = f"the file name has {len(path.name)} characters, and a file system allows {LONGEST_NAME}"
        raise RecipeError("recipe", problem, "give the file of a recipe", origin=named_by)
    if not path.is_file():
        folder = next((each for each in (path, path.parent) if each.is_dir()), Path("."))
        files = {file.stem: file for file in sorted(folder.glob("*.yaml"))}
        close = nearest(path.stem, files)  # without the ending, which makes every pair of names alike
        remedy = f"did you mean {files[close]}?" if close else f"name a file that is in {folder}/, or give its folder"
        problem = f"{path} is a folder" if path.is_dir() else f"the file {path} does not exist"
        raise RecipeError("recipe", problem, remedy, origin=named_by)
    try:
        status = path.stat()
        version = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        loaded = _parsed(path.resolve(), version)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        problem, remedy = f"this is not YAML: {' '.join(str(error).split())}", "correct the line that the message names"
        if isinstance(error, UnicodeDecodeError):
            problem, remedy = f"this is not text in UTF-8: {error}", "give the file of a recipe, or save it as UTF-8"
        raise RecipeError("recipe", problem, remedy, origin=str(path)) from error
    except RecursionError as error:
        problem = "the YAML is nested too deeply"
        raise RecipeError("recipe", problem, "a recipe has sections and keys", origin=str(path)) from error
    if not isinstance(loaded, dict):
        problem = "a recipe must be a mapping of sections"
        raise RecipeError("recipe", problem, "start with e.g. model:", origin=str(path))
    for name in loaded:
        if not isinstance(name, str):
            raise RecipeError(str(name), "a key must be text", "remove it", origin=str(path))
    return with_present_names(copy.deepcopy(loaded), str(path))


@functools.lru_cache(maxsize=64)
def _parsed(file: Path, version: tuple[int, ...]) -> Any:
    """Return the content of a YAML file, which callers must not change. version: differs after each change of the file."""
    return OmegaConf.to_container(OmegaConf.load(file))


def _parse_overrides(overrides: Sequence[str]) -> tuple[Layer, list[RecipeError]]:
    """Return the settings of the command line, and an error for each argument that does not parse."""
    layer, errors = OmegaConf.create({}), []
    for override in overrides:
        name, equals, value = override.partition("=")
        if not equals or not name or name.startswith("-"):
            problem = "an override must be key=value"
            errors.append(RecipeError(override, problem, "write e.g. train.steps=10", origin=COMMAND_LINE))
            continue
        try:
            OmegaConf.update(layer, name, _value_of(name, value))
        except (
            yaml.YAMLError,
            OmegaConfBaseException,
            IndexError,
            RecursionError,
        ) as error:  # IndexError: a bracket that is not closed. RecursionError: brackets within brackets
            problem = f"the value does not parse: {' '.join(str(error).split())}"
            errors.append(RecipeError(name, problem, "quote it", value=value, origin=COMMAND_LINE))
    content = typing.cast("dict[str, Any]", OmegaConf.to_container(layer))
    try:
        return with_present_names(content, COMMAND_LINE), errors
    except RecipeError as error:
        return {}, [*errors, error]


def _value_of(name: str, text: str) -> Any:
    """Return the value of the setting `name` on the command line: YAML, but a plain text where the schema has a text or texts.

    YAML would read 1129_0930 as a number, and a space with # as a comment. Quotes and brackets are YAML's everywhere, and so are
    null and the words of switches, which `_merge` refuses for a text.
    """
    declared = without_none(type_of(Recipe, name))
    is_plain = declared in (str, list[str]) and not text.startswith(_YAML_STARTS)
    try:
        value = OmegaConf.create(f"value: {text}" if text else "value: ''").value
    except (yaml.YAMLError, OmegaConfBaseException, IndexError, RecursionError):
        if not is_plain:
            raise
        value = text
    is_word = (value is None or isinstance(value, bool)) and "#" not in text
    return text if is_plain and not is_word else value


def setting_of(name: str, text: str) -> str:
    """Return the argument that sets the text `name` on a command line, quoted if it would be read as something else."""
    try:
        is_same = _value_of(name, text) == text
    except (yaml.YAMLError, OmegaConfBaseException, IndexError, RecursionError):
        is_same = False
    return f"{name}={text}" if is_same else f"{name}={json.dumps(text, ensure_ascii=False)}"


def _leaves(layer: Layer) -> Iterator[str]:
    """Yield the dotted keys that a layer sets, sections included."""

    def walk(node: Any, prefix: str) -> Iterator[str]:
        if isinstance(node, Mapping):
            for name, value in node.items():
                yield f"{prefix}{name}"
                yield from walk(value, f"{prefix}{name}.")

    yield from walk(layer, "")


def _merge(merged: DictConfig, layer: Layer, origin: str, left_open: dict[str, str]) -> Iterator[ReadingError]:
    """Set the values of `layer` in `merged`. Yield an error for each key or value that the schema refuses; it is not set.

    left_open: the keys with the value OPEN so far, and the file of each.
    """
    settings: list[tuple[str, Any]] = []
    yield from _sort_keys(layer, Recipe, "", origin, settings)
    for name, value in settings:
        left_open.pop(name, None)
        if value == OPEN:
            left_open[name] = origin
            continue
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and type_name(type_of(Recipe, name)).split()[0] == "bool":
            problem = "this is a switch, not a number"
            yield ReadingError(name, problem, "give true or false", value=value, origin=origin)
            continue
        if isinstance(value, (int, float)) and is_text(Recipe, name):
            yield _not_a_text(name, value, origin)
            continue
        value = _as_list_if_declared(value, type_of(Recipe, name))
        items = value if isinstance(value, list) and type_of(Recipe, name) == list[str] else []
        if wrong := [item for item in items if not isinstance(item, (str, int, float))]:
            yield ReadingError(name, "an item is not text", "give a list of texts", value=wrong[0], origin=origin)
            continue
        try:
            OmegaConf.update(merged, name, value, merge=not isinstance(value, Mapping) or bool(value))
        except OmegaConfBaseException as error:
            yield _type_error(name, value, error, origin)


def _not_a_text(name: str, value: float, origin: str) -> ReadingError:
    """Return the error for a switch or a number where the key is a text. YAML has converted it, so the typed text is lost."""
    if isinstance(value, bool):
        remedy = f"give a text, as `{command_name()} keys {name}` describes; YAML reads yes, no, on and off as switches, and 'yes' as a text"
        return ReadingError(name, "this is a text, not a switch", remedy, value=value, origin=origin)
    remedy = (
        f"put the text in quotes, {name.rpartition('.')[2]}: '...'; YAML reads 007, 1.10, 1_000 and 10:30 as numbers"
    )
    return ReadingError(name, "this is a text, not a number", remedy, value=value, origin=origin)


def _type_error(name: str, value: Any, error: OmegaConfBaseException, origin: str) -> ReadingError:
    cause = str(error).splitlines()[0]
    declared = typing.get_origin(type_of(Recipe, name))
    right_container = isinstance(declared, type) and isinstance(value, declared)
    if isinstance(value, (Mapping, list)) and not right_container:
        # OmegaConf names its own container classes here. If only an entry is wrong, it names the entry.
        cause = f"the value is a {'mapping' if isinstance(value, Mapping) else 'list'}"
    elif (choices := choices_of(type_of(Recipe, name))) is not None:
        cause = f"the value is none of {', '.join(choices)}"  # OmegaConf lists them in Python's syntax
    remedy = f"give a value of type {type_name(type_of(Recipe, name))}"
    if isinstance(value, Mapping) and any(":" in str(key) and item is None for key, item in value.items()):
        remedy += "; in YAML a space follows the colon: {name: value}"
    refusal = ReadingError(name, cause, remedy, value=value, origin=origin)
    refusal.__cause__ = error
    return refusal


def _as_list_if_declared(value: Any, kind: Any) -> Any:
    """Return a single text or number as a list if the schema declares a list, also within mappings of sections.

    Example: `data.train_files: a.jsonl` -> ["a.jsonl"].
    """
    kind = without_none(kind)
    if isinstance(value, (str, int, float)):
        return [value] if typing.get_origin(kind) is list else value
    if not isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(kind):
        types = section_types(typing.cast("type", kind))
        return {name: _as_list_if_declared(item, types.get(name)) for name, item in value.items()}
    if typing.get_origin(kind) is dict:
        return {name: _as_list_if_declared(item, typing.get_args(kind)[1]) for name, item in value.items()}
    return value


def _sort_keys(
    content: Mapping[Any, Any], section: type, prefix: str, origin: str, settings: list[tuple[str, Any]]
) -> Iterator[ReadingError]:
    """Append (dotted key, value) to `settings` for every leaf that `content` sets and the schema has.

    Yield an error for each key that the schema does not have, with the nearest key that it has.
    """
    types = section_types(section)
    for name, value in content.items():
        dotted = f"{prefix}{name}"
        if name not in types:
            remedy = suggestion(str(name), prefix, types, tuple(all_keys()), value)
            yield ReadingError(dotted, UNKNOWN_KEY, remedy, value=value, origin=origin)
        elif not dataclasses.is_dataclass(types[name]):
            value = yield from _with_declared_keys(value, types[name], dotted, origin)
            settings.append((dotted, value))
        elif isinstance(value, Mapping):
            yield from _sort_keys(value, typing.cast("type", types[name]), f"{dotted}.", origin, settings)
        else:
            problem = "this is a section, not a value"
            remedy = f"set one of its keys: {', '.join(section_types(types[name]))}"
            yield ReadingError(dotted, problem, remedy, value=value, origin=origin)


def _with_declared_keys(value: Any, kind: Any, dotted: str, origin: str) -> Generator[ReadingError, None, Any]:
    """Return a mapping of sections (`data.mix`) without undeclared keys, and any other value unchanged.

    Yield an error for each undeclared key. The remaining keys of a section may have values of a wrong type.
    """
    section = typing.get_args(kind)[1] if typing.get_origin(kind) is dict else None
    if not dataclasses.is_dataclass(section) or not isinstance(value, Mapping):
        return value
    types, sections = section_types(typing.cast("type", section)), dict(value)
    for name, content in value.items():
        if isinstance(content, Mapping):
            yield from _sort_keys(content, typing.cast("type", section), f"{dotted}.{name}.", origin, [])
            sections[name] = {key: item for key, item in content.items() if key in types}
    return sections


def all_keys(section: type = Recipe, prefix: str = "") -> Iterator[str]:
    """Yield the dotted key of every leaf of the schema."""
    for name, kind in section_types(section).items():
        if dataclasses.is_dataclass(kind):
            yield from all_keys(typing.cast("type", kind), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _to_object(merged: DictConfig, path: str) -> Recipe:
    try:
        recipe = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:  # an interpolation of a missing key
        raise RecipeError(
            str(getattr(error, "full_key", "recipe")), str(error).splitlines()[0], "correct the value", origin=path
        ) from error
    assert isinstance(recipe, Recipe)
    return recipe
