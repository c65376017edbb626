"""Agent loops written for verl, as its users write them; see tests/agents/test_verl_loops.py."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, ClassVar
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
    AgentLoopOutput,
    AsyncLLMServerManager,
    register,
)
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.tools.utils.tool_registry import initialize_tools_from_config
from verl.utils.profiler import simple_timer
from verl.utils.rollout_trace import rollout_trace_op


@register("sums")
class SumLoop(AgentLoopBase):
    """Adds numbers for the policy, until a turn has no call; in the form of verl in 2026."""

    def __init__(self, *args: Any, bonus: float = 0.0, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.bonus = bonus
        self.response_length = self.rollout_config.response_length
        self.max_turns = self.rollout_config.multi_turn.max_assistant_turns

    @rollout_trace_op
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        messages = list(kwargs["raw_prompt"])
        prompt_ids = await self.ct_build_initial_tokens(messages)
        tokens, mask, logprobs = list(prompt_ids), [], []
        metrics: dict[str, Any] = {}
        parser = ToolParser.get_tool_parser(self.rollout_config.multi_turn.format, self.tokenizer)
        request_id, turns, rewards = uuid4().hex, 0, []
        while True:
            with simple_timer("generate_sequences", metrics):
                output = await self.server_manager.generate(
                    request_id=request_id, prompt_ids=tokens, sampling_params=sampling_params, image_data=None
                )
            turns += 1
            merged, mask, logprobs = await self.ct_merge_assistant_token(
                tokens, output.token_ids, mask, logprobs, assistant_logprobs=output.log_probs
            )
            tokens = merged.token_ids
            text, calls = await parser.extract_tool_calls(output.token_ids)
            if not calls or turns == self.max_turns:
                break
            messages.append({"role": "assistant", "content": text})
            arguments = json.loads(calls[0].arguments)
            answers = [{"role": "tool", "name": calls[0].name, "content": str(arguments["a"] + arguments["b"])}]
            rewards.append(0.5)
            merged, mask, logprobs = await self.ct_merge_non_assistant_msg(
                messages, messages + answers, tokens, mask, logprobs
            )
            tokens, messages = merged.token_ids, messages + answers
        truth = kwargs["reward_model"]["ground_truth"]
        response = tokens[len(prompt_ids) :]
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=response[: self.response_length],
            response_mask=mask[: self.response_length],
            response_logprobs=logprobs[: self.response_length],
            reward_score=None if kwargs["extra_info"].get("scored") else float(truth in text) + self.bonus,
            num_turns=2 * turns,
            metrics=metrics,
            extra_fields={"tool_rewards": rewards},
        )


@register("ask_again")
class AskAgainLoop(AgentLoopBase):
    """Asks a second time; in the form of verl until December 2025, with a template call and a class that is prepared."""

    prepared = ""

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, processor: Any = None, **kwargs: Any) -> None:
        cls.prepared = config.actor_rollout_ref.model.path
        super().init_class(config, tokenizer, processor, **kwargs)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        assert isinstance(self.server_manager, AsyncLLMServerManager) and self.prepared
        prompt_ids = self.tokenizer.apply_chat_template(
            list(kwargs["raw_prompt"]), add_generation_prompt=True, tokenize=True
        )
        first = await self.server_manager.generate(
            request_id="a", prompt_ids=prompt_ids, sampling_params=sampling_params
        )
        more = self.tokenizer.encode("<|im_start|>user\nAgain<|im_end|>\n<|im_start|>assistant\n")
        asked = prompt_ids + first.token_ids + more
        params = {**sampling_params, **kwargs["extra_info"].get("params", {})}
        second = await self.server_manager.generate(
            request_id="a", prompt_ids=asked, sampling_params=params, **kwargs["extra_info"].get("request", {})
        )
        if kwargs["extra_info"].get("reads"):
            print(self.config.actor_rollout_ref.rollout.custom)
        mask = [1] * len(first.token_ids) + [0] * len(more) + [1] * len(second.token_ids)
        images = {"images": [1]} if kwargs["extra_info"].get("images") else {}
        return AgentLoopOutput(  # as langgraph's example: without log-probs
            prompt_ids=prompt_ids,
            response_ids=first.token_ids + more + second.token_ids,
            response_mask=mask,
            multi_modal_data=images,
            num_turns=4,
            metrics={},
        )


@register("code")
class CodeLoop(AgentLoopBase):
    """Executes the policy's code with a tool of the run's file, in the form of verl until December 2025, as recipe/spo does."""

    tools: ClassVar[dict[str, Any]] = {}

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, processor: Any = None, **kwargs: Any) -> None:
        file = config.actor_rollout_ref.rollout.multi_turn.tool_config_path
        cls.tools = {tool.name: tool for tool in initialize_tools_from_config(file)}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.given = kwargs["tools"].tools  # in 2026
        super().__init__(*args, **kwargs)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt_ids = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        turn = await self.server_manager.generate(
            request_id="a", prompt_ids=prompt_ids, sampling_params=sampling_params
        )
        assert [tool.name for tool in self.given] == list(self.tools)
        tool = self.tools["guess"]
        instance, _ = await tool.create("an instance", create_kwargs={"degrees": 20})
        answer, _, _ = await tool.execute(instance, {"degrees": 20}, agent_data=SimpleNamespace(extra_fields={}))
        more = self.tokenizer.encode(answer.text)
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=[*turn.token_ids, *more],
            response_mask=[1] * len(turn.token_ids) + [0] * len(more),
            num_turns=2,
            metrics={},
            extra_fields={"answer": answer.text, "turn": self.tokenizer.decode(turn.token_ids)},
        )
