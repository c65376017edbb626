"""What the policy may call between its turns: Python functions, code in the sandbox, MCP servers. docs/agents.md."""

from megarl.tools import code_interpreter as code_interpreter  # registers itself
from megarl.tools.base import Answer, Context, Tool, ToolUnavailable, find, tool

__all__ = ["Answer", "Context", "Tool", "ToolUnavailable", "find", "tool"]
