"""The modules of verl that its tools import, for machines without verl: `provide` adds them to sys.modules.

Names, fields and defaults are those of verl/tools/base_tool.py, verl/tools/schemas.py and verl/utils/rollout_trace.py
(volcengine/verl at b178a3cd). Schemas drop unknown fields as verl's do, because the policy's prompt shows what remains.
"""

from __future__ import annotations

import importlib.util
import sys
import types
import uuid
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec
from typing import Any, TypeVar

from pydantic import BaseModel, Field

F = TypeVar("F", bound=Callable[..., Any])


class OpenAIFunctionPropertySchema(BaseModel):
    """A parameter."""

    type: str
    description: str | None = None
    enum: list[str] | None = None


class OpenAIFunctionParametersSchema(BaseModel):
    """All parameters."""

    type: str
    properties: dict[str, OpenAIFunctionPropertySchema]
    required: list[str]


def _no_parameters() -> OpenAIFunctionParametersSchema:
    return OpenAIFunctionParametersSchema(type="object", properties={}, required=[])


class OpenAIFunctionSchema(BaseModel):
    """Name, description and parameters of a function."""

    name: str
    description: str
    parameters: OpenAIFunctionParametersSchema = Field(default_factory=_no_parameters)
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    """A tool as chat templates take it."""

    type: str
    function: OpenAIFunctionSchema


class ToolResponse(BaseModel):
    """A tool's answer."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def is_empty(self) -> bool:
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        return bool(self.text) and not (self.image or self.video)


class BaseTool:
    """Base class of tools; megarl calls their methods as `verl_tools.VerlToolState` describes."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        assert self.tool_schema is not None, "the tool has no schema"
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | None:
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        return instance_id or str(uuid.uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        return None


def rollout_trace_op(function: F) -> F:
    """Return `function`: megarl traces tools itself."""
    return function


_MODULES: dict[str, tuple[Any, ...]] = {
    "verl": (),
    "verl.tools": (),
    "verl.tools.base_tool": (BaseTool, OpenAIFunctionToolSchema, ToolResponse),
    "verl.tools.schemas": (
        OpenAIFunctionPropertySchema,
        OpenAIFunctionParametersSchema,
        OpenAIFunctionSchema,
        OpenAIFunctionToolSchema,
        ToolResponse,
    ),
    "verl.utils": (),
    "verl.utils.rollout_trace": (rollout_trace_op,),
}
PROVIDED = tuple(name for name, contents in _MODULES.items() if contents)


def provide() -> None:
    """Let this process import `PROVIDED`, if verl is not installed. A second call changes nothing."""
    if importlib.util.find_spec("verl") is None:
        for name, contents in _MODULES.items():
            sys.modules[name] = _module(name, contents)


def is_provided() -> bool:
    """Whether this process has the stand-in instead of verl."""
    return isinstance(sys.modules.get("verl"), _StandIn)


class _StandIn(types.ModuleType):
    """A module without a file."""


def _module(name: str, contents: Iterable[Any]) -> types.ModuleType:
    module = _StandIn(name, "megarl's stand-in, because verl is not installed")
    module.__spec__ = ModuleSpec(name, None, is_package=not contents)
    if not contents:
        module.__path__ = []
    vars(module).update({each.__name__: each for each in contents})
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)
    return module
