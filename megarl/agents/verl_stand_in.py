"""The modules of verl that its tools and interactions import, for machines without verl: `provide` adds them to sys.modules.

Names, fields and defaults follow verl/tools/base_tool.py, verl/tools/schemas.py, verl/interactions/base.py and
verl/utils/rollout_trace.py (volcengine/verl at b178a3cd). Schemas drop unknown fields as verl's do, because the policy's prompt
shows what remains.
"""

from __future__ import annotations

import importlib.util
import sys
import types
import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import MappingProxyType
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


class BaseInteraction:
    """Base class of interactions; megarl calls their methods as `verl_interactions` describes. A subclass replies itself."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        return instance_id or str(uuid.uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        raise NotImplementedError(f"{type(self).__name__} has no generate_response")

    async def calculate_score(self) -> float:
        return 0.0

    async def finalize_interaction(self) -> None:
        return None


def rollout_trace_op(function: F) -> F:
    """Return `function`: megarl traces tools itself."""
    return function


_MODULES: dict[str, tuple[Any, ...]] = {
    "verl": (),
    "verl.interactions": (),
    "verl.interactions.base": (BaseInteraction,),
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


def provide(more: Mapping[str, Sequence[Any]] = MappingProxyType({})) -> None:
    """Let this process import these modules and `more` (contents by module, parents first), if verl is not installed."""
    if isinstance(sys.modules.get("verl"), _StandIn) or importlib.util.find_spec("verl") is None:
        for name, contents in {**_MODULES, **more}.items():
            if name not in sys.modules:
                _add(name, contents)


def missing_hint(error: Exception) -> str:
    """Return the end of a message for an import that failed because the stand-in lacks a part of verl; "" otherwise."""
    missing_module = getattr(error, "name", None) or ""
    if (
        not isinstance(error, ImportError)
        or not missing_module.startswith("verl")
        or not isinstance(sys.modules["verl"], _StandIn)
    ):
        return ""
    provided = sorted(name for name, module in sys.modules.items() if isinstance(module, _StandIn) and module.contents)
    return f". verl is not installed, and without it megarl provides only {', '.join(provided)}"


class _StandIn(types.ModuleType):
    """A module without a file."""

    contents: Sequence[Any] = ()


def _add(name: str, contents: Sequence[Any]) -> None:
    module = _StandIn(name, "megarl's stand-in, because verl is not installed")
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    module.contents = contents
    vars(module).update({each.__name__: each for each in contents})
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)
    sys.modules[name] = module
