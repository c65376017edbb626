"""Load a recipe: schema <- bases <- recipe <- command line, each layer checked against the schema.

`base:` names one parent or a list of parents, relative to the file that names it; later ones win.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megarl.errors import RecipeError
from megarl.recipe.schema import Recipe
from megarl.registry import nearest

COMMAND_LINE = "command line"


def read_recipe(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Recipe, dict[str, str]]:
    """Read the recipe at `path` and apply dotted `overrides` ("rollout.temperature=0.7"), without checks of its values.

    Returns the recipe, and the origin of each key that is set: a file's path or "command line". Raises RecipeError for a
    missing file, YAML that does not parse, an unknown key or a wrong type.
    """
    merged = copy.deepcopy(_schema())
    origins: dict[str, str] = {}
    file_layers = ((str(file), layer) for file, layer in layers(Path(path)))
    for origin, layer in [*file_layers, (COMMAND_LINE, _parse_overrides(overrides))]:
        merged = _merge(merged, layer, origin)
        origins.update(dict.fromkeys(_leaves(layer), origin))
    return _to_object(merged, str(path)), origins


@functools.cache
def _schema() -> DictConfig:
    """A recipe of defaults, which takes OmegaConf longer to make than to copy."""
    return typing.cast("DictConfig", OmegaConf.structured(Recipe))


def layers(path: Path) -> list[tuple[Path, DictConfig]]:
    """The files that the recipe at `path` is made of, its bases first, and what each of them sets. RecipeError as
    `read_recipe`."""
    return list(_file_layers(path, ()))


def to_yaml(recipe: Recipe) -> str:
    """The whole recipe, every key spelled out."""
    return OmegaConf.to_yaml(OmegaConf.structured(recipe))


def flat_settings(text: str) -> dict[str, Any]:
    """The settings of a resolved recipe by dotted key; a mapping that a user fills counts as one."""
    flat: dict[str, Any] = {}

    def walk(content: dict[str, Any], section: type, prefix: str) -> None:
        types = section_types(section)
        for name, value in content.items():
            if dataclasses.is_dataclass(types.get(name)) and isinstance(value, dict):
                walk(value, types[name], f"{prefix}{name}.")
            else:
                flat[f"{prefix}{name}"] = value

    content: Any = OmegaConf.to_container(OmegaConf.create(text))
    walk(content, Recipe, "")
    return flat


@functools.cache
def section_types(section: type) -> dict[str, Any]:
    """Resolved type of each field of a schema dataclass."""
    return typing.get_type_hints(section)


def _file_layers(path: Path, children: tuple[Path, ...]) -> Iterator[tuple[Path, DictConfig]]:
    """The file's bases, deepest first, then the file itself."""
    named_by = f"{children[-1]}: base" if children else COMMAND_LINE
    if path.resolve() in [child.resolve() for child in children]:
        raise RecipeError("base", f"{path} is its own ancestor", "break the circle", origin=str(children[-1]))
    content = _read_yaml(path, named_by)
    bases = content.pop("base", [])
    for base in [bases] if isinstance(bases, str) else bases:
        if not isinstance(base, str):
            raise RecipeError("base", "a base is a file name", "write base: other.yaml", value=base, origin=str(path))
        yield from _file_layers(path.parent / base, (*children, path))
    yield path, OmegaConf.create(content)


def _read_yaml(path: Path, named_by: str) -> dict[str, Any]:
    if not path.is_file():
        folder = path.parent if path.parent.is_dir() else Path(".")
        close = nearest(path.name, [file.name for file in folder.glob("*.yaml")])
        remedy = f"did you mean {folder / close}?" if close else f"{folder}/ holds no such file"
        raise RecipeError("recipe", f"there is no file {path}", remedy, origin=named_by)
    try:
        loaded = OmegaConf.load(path)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise RecipeError(
            "recipe", f"this is not YAML: {' '.join(str(error).split())}", "mend the line it names", origin=str(path)
        ) from error
    if not isinstance(loaded, DictConfig):
        raise RecipeError("recipe", "a recipe is a mapping of sections", "start with e.g. model:", origin=str(path))
    content = OmegaConf.to_container(loaded)
    assert isinstance(content, dict)
    for name in content:
        if not isinstance(name, str):
            raise RecipeError(str(name), "a key is a word", "remove it", origin=str(path))
    return typing.cast("dict[str, Any]", content)


def _parse_overrides(overrides: Sequence[str]) -> DictConfig:
    layer = OmegaConf.create({})
    for override in overrides:
        name, equals, value = override.partition("=")
        if not equals or not name or name.startswith("-"):
            raise RecipeError(override, "an override is key=value", "write e.g. train.steps=10", origin=COMMAND_LINE)
        try:
            OmegaConf.update(layer, name, OmegaConf.create(f"value: {value}" if value else "value: ''").value)
        except (yaml.YAMLError, OmegaConfBaseException) as error:
            raise RecipeError(
                name,
                f"the value does not parse: {' '.join(str(error).split())}",
                "quote it",
                value=value,
                origin=COMMAND_LINE,
            ) from error
    return layer


def _leaves(layer: DictConfig) -> Iterator[str]:
    """Dotted names of what a layer sets, sections included."""

    def walk(node: Any, prefix: str) -> Iterator[str]:
        if isinstance(node, Mapping):
            for name, value in node.items():
                yield f"{prefix}{name}"
                yield from walk(value, f"{prefix}{name}.")

    yield from walk(OmegaConf.to_container(layer), "")


def _merge(merged: DictConfig, layer: DictConfig, origin: str) -> DictConfig:
    content = OmegaConf.to_container(layer)
    assert isinstance(content, dict)
    _check_keys(content, Recipe, "", origin)
    for name, value in _settings(content, Recipe, ""):
        if isinstance(value, (int, float)) and not isinstance(value, bool) and _type_name(name).split()[0] == "bool":
            raise RecipeError(name, "this is a switch, not a number", "give true or false", value=value, origin=origin)
        value = _as_list_where_declared(value, _type_of(name))
        try:
            OmegaConf.update(merged, name, value, merge=not isinstance(value, Mapping) or bool(value))
        except OmegaConfBaseException as error:
            cause = str(error).splitlines()[0]
            declared = typing.get_origin(_type_of(name))
            right_container = isinstance(declared, type) and isinstance(value, declared)
            if isinstance(value, (Mapping, list)) and not right_container:
                # OmegaConf names its own container classes here; of a wrong entry in the right container it names the entry.
                cause = f"the value is a {'mapping' if isinstance(value, Mapping) else 'list'}"
            elif (choices := _choices(_type_of(name))) is not None:
                cause = f"the value is none of {', '.join(choices)}"  # OmegaConf lists them as Python writes them
            remedy = f"give a value of type {_type_name(name)}"
            if isinstance(value, Mapping) and any(":" in str(key) and item is None for key, item in value.items()):
                remedy += "; in YAML a space follows the colon: {name: value}"
            raise RecipeError(name, cause, remedy, value=value, origin=origin) from error
    return merged


def _as_list_where_declared(value: Any, kind: Any) -> Any:
    """Return a single text or number as a list of it where the schema has a list, also within mappings of sections.

    Example: `data.train_files: a.jsonl` -> ["a.jsonl"].
    """
    kind = _without_none(kind)
    if isinstance(value, (str, int, float)):
        return [value] if typing.get_origin(kind) is list else value
    if not isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(kind):
        types = section_types(typing.cast("type", kind))
        return {name: _as_list_where_declared(item, types.get(name)) for name, item in value.items()}
    if typing.get_origin(kind) is dict:
        return {name: _as_list_where_declared(item, typing.get_args(kind)[1]) for name, item in value.items()}
    return value


def _without_none(kind: Any) -> Any:
    """Return X of Optional[X]; any other type as it is."""
    kinds = [part for part in typing.get_args(kind) if part is not type(None)]
    return kinds[0] if typing.get_origin(kind) is typing.Union and len(kinds) == 1 else kind


def _check_keys(content: Mapping[Any, Any], section: type, prefix: str, origin: str) -> None:
    """Refuse keys that the schema does not have, naming the nearest that it has."""
    types = section_types(section)
    for name, value in content.items():
        dotted = f"{prefix}{name}"
        if name not in types:
            raise RecipeError(
                dotted, "there is no such key", _suggestion(str(name), prefix, types), value=value, origin=origin
            )
        if dataclasses.is_dataclass(types[name]):
            if not isinstance(value, Mapping):
                keys = ", ".join(section_types(types[name]))
                raise RecipeError(
                    dotted, "this is a section, not a value", f"set one of its keys: {keys}", value=value, origin=origin
                )
            _check_keys(value, types[name], f"{dotted}.", origin)


def _suggestion(name: str, prefix: str, types: Mapping[str, Any]) -> str:
    elsewhere = [dotted for dotted in all_keys() if dotted.rsplit(".", 1)[-1] == name]
    close = f"{prefix}{nearest(name, types)}" if nearest(name, types) else None
    meant = [*elsewhere[:3], *([close] if close and close not in elsewhere else [])]
    if meant:
        return f"did you mean {' or '.join(meant)}?"
    return f"known here: {', '.join(types)}"


def all_keys(section: type = Recipe, prefix: str = "") -> Iterator[str]:
    """Dotted names of every leaf of the schema."""
    for name, kind in section_types(section).items():
        if dataclasses.is_dataclass(kind):
            yield from all_keys(typing.cast("type", kind), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _settings(content: Mapping[Any, Any], section: type, prefix: str) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every leaf that `content` sets."""
    types = section_types(section)
    for name, value in content.items():
        if dataclasses.is_dataclass(types[name]):
            yield from _settings(value, typing.cast("type", types[name]), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _type_of(dotted: str) -> Any:
    kind: Any = Recipe
    for name in dotted.split("."):
        kind = section_types(kind)[name]
    return kind


def _type_name(dotted: str) -> str:
    kind = _type_of(dotted)
    if typing.get_origin(kind) is typing.Union:
        return f"{_plain_type(_without_none(kind))} or null"
    return _plain_type(kind)


def _choices(kind: Any) -> list[str] | None:
    """The values of a Literal, as YAML writes them; None for another type."""
    kind = _without_none(kind)
    return list(map(yaml_word, typing.get_args(kind))) if typing.get_origin(kind) is typing.Literal else None


def yaml_word(value: Any) -> str:
    """A plain value as YAML writes it: true, null, 0.5."""
    return (
        {True: "true", False: "false", None: "null"}[value] if value is None or isinstance(value, bool) else str(value)
    )


def _plain_type(kind: Any) -> str:
    if (choices := _choices(kind)) is not None:
        return " | ".join(choices)
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind).replace("typing.", "")


def _to_object(merged: DictConfig, path: str) -> Recipe:
    try:
        recipe = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:  # an interpolation that points nowhere
        raise RecipeError(
            str(getattr(error, "full_key", "recipe")), str(error).splitlines()[0], "mend the value", origin=path
        ) from error
    assert isinstance(recipe, Recipe)
    return recipe
