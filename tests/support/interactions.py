"""Interactions as users write them, one for megarl and one for verl; see tests/agents/test_interactions.py."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, Optional

from megarl.agents import Answer, Context, Reply, interaction, verl_stand_in

verl_stand_in.provide()
from verl.interactions.base import BaseInteraction  # noqa: E402


@interaction
class Patient:
    """Knows an illness, tells a symptom per turn, and thanks for the right diagnosis."""

    ended: ClassVar[list[str]] = []

    def start(self, context: Context) -> None:
        self.illness, self.symptoms = context.ground_truth, list(context.extra_info["symptoms"])

    async def reply(self, messages: list[dict[str, Any]]) -> Reply | str | Answer:
        await asyncio.sleep(0)
        said = messages[-1]["content"]
        if said == "loop":
            raise RuntimeError("no such question")
        if said == "answer":
            return Answer("I am no tool")
        if self.illness in said:
            return Reply("Thank you", reward=1.0, ends=True)
        if not self.symptoms:
            return f"You asked {sum(message['role'] == 'assistant' for message in messages)} times"
        return Reply(self.symptoms.pop(0), reward=-0.25)

    def reward(self) -> float:
        return 0.125 * len(self.symptoms)

    def end(self) -> None:
        self.ended.append(self.illness)


class SumInteraction(BaseInteraction):
    """Rejects answers until one is the sum; as verl's demonstration for GSM8K."""

    def __init__(self, config: dict):
        super().__init__(config)
        self._instances: dict[str, dict[str, Any]] = {}
        self.praise = config["praise"]

    async def start_interaction(
        self, instance_id: Optional[str] = None, ground_truth: Optional[str] = None, **kwargs: Any
    ) -> str:
        self._instances[instance_id or "none"] = {"ground_truth": ground_truth, "wrong": 0}
        return instance_id or "none"

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict]:
        state = self._instances[instance_id]
        answer = next(message["content"] for message in reversed(messages) if message["role"] == "assistant")
        if answer == state["ground_truth"]:
            return True, f"{self.praise}, {kwargs['name']}", 1.0, {}
        state["wrong"] += 1
        return False, f"Wrong {state['wrong']} times", 0.0, {}

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        del self._instances[instance_id]


@interaction
class Examiner:
    """Replies twice, a quarter for each turn, and then ends the conversation."""

    def __init__(self) -> None:
        self.replies = 0

    def reply(self, messages: list[dict[str, Any]]) -> Reply:
        assert messages[0]["role"] == "user" and messages[-1]["role"] == "assistant", messages
        self.replies += 1
        return Reply(f"Again, please ({self.replies})", reward=0.25, ends=self.replies == 3)
