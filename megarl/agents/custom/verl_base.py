"""The modules of verl that its agent loops import, for machines without verl (see `verl_stand_in`).

Names, fields and signatures follow verl/experimental/agent_loop/agent_loop.py, tool_parser.py and utils.py,
verl/workers/rollout/replica.py and llm_server.py, and verl/utils/profiler/performance.py (verl-project/verl at 1dda0394), and the
earlier form of AgentLoopBase (at b178a3cd).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, Field

from megarl.agents.call_formats import calls_in
from megarl.agents.verl_tools import initialize_tools_from_config

C = TypeVar("C", bound=type)
REGISTERED: dict[str, type] = {}
"""Classes by the name with which verl's `register` declares them."""


class AgentLoopMetrics(BaseModel):
    """Times of a sample; not used."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1


class AgentLoopOutput(BaseModel):
    """The result of a loop; `verl_loops.response_of` converts it."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    routed_experts: Any | None = None
    multi_modal_data: dict[str, Any] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics
    extra_fields: dict[str, Any] = Field(default_factory=dict)
    mm_processor_kwargs: dict[str, Any] | None = None


class TokenOutput(BaseModel):
    """The engine's answer to a request."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any | None = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = Field(default_factory=dict)


class LLMServerClient:
    """Class of `AgentLoopBase.server_manager`, for annotations; `verl_loops.server_of` makes the object."""


class AsyncLLMServerManager(LLMServerClient):
    """The earlier name of that class."""


class DictConfigWrap:
    """A configuration as an argument of a loop's constructor."""

    def __init__(self, config: Any) -> None:
        self.config = config


class ToolListWrap:
    """Tools as an argument of a loop's constructor."""

    def __init__(self, tools: list[Any]) -> None:
        self.tools = tools


class MergedTokens(BaseModel):
    """The tokens of a conversation after a message was appended."""

    token_ids: list[int]
    appended_token_count: int


class AgentLoopBase(ABC):
    """Base class of loops. A subclass has the method `run`."""

    def __init__(
        self,
        trainer_config: DictConfigWrap,
        server_manager: Any,
        tokenizer: Any,
        processor: Any,
        dataset_cls: Any = None,
        data_config: DictConfigWrap | None = None,
        hf_model_type: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.config = trainer_config.config
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.server_manager, self.tokenizer, self.processor = server_manager, tokenizer, processor
        self.dataset_cls = dataset_cls
        self.data_config = self.dataset_config = self.config.data if data_config is None else data_config.config
        self.apply_chat_template_kwargs = dict(self.data_config.get("apply_chat_template_kwargs") or {})
        self.mm_processor_kwargs: dict[str, Any] = {}
        self.loop = asyncio.get_running_loop()

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, processor: Any = None, **kwargs: Any) -> None:
        """Prepare the class, once in a process; verl calls it until December 2025."""

    @property
    def system_prompt(self) -> list[int]:
        """Tokens that the template writes before an empty conversation."""
        return self._rendered([{}], add_generation_prompt=False)

    async def process_vision_info(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        return {}

    async def process_multi_modal_info(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        return {}

    def _assert_mm_supported(self, has_multi_modal: bool) -> None:
        assert not has_multi_modal, "rows with images are refused before the start"

    def _get_mm_processor_kwargs(self, audio_data: list[Any] | None = None) -> dict[str, Any]:
        return {}

    async def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        images: Any = None,
        videos: Any = None,
        remove_system_prompt: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        """Return the tokens of a conversation with the head of the policy's turn."""
        tokens = await asyncio.to_thread(self._rendered, messages, tools=tools, add_generation_prompt=True)
        return tokens[len(self.system_prompt) :] if remove_system_prompt else tokens

    async def ct_build_initial_tokens(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        images: Any = None,
        videos: Any = None,
        audios: Any = None,
    ) -> list[int]:
        """Return the prompt's tokens. A prompt above data.max_prompt_length fails later; verl cuts its beginning off."""
        return await self.apply_chat_template(messages, tools)

    async def ct_merge_assistant_token(
        self,
        runtime_token_ids: list[int],
        assistant_token_ids: list[int],
        response_mask: list[int],
        response_logprobs: list[float] | None = None,
        assistant_logprobs: list[float] | None = None,
    ) -> tuple[MergedTokens, list[int], list[float] | None]:
        """Append the policy's tokens, with 1 in the mask."""
        return _merged(runtime_token_ids, assistant_token_ids, response_mask, response_logprobs, assistant_logprobs, 1)

    async def ct_merge_non_assistant_msg(
        self,
        previous_messages: list[dict[str, Any]],
        updated_messages: list[dict[str, Any]],
        runtime_token_ids: list[int],
        response_mask: list[int],
        response_logprobs: list[float] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> tuple[MergedTokens, list[int], list[float] | None]:
        """Append the messages that `updated_messages` adds, of tools or one of the user, with 0 in the mask."""
        added = updated_messages[len(previous_messages) :]
        tokens = await asyncio.to_thread(self.server_manager.between, added)
        return _merged(runtime_token_ids, tokens, response_mask, response_logprobs, [0.0] * len(tokens), 0)

    def _rendered(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        arguments = {**self.apply_chat_template_kwargs, **kwargs}
        return list(self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **arguments))

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Make a sample. The keywords are the row's columns."""


def _merged(
    tokens: list[int],
    added: list[int],
    mask: list[int],
    log_probs: list[float] | None,
    more: list[float] | None,
    on: int,
) -> tuple[MergedTokens, list[int], list[float] | None]:
    if log_probs is not None:
        log_probs = [*log_probs, *(more or [0.0] * len(added))]
    merged = MergedTokens(token_ids=[*tokens, *added], appended_token_count=len(added))
    return merged, [*mask, *[on] * len(added)], log_probs


def register(agent_name: str) -> Callable[[C], C]:
    """Declare a loop's name, by which rows and configuration files choose it."""

    def declare(class_: C) -> C:
        REGISTERED[agent_name] = class_
        return class_

    return declare


class FunctionCall(BaseModel):
    """A call of the policy; `arguments` is JSON."""

    arguments: str
    name: str
    tool_call_id: str | None = None


class ToolParser:
    """Reads calls in the policy's turns: Qwen's syntax, hermes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Any) -> ToolParser:
        """Return the reader of a syntax. Raises ValueError for others than hermes."""
        if name != "hermes":
            raise ValueError(f"tool parser {name!r}: without verl on PYTHONPATH megarl provides hermes only")
        return cls(tokenizer)

    async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[FunctionCall]]:
        """Return the text without calls, and the calls that can be read."""
        text = await asyncio.to_thread(self.tokenizer.decode, list(responses_ids))
        calls = [call for call in calls_in(text, "hermes") if not call.problem]
        if not calls:
            return text, []
        content = re.sub(r"<tool_call>.*?</tool_call>", "", text, flags=re.DOTALL)
        dumped = [json.dumps(call.arguments, ensure_ascii=False) for call in calls]
        return content, [FunctionCall(name=call.name, arguments=text) for call, text in zip(calls, dumped, strict=True)]


@contextlib.contextmanager
def simple_timer(name: str, timing_raw: dict[str, float]) -> Iterator[None]:
    """Add the seconds of a block to `timing_raw[name]`."""
    began = time.perf_counter()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - began


def get_event_loop() -> asyncio.AbstractEventLoop:
    """Return the running loop."""
    return asyncio.get_running_loop()


def format_gpt_oss_tool_response_manually(tool_response: str, tool_call_name: str) -> str:
    """Return a tool's message in gpt-oss's format."""
    return f"<|start|>functions.{tool_call_name} to=assistant<|channel|>commentary<|message|>{tool_response}<|end|>"


def add_generation_prompt_for_gpt_oss(message_content: str) -> str:
    """Append the head of gpt-oss's next turn."""
    return f"{message_content}<|start|>assistant"


_LOOP = (
    AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, AsyncLLMServerManager, DictConfigWrap, LLMServerClient, ToolListWrap, register,
)  # fmt: skip
LOOP_MODULES: Mapping[str, Sequence[Any]] = {
    "verl.experimental": (),
    "verl.experimental.agent_loop": (AgentLoopBase, AgentLoopOutput),
    "verl.experimental.agent_loop.agent_loop": _LOOP,
    "verl.experimental.agent_loop.tool_parser": (FunctionCall, ToolParser),
    "verl.experimental.agent_loop.utils": (add_generation_prompt_for_gpt_oss, format_gpt_oss_tool_response_manually),
    "verl.tools.utils": (),
    "verl.tools.utils.tool_registry": (initialize_tools_from_config,),
    "verl.utils.profiler": (simple_timer,),
    "verl.utils.ray_utils": (get_event_loop,),
    "verl.workers": (),
    "verl.workers.rollout": (),
    "verl.workers.rollout.llm_server": (LLMServerClient,),
    "verl.workers.rollout.replica": (TokenOutput,),
}
