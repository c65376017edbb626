"""Agent loops: the policy samples, tools answer, until the response is complete. docs/agents.md."""

from megarl.agents import code_interpreter as code_interpreter  # registers itself
from megarl.agents.custom.interface import LoopSample, Response, Sampled, agent_loop
from megarl.agents.interactions import interaction
from megarl.agents.tool import Answer, Context, Reply, Tool, ToolUnavailable, find, tool, tool_paths

__all__ = [
    "Answer",
    "Context",
    "LoopSample",
    "Reply",
    "Response",
    "Sampled",
    "Tool",
    "ToolUnavailable",
    "agent_loop",
    "find",
    "interaction",
    "tool",
    "tool_paths",
]
