"""The recipe's section `agent`. megarl/preflight/data.py checks names of tools together with the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Optional

from megarl.recipe.key import key


@dataclass
class McpServer:
    """An entry of `agent.mcp`: a program that speaks MCP on its standard input and output, or a URL."""

    command: list[str] = key([], "The program and its arguments. Instead of `url`.")
    env: dict[str, str] = key(
        {},
        "Environment variables of the program, in addition to PATH and HOME. They are written to the run's directory.",
    )
    pass_env: list[str] = key(
        [], "Names of environment variables of the megarl process that are passed to the program, such as tokens."
    )
    url: Optional[str] = key(None, "URL of a server (streamable HTTP). Instead of `command`.")
    headers: dict[str, str] = key(
        {}, "Headers for `url`, each with the name of the environment variable that contains its value."
    )
    tools: list[str] = key([], "Tools of the server to use. Empty: all.")
    at_once: int = key(
        16,
        "Concurrent calls per engine. Further calls wait; no timeout counts the wait. Set it to the number of calls that the server handles at a time.",
        at_least=1,
    )


@dataclass
class AgentConfig:
    """Agent loops: the policy calls tools, or talks to a user, over several turns; see docs/agents.md. Active if `tools`, `mcp`,
    `interaction` or `loop` is set."""

    tools: list[str] = key(
        [],
        "Tools that the policy may call: `code_interpreter` (Python in the sandbox), your `module:function` or `module:Class`, or a YAML file of verl's tools.",
    )
    mcp: dict[str, McpServer] = key(
        {},
        "MCP servers with tools that the policy may call, by a name of your choice: `command` or `url`, `env`, `tools`.",
    )
    interaction: Optional[str] = key(
        None,
        "The user of a conversation: `module:Class` with @interaction, or a YAML file of verl's interactions. It replies to each turn of the policy that calls no tool, until it ends the conversation.",
    )
    loop: Optional[str] = key(
        None,
        "Your agent loop, instead of megarl's: `module:Class` or `file.py:Class` with @agent_loop or of verl's AgentLoopBase, or a YAML file of verl's loops. It chooses the requests to the engine; see docs/agent_loops.md.",
    )
    loop_arguments: dict[str, Any] = key(
        {},
        "Arguments of the constructor of `loop`. For loops of verl: options of verl that they read, by name, such as `actor_rollout_ref.rollout.multi_turn.max_user_turns`.",
    )
    format: Optional[Literal["hermes", "deepseek", "gpt_oss"]] = key(
        None,
        "Syntax of the model's calls: hermes (Qwen: JSON between <tool_call> tags), deepseek (DeepSeek-V3's special tokens) or gpt_oss (its channels). Unset: derived from the chat template.",
    )
    max_turns: int = key(
        8,
        "Maximum turns of the policy per sample, with `loop` its requests. The last turn is not answered.",
        at_least=1,
    )
    max_calls_per_turn: int = key(
        4, "Maximum calls per turn. Further calls are not made, and the policy gets a message.", at_least=1
    )
    max_answer_tokens: int = key(
        512,
        "Maximum length of a tool's answer or the user's reply, in tokens. The middle of a longer one is left out, and the policy gets a message.",
        at_least=8,
    )
    tool_timeout: float = key(
        30.0,
        "Time limit of a call or a reply in seconds, without queueing, and of `loop` between two requests. After it the call is ended, and the policy gets a message; after a reply's or the loop's, the sample is sampled again (`attempts`).",
        above=0,
    )
    max_tool_seconds: float = key(
        300.0,
        "Time limit of all calls and replies of a sample together, in seconds. The sample ends if it exceeds the limit; with `loop` it is sampled again (`attempts`).",
        above=0,
    )
    tool_rewards: Literal["steps", "scorer"] = key(
        "steps",
        "Use of the rewards of tools and the interaction. steps: added to the sample's reward, as step rewards. scorer: only scorers see them, in `turns`, and a class's method `reward` is not called.",
    )
    processes: int = key(
        16,
        "Tool processes per engine, and so the maximum number of concurrent calls. Tools with state, interactions and `loop` run in further processes, one for each sample that calls one, with as many concurrent calls.",
        at_least=1,
    )
    retries: int = key(
        2,
        "Further attempts if a tool is not available (the sandbox or an MCP server fails; not if a call raises). If all fail, the sample is sampled again (`attempts`).",
        at_least=0,
    )
    attempts: int = key(
        3,
        "Times that a sample is sampled from its start, with the same seeds, while it fails because of a tool (after `retries`) and not because of the policy. If all fail, its group is left out and counted, as after a scorer failure. While a tool or server is down, samples wait instead (`rollout.outage_timeout`).",
        at_least=1,
    )

    @property
    def uses_tools(self) -> bool:
        """True if the policy may call tools."""
        return bool(self.tools or self.mcp)

    @property
    def is_used(self) -> bool:
        """True if an agent loop makes the samples."""
        return self.uses_tools or self.interaction is not None or self.loop is not None
