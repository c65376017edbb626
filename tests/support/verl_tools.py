"""Three tools written for verl, as its users write them; see tests/agents/test_verl_tools.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Optional

from PIL import Image
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op


class ThermometerTool(BaseTool):
    """A guess of a hidden temperature. The first hit pays, and each guess that is not nearer than the last one costs."""

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.penalty = config["penalty"]
        self._guesses: dict[str, list[float]] = {}
        self._hidden: dict[str, float] = {}

    async def create(self, instance_id: Optional[str] = None, **kwargs) -> tuple[str, ToolResponse]:
        hidden = kwargs["create_kwargs"]["degrees"]
        self._guesses[instance_id], self._hidden[instance_id] = [], float(hidden)
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> tuple[ToolResponse, float, dict]:
        guess, hidden = float(parameters["degrees"]), self._hidden[instance_id]
        earlier = [abs(each - hidden) for each in self._guesses[instance_id]]
        self._guesses[instance_id].append(guess)
        kwargs["agent_data"].extra_fields["last"] = guess
        reward = 0.0 if not earlier or abs(guess - hidden) < earlier[-1] else -self.penalty
        text = "hit" if guess == hidden else "too warm" if guess > hidden else "too cold"
        return ToolResponse(text=text), reward, {"guesses": len(earlier) + 1}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        return float(self._hidden[instance_id] in self._guesses[instance_id]) * kwargs.get("scale", 1.0)

    async def release(self, instance_id: str, **kwargs) -> None:
        del self._guesses[instance_id], self._hidden[instance_id]


class NotesTool(BaseTool):
    """Notes of a sample, written to a file at its end. Its schema is in the code, and its answers are plain strings."""

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        parameters = {
            "type": "object",
            "properties": {"note": {"type": "string", "description": "The note.", "maxLength": 80}},
            "required": ["note"],
        }
        function = {"name": "take_note", "description": "Keeps a note.", "parameters": parameters}
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})

    async def create(self, instance_id: str, path: str, **kwargs) -> str:
        self.notes: list[str] = []
        self.path = path
        return instance_id

    async def execute(self, instance_id: str, parameters: dict[str, Any], prefix: str = "", **kwargs):
        self.notes.append(prefix + parameters["note"])
        last = kwargs["agent_data"].extra_fields.get("last")
        return f"{len(self.notes)} notes, last guess {last}", None, {}

    async def calc_reward(self, instance_id: str) -> float:
        return 0.0

    async def release(self, instance_id: str) -> None:
        Path(self.path).write_text("\n".join(self.notes))


class PictureTool(BaseTool):
    """Answers with an image or a video, or reads what megarl does not pass."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], agent_data=None) -> tuple:
        if parameters["what"] == "messages":
            return ToolResponse(text=str(agent_data.messages)), 0.0, {}
        if parameters["what"] == "tokens":
            return ToolResponse(text=str(getattr(agent_data, "prompt_ids", "none"))), 0.0, {}
        if parameters["what"] == "film":
            return ToolResponse(video=[[]], text="a film"), 0.0, {}
        picture = Image.new("RGB", (70, 40), "red") if parameters["what"] == "crop" else object()
        return ToolResponse(image=[picture], text="a crop"), 0.0, {}


class DigitTool(BaseTool):
    """Looks up digits. A sample's first look-up earns 0.25, each further one costs 0.125, and the sample earns 1 / 16 at its end.
    Creations and releases are logged."""

    def _log(self, line: str) -> None:
        with Path(self.config["log"]).open("a") as file:
            file.write(line + "\n")

    async def create(self, instance_id: Optional[str] = None, **kwargs) -> tuple[str, ToolResponse]:
        self.calls, self.table = 0, kwargs["create_kwargs"]["table"]
        self._log(f"create {instance_id}")
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> tuple[ToolResponse, float, dict]:
        self.calls += 1
        reward = 0.25 if self.calls == 1 else -0.125
        return ToolResponse(text=str(self.table[parameters["key"]])), reward, {}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        return 1 / 16

    async def release(self, instance_id: str, **kwargs) -> None:
        self._log(f"release {instance_id}")
