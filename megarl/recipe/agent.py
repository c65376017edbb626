"""The recipe's section `agent`. Names of tools are checked with the data (megarl/preflight/data.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Optional

from megarl.recipe.key import key


@dataclass
class McpServer:
    """One of `agent.mcp`: a program that speaks MCP on its standard input and output, or a URL."""

    command: list[str] = key([], "The program and its arguments. Instead of `url`.")
    env: dict[str, str] = key(
        {}, "Environment variables for the program, beside PATH and HOME. They are written to the run's directory."
    )
    pass_env: list[str] = key(
        [], "Names of environment variables of megarl's own that the program is given, such as tokens."
    )
    url: Optional[str] = key(None, "Where a server listens (streamable HTTP). Instead of `command`.")
    headers: dict[str, str] = key(
        {}, "Headers for `url`, each with the name of the environment variable that holds its value."
    )
    tools: list[str] = key([], "Of the tools that it offers, those to use. Empty: all.")
    at_once: int = key(
        16,
        "Calls under way at a time, of each engine; others wait, which counts for no time-out. As many as the server answers at a time.",
        at_least=1,
    )


@dataclass
class AgentConfig:
    """Agent loops: the policy may call tools over several turns; see docs/agents.md. There is one where `tools` or `mcp`
    names a tool."""

    tools: list[str] = key(
        [],
        "Tools that the policy may call: `code_interpreter` (Python in the sandbox), or `module:function` of your own.",
    )
    mcp: dict[str, McpServer] = key(
        {}, "MCP servers whose tools the policy may call, by a name of your own: `command` or `url`, `env`, `tools`."
    )
    format: Optional[Literal["hermes", "deepseek"]] = key(
        None,
        "How the model writes calls: hermes (Qwen: JSON between <tool_call> tags) or deepseek (DeepSeek-V3's own tokens). Unset: known by the chat template.",
    )
    max_turns: int = key(8, "The policy's turns in a sample; a call in the last of them is not answered.", at_least=1)
    max_calls_per_turn: int = key(
        4, "Calls in one turn that are answered; the policy is told that the others were not made.", at_least=1
    )
    max_answer_tokens: int = key(
        512,
        "Longest answer of a tool, in tokens: of a longer one the middle is left out, and the policy is told so.",
        at_least=8,
    )
    tool_timeout: float = key(
        30.0,
        "Seconds that one call may run, waiting not counted. Then it is ended, and the policy is told so.",
        above=0,
    )
    max_tool_seconds: float = key(
        300.0, "Seconds that all calls of a sample may run together. Then the sample ends as it stands.", above=0
    )
    processes: int = key(16, "Processes that run tools, beside each engine: as many calls at a time.", at_least=1)
    retries: int = key(
        2,
        "Further attempts where a tool is not to be had (the sandbox or an MCP server fails; not where a call raises). After them the sample's group is left out and counted, as where a scorer fails.",
        at_least=0,
    )
