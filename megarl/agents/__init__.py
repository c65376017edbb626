"""Agent loops: the policy samples, tools answer, until the response is complete. docs/agents.md."""

from megarl.agents import code_interpreter as code_interpreter  # registers itself
from megarl.agents.tool import Answer, Context, Tool, ToolUnavailable, find, tool, tool_paths

__all__ = ["Answer", "Context", "Tool", "ToolUnavailable", "find", "tool", "tool_paths"]
