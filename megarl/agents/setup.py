"""Check a recipe's agent loop before anything starts, and build it in a rollout process."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass, field
from typing import Any

from megarl import agents
from megarl.agents import Tool, ToolUnavailable
from megarl.agents.call_formats import CALL_END, GPT_OSS, format_of
from megarl.agents.custom.find import find_loop
from megarl.agents.custom.runner import CustomLoop, LoopPool
from megarl.agents.custom.verl_loops import verl_settings
from megarl.agents.interactions import find_interaction
from megarl.agents.mcp_tools import McpTools
from megarl.agents.python_tools import PythonTools
from megarl.agents.tool_responses import AnswerTokens, ReplyTokens
from megarl.agents.toolbox import Caller, Toolbox
from megarl.agents.trajectory import AgentLoop, SampleLoop
from megarl.cluster.call_gate import CallGate, CallGates
from megarl.data.images import ImageReader
from megarl.data.tokenizer import Tokenizer
from megarl.errors import NotHereError, RecipeError, as_recipe_error
from megarl.recipe.agent import AgentConfig
from megarl.recipe.schema import Recipe


@dataclass(frozen=True)
class AgentSetup:
    """Plain values from which a rollout process builds an agent loop."""

    agent: AgentConfig
    template_args: dict[str, Any]  # for the chat template
    settings: dict[str, Any]  # for `Tool.prepare`
    verl: dict[str, Any] = field(default_factory=dict)  # for `agent.loop`: the recipe under verl's names
    chat_template: bool | str = True
    max_prompt: int = 0  # tokens

    @classmethod
    def of(cls, recipe: Recipe) -> AgentSetup | None:
        """Return the setup of a recipe, or None if it has no agent loop."""
        if not recipe.agent.is_used:
            return None
        data = recipe.data
        return cls(
            agent=recipe.agent,
            template_args=dict(data.chat_template_args),
            settings={"sandbox": asdict(recipe.sandbox)},
            verl=verl_settings(recipe) if recipe.agent.loop else {},
            chat_template=data.chat_template,
            max_prompt=data.max_prompt_length,
        )


class Agents:
    """An agent loop with the processes and connections of its tools. Belongs to one event loop."""

    def __init__(
        self,
        setup: AgentSetup,
        tokenizer: Tokenizer,
        gates: CallGates | None = None,
        images: ImageReader | None = None,
    ) -> None:
        """`gates`: of the process; None: of these tools alone. `images`: of the model, for answers of tools."""
        self._setup, self._tokenizer, self._gates = setup, tokenizer, gates or CallGates()
        self._images = images if images is not None and images.reads_images else None
        agent = setup.agent
        self._paths = {agents.find(path).name: path for path in agents.tool_paths(agent.tools)}
        if agent.interaction:
            self._paths[find_interaction(agent.interaction).name] = agent.interaction
        self._python: PythonTools | None = None
        self._servers: list[McpTools] = []
        self._loops: LoopPool | None = None

    async def start(self) -> SampleLoop:
        """Build the loop, once all tools can be called. Raises RuntimeError if one cannot."""
        agent = self._setup.agent
        if agent.loop is not None:
            return await self._start_custom(agent.loop)
        callers: dict[str, Caller] = {}
        gates: dict[str, CallGate] = {}
        tools = [agents.find(path) for path in self._paths.values()]
        if self._paths:
            self._python = PythonTools(
                self._paths, self._setup.settings, processes=agent.processes, timeout=agent.tool_timeout
            )
            await asyncio.get_running_loop().run_in_executor(None, self._python.start)
            callers.update(dict.fromkeys(self._paths, self._python))
            gates.update({tool.name: self._gates.of(tool.title) for tool in tools})
        for name, server in agent.mcp.items():
            connection = McpTools(name, server, reads_images=self._images is not None)
            self._servers.append(connection)
            offered = await connection.tools()
            callers.update({tool.name: connection for tool in offered})
            gate = self._gates.of(connection.service, probe=connection.tools)
            gates.update(dict.fromkeys((tool.name for tool in offered), gate))
            tools += offered
        open_sample = None if self._python is None else self._python.open_sample
        toolbox = Toolbox(tools, callers, agent.tool_timeout, agent.retries, open_sample, gates)
        arguments = self._tokenizer, self._setup.template_args, agent.max_answer_tokens
        return AgentLoop(
            agent,
            chosen_format(agent, self._tokenizer) if agent.uses_tools else None,
            self._tokenizer,
            AnswerTokens(*arguments, images=self._images) if agent.uses_tools else None,
            toolbox,
            ReplyTokens(*arguments) if agent.interaction else None,
        )

    async def _start_custom(self, path: str) -> CustomLoop:
        setup, agent, tokenizer = self._setup, self._setup.agent, self._tokenizer
        settings = {
            "tokenizer": str(tokenizer.directory),
            "chat_template": setup.chat_template,
            "template_args": setup.template_args,
            "max_answer_tokens": agent.max_answer_tokens,
            "arguments": agent.loop_arguments,
            "verl": setup.verl,
        }
        self._loops = LoopPool(path, settings, at_once=agent.processes, timeout=agent.tool_timeout)
        await asyncio.get_running_loop().run_in_executor(None, self._loops.start)
        title = find_loop(path, agent.loop_arguments, setup.verl, tokenizer).title
        return CustomLoop(agent, title, tokenizer, self._loops, setup.max_prompt, self._gates.of(title))

    async def close(self) -> None:
        """End every process and connection."""
        if self._loops is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._loops.close)
        for server in self._servers:
            await server.close()
        if self._python is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._python.close)


def chosen_format(agent: AgentConfig, tokenizer: Tokenizer) -> str:
    """Return the call format: `agent.format`, else the one that the chat template shows.

    Raises:
        ValueError: neither names one, or engines do not stop at its calls.
    """
    format = agent.format or format_of(str(tokenizer.chat_template or ""))
    if format is None:
        raise ValueError(
            f"the chat template in {tokenizer.directory} does not show its model how Qwen, DeepSeek or gpt-oss write calls of "
            "tools: set agent.format to hermes, deepseek or gpt_oss, or use a template for tools"
        )
    if format == GPT_OSS and tokenizer.tokens().get(CALL_END) not in tokenizer.stop_ids:
        raise ValueError(
            f"engines do not stop at {CALL_END}, which ends gpt-oss's calls: add its id to eos_token_id in generation_config.json "
            f"of {tokenizer.directory}, or set another agent.format"
        )
    return format


def check_tools(setup: AgentSetup, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Check tools, MCP servers, the interaction or the user's loop, and the chat template, and return the tools' schemas as the template shows them to
    the policy.

    Raises:
        ValueError: a tool, the interaction or the loop does not exist, two tools have one name, or the chat template cannot write the
            messages of tools or the user.
    """
    agent = setup.agent
    if agent.loop is not None:
        with as_recipe_error("agent.loop", "name a class or a file of agent loops (docs/agent_loops.md)", agent.loop):
            find_loop(agent.loop, agent.loop_arguments, setup.verl, tokenizer)
        return []
    if agent.interaction:
        with as_recipe_error("agent.interaction", "name a class decorated with @interaction", agent.interaction):
            find_interaction(agent.interaction)
        ReplyTokens(tokenizer, setup.template_args, agent.max_answer_tokens)
    if not agent.uses_tools:
        return []
    chosen_format(agent, tokenizer)
    tools: dict[str, tuple[str, Tool]] = {}
    try:
        offered = asyncio.run(_offered(agent)) if agent.mcp else {}
    except ToolUnavailable as error:
        raise NotHereError("agent.mcp", str(error), "start the server, or leave it out") from error
    with as_recipe_error(
        "agent.tools", "name existing tools, and install the packages that their modules import", agent.tools
    ):
        local = [("agent.tools", agents.find(path)) for path in agents.tool_paths(agent.tools)]
    for origin, tool in [*local, *((f"agent.mcp.{name}", tool) for name, more in offered.items() for tool in more)]:
        if tool.name in tools:
            raise ValueError(
                f"{origin} and {tools[tool.name][0]} both have a tool {tool.name!r}: leave one of them out"
            )
        tools[tool.name] = (origin, tool)
    for tool in (tool for _, tool in tools.values() if tool.is_interaction):
        raise RecipeError("agent.tools", f"the policy cannot call {tool.title}", "name it in agent.interaction")
    everything = [tool for _, tool in tools.values()]
    Toolbox(everything, {}, agent.tool_timeout, agent.retries)
    AnswerTokens(tokenizer, setup.template_args, agent.max_answer_tokens)
    _prepare(everything, setup.settings)
    return [tool.schema for tool in everything]


def image_notice(setup: AgentSetup, tokenizer: Tokenizer, images: ImageReader) -> str | None:
    """Return a notice if the chat template cannot show images in answers of tools to a model that reads images."""
    if AnswerTokens(tokenizer, setup.template_args, setup.agent.max_answer_tokens, images).writes_images:
        return None
    return (
        f"the chat template in {tokenizer.directory} writes no placeholder for images of tool messages: an answer with an image would "
        "end the run. Set data.chat_template to a template that writes them, such as Qwen3-VL's, if tools answer with images"
    )


def _prepare(tools: list[Tool], settings: dict[str, Any]) -> None:
    for tool in tools:
        if tool.prepare is not None:
            try:
                tool.prepare(settings)
            except Exception as error:
                problem = f"tool {tool.name!r} cannot be used here: {error}"
                raise NotHereError("agent.tools", problem, "install its requirements, or leave the tool out") from error


async def _offered(agent: AgentConfig) -> dict[str, list[Tool]]:
    servers = [McpTools(name, server) for name, server in agent.mcp.items()]
    try:
        return {server.name: await server.tools() for server in servers}
    finally:
        for server in servers:
            await server.close()
