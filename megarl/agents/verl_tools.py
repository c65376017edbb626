"""Tools written for verl: a YAML file (`tool_config_path`) of classes derived from verl.tools.base_tool.BaseTool.

The classes run unchanged, as tools with state. A sample creates an instance with its first call, executes its calls on it, and
releases it at its end, as BaseTool's documentation describes. verl's tool agent loop creates and releases an instance for
each call (verl/experimental/agent_loop/tool_agent_loop.py), and keeps only `agent_data` between them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from megarl.agents import Answer, Context, Tool, verl_stand_in
from megarl.agents.tool import ToolFault, check_name
from megarl.registry import import_user_module

_METHODS = ("create", "execute", "calc_reward", "release")


def tools_of_file(file: str) -> dict[str, Tool]:
    """Return the tools of a YAML file by name, in its order. The file is read once per process.

    Raises ValueError for a file or class that cannot be used.
    """
    return _tools_of(Path(file).absolute())


@functools.cache
def _tools_of(file: Path) -> dict[str, Tool]:
    verl_stand_in.provide()
    tools: dict[str, Tool] = {}
    for number, entry in enumerate(entries_of(file, "tools")):
        place = f"{file}, tool {number + 1}"
        make = _maker(entry, place)
        tool = _described(make, place)
        if tool.name in tools:
            raise ValueError(f"{file}: two tools have the name {tool.name!r}")
        tools[tool.name] = tool
    return tools


def objects_of_file(file: str) -> list[Any]:
    """Return the objects of verl's tool classes in a YAML file, for a loop that calls them itself. Raises ValueError as `tools_of_file`."""
    verl_stand_in.provide()
    path = Path(file).absolute()
    return [_maker(entry, f"{path}, tool {number + 1}")() for number, entry in enumerate(entries_of(path, "tools"))]


def initialize_tools_from_config(tools_config_file: str) -> list[Any]:
    """verl's name of `objects_of_file`, for classes that call it (verl/tools/utils/tool_registry.py)."""
    return objects_of_file(tools_config_file)


def entries_of(file: Path, key: str) -> list[dict[str, Any]]:
    """Return the list `key` of a file of verl, with OmegaConf's references resolved."""
    from omegaconf import OmegaConf

    try:
        content: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    except Exception as error:
        raise ValueError(f"{file} cannot be read as YAML of verl's {key}: {type(error).__name__}: {error}") from error
    entries = content.get(key) if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{file} has no list `{key}`, with a `class_name` and `config` for each entry")
    return entries


def _maker(entry: dict[str, Any], place: str) -> Callable[[], Any]:
    """Return the function that creates the tool of an entry. It prints nothing: verl's BaseTool prints its schema."""
    config = entry.get("config") or {}
    kind = config.get("type")
    if kind == "mcp":
        raise ValueError(f"{place} is an MCP server: name its command or URL in agent.mcp instead (docs/agents.md)")
    if kind != "native":
        raise ValueError(f"{place}: config.type is {kind!r}, and verl knows native and mcp")
    class_ = class_of(entry.get("class_name"), place, "BaseTool", _METHODS)
    from verl.tools.schemas import OpenAIFunctionToolSchema

    try:
        fields = entry.get("tool_schema")
        schema = None if fields is None else OpenAIFunctionToolSchema.model_validate(fields)
    except ValueError as error:
        raise ValueError(f"{place}: its tool_schema is not one of verl's: {error}") from error

    def make() -> Any:
        with contextlib.redirect_stdout(io.StringIO()):
            return class_(config=config, tool_schema=schema)

    return make


def class_of(path: Any, place: str, base: str, methods: Sequence[str]) -> Any:
    """Import the class of an entry, which has the `methods` of verl's `base`. Raises ValueError if there is none."""
    module_name, name = module_and_class(path, f"the class of {place}")
    try:
        class_ = getattr(import_user_module(module_name), name)
    except Exception as error:
        raise ValueError(
            f"{place}: importing {path} failed with {type(error).__name__}: {error}{verl_stand_in.missing_hint(error)}. It "
            f"is searched in {Path.cwd()} and on PYTHONPATH"
        ) from error
    missing = [method for method in methods if not callable(getattr(class_, method, None))]
    if missing:
        raise ValueError(f"{place}: {path} is not derived from verl's {base}: it has no {', '.join(missing)}")
    return class_


def module_and_class(path: Any, place: str) -> tuple[str, str]:
    """Return the module and the name of the class at `place`, a field. Raises ValueError if `path` is not ``module.Class``."""
    if not isinstance(path, str) or "." not in path:
        raise ValueError(f"{place} is {path!r}: write it as module.Class")
    module_name, _, name = path.rpartition(".")
    return module_name, name


def _described(make: Callable[[], Any], place: str) -> Tool:
    """Create the tool once, for its name and schema."""
    try:
        tool = make()
        name = str(tool.name)
        schema = tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True)["function"]
    except Exception as error:
        raise ValueError(f"{place} cannot be created: {type(error).__name__}: {error}") from error
    check_name(name)
    parameters = schema.get("parameters", {"type": "object", "properties": {}, "required": []})
    return Tool(name, schema["description"], parameters, lambda: VerlToolState(make), stateful=True)


@dataclass
class AgentData:
    """The argument `agent_data` of `execute`, which all of verl's tools of a sample share. It has only these of verl's fields."""

    request_id: str
    tools_kwargs: dict[str, Any]
    extra_fields: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    tool_rewards: list[float] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        raise _NotProvided(f"agent_data.{name}: megarl passes only {', '.join(self.__dataclass_fields__)}")


class _NotProvided(ToolFault, AttributeError):
    """An attribute that the policy did not ask for, so that the sample fails."""


class VerlToolState:
    """An instance of a tool of verl, with the methods of a class that `megarl.agents.tool` takes.

    `create` and the other methods receive the arguments that the row's extra_info.tools_kwargs names for this tool.
    """

    _of_sample: ClassVar[dict[int, AgentData]] = {}  # in a sample's process there is one

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    async def start(self, context: Context) -> None:
        """Create the tool and its instance. Both of verl's forms receive create_kwargs: as keywords, and as one argument."""
        self._tool = self._make()
        all_kwargs = context.extra_info.get("tools_kwargs") or {}
        self._kwargs: dict[str, Any] = all_kwargs.get(self._tool.name) or {}
        self._sample = context.sample
        self._data = self._of_sample.setdefault(context.sample, AgentData(str(context.sample), all_kwargs))
        create_kwargs = self._kwargs.get("create_kwargs") or {}
        create = self._tool.create
        takes_one = _accepts(create, "create_kwargs")
        keywords = {name: value for name, value in create_kwargs.items() if not takes_one or _accepts(create, name)}
        if takes_one:
            keywords["create_kwargs"] = create_kwargs
        created = await create(str(context.sample), **keywords)
        self._instance = created[0] if isinstance(created, tuple) else created

    async def call(self, **parameters: Any) -> Answer:
        """Execute a call. Raises ToolFault for an answer with a video."""
        execute = self._tool.execute
        keywords = dict(self._kwargs.get("execute_kwargs") or {})
        if _accepts(execute, "agent_data"):
            keywords["agent_data"] = self._data
        response, reward, *_ = await execute(self._instance, parameters, **keywords)
        reward = 0.0 if reward is None else reward
        self._data.tool_rewards.append(reward)
        if isinstance(response, str):  # earlier versions of verl
            return Answer(response, reward)
        if getattr(response, "video", None):
            raise ToolFault("it answered with video data, and tool messages are text and images")
        images = getattr(response, "image", None) or ()
        images = tuple(images) if isinstance(images, (list, tuple)) else (images,)
        return Answer(response.text or "", reward, images=images)

    async def reward(self) -> float:
        reward: float = await self._tool.calc_reward(self._instance, **(self._kwargs.get("calc_reward_kwargs") or {}))
        return reward

    async def end(self) -> None:
        self._of_sample.pop(self._sample, None)
        await self._tool.release(self._instance, **(self._kwargs.get("release_kwargs") or {}))


def _accepts(method: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(method).parameters.values()
    return any(each.kind is each.VAR_KEYWORD or each.name == name for each in parameters)
