"""The decorator `tool`: JSON schemas from the signature and docstring of a function, or of a class with a state per sample."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Union

from megarl.errors import Unavailable
from megarl.registry import Registry, import_function
from megarl.types import FailureKind

Prepare = Callable[[dict[str, Any]], Any]


class ToolUnavailable(Unavailable):
    """A tool cannot be used now, through no fault of the policy. The call is retried, then the sample is sampled again. While
    calls of several rows fail with it, samples wait. Any other exception of a tool is shown to the policy."""

    source = ""  # `Tool.title` of the tool, set by the toolbox
    kind: FailureKind = "unavailable"


class ToolFault(ToolUnavailable):
    """A tool has failed outside of the policy's call, or its answer is invalid: a mistake in the tool, or one that only this sample
    has met. Calls of other samples do not wait."""

    is_outage = False

    def __init__(self, cause: str, kind: FailureKind = "error") -> None:
        super().__init__(cause)
        self.kind = kind


@dataclass(frozen=True)
class Context:
    """Facts about the sample that calls a tool, passed to a parameter annotated with this class. The policy does not see that
    parameter."""

    uid: str  # of the row
    ground_truth: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    sample: int = 0  # number of the sample, the same after a resume and in a replay: a seed for tools with chance


@dataclass(frozen=True)
class Answer:
    """A tool's result with a reward for the turn that called it."""

    text: str
    reward: float = 0.0
    images: tuple[Any, ...] = field(default=(), kw_only=True)
    """For a model that reads images: encoded files as bytes (PNG, JPEG, ...), or Pillow images. The policy reads them before `text`."""


@dataclass(frozen=True)
class Reply(Answer):
    """The user's next message, with a reward for the turn that it answers. `ends`: the conversation ends, and the policy does not
    read the message."""

    ends: bool = False


@dataclass(frozen=True)
class Tool:
    """A function that the policy may call, or a class with one object per sample, which has the state of its calls. An
    interaction (`megarl.agents.interactions`) is such a class, which the policy does not call.

    Attributes:
        name: its name in calls.
        description: text for the policy.
        parameters: JSON schema of the arguments, an object.
        function: returns text, an `Answer`, or another value, which is converted to text. May be `async def`.
            With `stateful`: returns a new object for a sample, see `tool`.
        context: the parameter that receives a `Context`, or None.
        prepare: called with the recipe's settings for tools (`sandbox`), once in preflight and once in each process that
            calls the tool; raises if something is not installed.
        stateful: calls of a sample share an object, which runs in a separate process for each sample.
        is_interaction: it answers the policy's turns as the user.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    function: Callable[..., Any]
    context: str | None = None
    prepare: Prepare | None = None
    stateful: bool = False
    is_interaction: bool = False

    @property
    def title(self) -> str:
        """The tool's name for messages."""
        return f"{'interaction' if self.is_interaction else 'tool'} {self.name.removeprefix(INTERACTION)!r}"

    @property
    def schema(self) -> dict[str, Any]:
        """The schema in the form that chat templates take."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


INTERACTION = "interaction "
"""The start of an interaction's `Tool.name`; names of tools have no space."""
TOOLS: Registry[Tool] = Registry("tool")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_JSON_TYPES: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}


@typing.overload
def tool(function: Callable[..., Any]) -> Callable[..., Any]: ...
@typing.overload
def tool(
    *, name: str | None = None, prepare: Prepare | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...
def tool(
    function: Callable[..., Any] | None = None, *, name: str | None = None, prepare: Prepare | None = None
) -> Callable[..., Any]:
    """Let the policy call a function or class: ``@tool``, or ``@tool(name="search")``. It is returned unchanged.

    Parameters are annotated with str, int, float, bool, list[...], dict[str, ...], Literal[...] or one of these
    ``| None``, and described in the docstring's section ``Args:`` (``name: text``). The text before that section
    describes the tool. A parameter annotated with `Context` is filled in by megarl.

    A class keeps state between the calls of a sample. Its method ``call`` has the signature and docstring of a function, and
    three more methods may exist, each of them plain or ``async def``::

        start(context)  before the sample's first call
        reward()        when the sample is complete; a number that is added at the end of its last turn
        end()           last, whether the sample is complete or not

    Raises:
        ValueError: the signature has no JSON schema, or a method has other parameters.
    """

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        function.__megarl_tool__ = describe(function, name, prepare)  # type: ignore[attr-defined]
        return function

    return declare if function is None else declare(function)


def describe(function: Callable[..., Any], name: str | None = None, prepare: Prepare | None = None) -> Tool:
    """Build the `Tool` of a function or class. Raises ValueError as `tool` does."""
    name = name or function.__name__
    check_name(name)
    stateful = inspect.isclass(function)
    called = _method_call(function, name) if stateful else function
    description, described = _docstring(called)
    if not description:
        place = "its method call" if stateful else "it"
        raise ValueError(f"tool {name!r}: {place} has no docstring, which describes it to the policy")
    hints = typing.get_type_hints(called)
    properties: dict[str, Any] = {}
    required, context = [], None
    signature_parameters = list(inspect.signature(called).parameters.values())
    for parameter in signature_parameters[1:] if stateful else signature_parameters:  # without self
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"tool {name!r}: parameter {parameter} cannot be called by name")
        hint = hints.get(parameter.name)
        if hint is Context:
            context = parameter.name
            continue
        schema = _schema_of(hint, f"tool {name!r}: parameter {parameter.name!r}")
        if parameter.name in described:
            schema["description"] = described.pop(parameter.name)
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        elif parameter.default is not None:
            schema["default"] = parameter.default
        properties[parameter.name] = schema
    if described:
        raise ValueError(f"tool {name!r}: its docstring describes {', '.join(described)}, and it has no such parameter")
    parameters = {"type": "object", "properties": properties, "required": required}
    return Tool(name, description, parameters, function, context, prepare, stateful)


def check_name(name: str) -> None:
    """Raise ValueError if the policy cannot write `name` in a call."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"tool {name!r}: a name is letters, digits, _ and -, at most 64, and begins with no digit")


def _method_call(class_: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the method `call` of a class. Raises ValueError if its methods cannot be called as `tool` describes."""
    check_methods(class_, f"tool {name!r}")
    called = getattr(class_, "call", None)
    if not callable(called):
        raise ValueError(f"tool {name!r}: its class has no method call, which the policy's calls run")
    return typing.cast("Callable[..., Any]", called)


def check_methods(class_: Callable[..., Any], title: str) -> None:
    """Raise ValueError if megarl cannot create an object of a class, or call its methods `start`, `reward` and `end`."""
    expected: dict[str, tuple[Any, ...]] = {"start": (None, None), "reward": (None,), "end": (None,)}
    for method, arguments in expected.items():
        function = getattr(class_, method, None)
        try:
            if function is not None:
                inspect.signature(function).bind(*arguments)
        except TypeError as error:
            takes = "the context" if method == "start" else "no argument"
            raise ValueError(f"{title}: its method {method} must take {takes}: {error}") from error
    try:
        inspect.signature(class_).bind()
    except TypeError as error:
        raise ValueError(
            f"{title}: megarl creates an object for each sample without arguments, and its class needs some: {error}. "
            "Its method start receives the context"
        ) from error


def find(name: str) -> Tool:
    """Return the tool registered as `name`, decorated with `tool` as ``module:name``, or ``file.yaml:name`` of verl; or an
    interaction: a class decorated with `megarl.agents.interaction`, or ``file.yaml`` of verl.

    Raises ValueError if there is none.
    """
    if _is_tools_file(name):
        from megarl.agents.verl_interactions import interaction_of_file

        return interaction_of_file(name)
    file, _, tool_name = name.rpartition(":")
    if _is_tools_file(file):
        from megarl.agents.verl_tools import tools_of_file

        return tools_of_file(file)[tool_name]
    if ":" not in name:
        if name not in TOOLS:
            raise ValueError(f"{TOOLS.unknown(name)} Your own is given as module:function")
        return TOOLS[name]
    described = getattr(import_function(name, "tool"), "__megarl_tool__", None)
    if described is None:
        raise ValueError(f"tool {name!r}: it is not decorated with megarl.agents.tool or megarl.agents.interaction")
    return typing.cast(Tool, described)


def tool_paths(names: Sequence[str]) -> list[str]:
    """Return the names that `find` takes, for entries of `agent.tools`. A YAML file of verl gives the names of all its tools.

    Raises ValueError for a file that cannot be used.
    """
    paths: list[str] = []
    for name in names:
        if _is_tools_file(name):
            from megarl.agents.verl_tools import tools_of_file

            paths += [f"{name}:{tool}" for tool in tools_of_file(name)]
        else:
            paths.append(name)
    return paths


def _is_tools_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def _docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return a docstring's text before the section Args, and the text of each parameter in that section."""
    text = inspect.getdoc(function) or ""
    before, _, section = text.partition("\nArgs:\n")
    before = before.partition("\nReturns:\n")[0].partition("\nRaises:\n")[0]
    described: dict[str, str] = {}
    last = None
    for line in section.splitlines():
        if line and not line[0].isspace():  # the next section
            break
        match = re.match(r"\s{2,4}(\w+)(?:\s*\([^)]*\))?:\s*(.*)", line)
        if match:
            last = match[1]
            described[last] = match[2].strip()
        elif last is not None and line.strip():
            described[last] = f"{described[last]} {line.strip()}"
    return " ".join(before.split()), described


def _schema_of(hint: Any, subject: str) -> dict[str, Any]:
    """Return the JSON schema of an annotation. `subject`: the parameter, for errors."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in _JSON_TYPES:
        return {"type": _JSON_TYPES[hint]}
    if origin in (Union, types.UnionType) and len(arguments) == 2 and type(None) in arguments:
        (kind,) = [argument for argument in arguments if argument is not type(None)]
        schema = _schema_of(kind, subject)
        schema["type"] = [schema["type"], "null"]
        if "enum" in schema:
            schema["enum"].append(None)
        return schema
    if origin is Literal and arguments and all(type(value) is type(arguments[0]) for value in arguments):
        return {**_schema_of(type(arguments[0]), subject), "enum": list(arguments)}
    if origin is list and arguments:
        return {"type": "array", "items": _schema_of(arguments[0], subject)}
    if hint in (list, dict):
        return {"type": "array" if hint is list else "object"}
    if origin is dict and arguments[0] is str:
        return {"type": "object", "additionalProperties": _schema_of(arguments[1], subject)}
    problem = "has no annotation" if hint is None else f"is annotated with {hint}"
    raise ValueError(
        f"{subject} {problem}: give it str, int, float, bool, list[...], dict[str, ...], Literal[...] or one of these | None"
    )
