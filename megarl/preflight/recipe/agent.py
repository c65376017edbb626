"""Checks of the section `agent`."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.errors import RecipeError, errors_of
from megarl.preflight.recipe.shared import unused_section_errors
from megarl.recipe.agent import AgentConfig, McpServer
from megarl.recipe.schema import Recipe
from megarl.recipe.urls import check_headers, check_url


def agent_errors(recipe: Recipe) -> Iterator[ValueError]:
    agent = recipe.agent
    if not agent.is_used:
        remedy = (
            "name a tool in agent.tools, a server in agent.mcp, a user in agent.interaction or your loop in agent.loop"
        )
        yield from unused_section_errors("agent", agent, "no tool, interaction or loop is named", remedy)
        return
    if recipe.train.source != "rollout":
        problem = f"train.source={recipe.train.source} samples nothing, so tools and interactions are never called"
        remedy = "leave the section out: demonstrations name tools in their column `tools`"
        yield RecipeError("agent", problem, remedy)
        return
    if agent.loop is not None:
        yield from _loop_errors(recipe)
        return
    if agent.loop_arguments:
        problem = "they are arguments of agent.loop, which names no class"
        yield RecipeError("agent.loop_arguments", problem, "leave them out", value=dict(agent.loop_arguments))
    for name in ("format", "max_calls_per_turn"):
        value = getattr(agent, name)
        if not agent.uses_tools and value != getattr(AgentConfig(), name):
            problem = "the policy calls no tool: agent.tools and agent.mcp are empty"
            yield RecipeError(f"agent.{name}", problem, "leave it out", value=value)
    if not recipe.data.applies_template:
        problem = "the messages of tools and users need a chat template"
        yield RecipeError("data.chat_template", problem, "set it to true", value=False)
    if recipe.rollout.ignore_eos:
        problem = "in an agent loop, end-of-text tokens end the policy's turns"
        yield RecipeError(
            "rollout.ignore_eos", problem, "set it to false, or name no tool and no interaction", value=True
        )
    repeated = sorted({tool for tool in agent.tools if agent.tools.count(tool) > 1})
    if repeated:
        problem = f"listed more than once: {', '.join(repeated)}"
        yield RecipeError("agent.tools", problem, "list each tool once", value=list(agent.tools))
    for name, server in agent.mcp.items():
        yield from _server_errors(f"agent.mcp.{name}", server)


_UNUSED_WITH_LOOP = ("tools", "mcp", "interaction", "format", "max_calls_per_turn", "tool_rewards", "retries")


def _loop_errors(recipe: Recipe) -> Iterator[ValueError]:
    """Refuse settings that a loop of the user does not use, and parts of a run that it cannot fill."""
    agent, setting = recipe.agent, f"agent.loop={recipe.agent.loop}"
    for name in _UNUSED_WITH_LOOP:
        if (value := getattr(agent, name)) != getattr(AgentConfig(), name):
            problem = f"{setting} decides what the policy reads: megarl runs no tools and no interaction in it"
            yield RecipeError(f"agent.{name}", problem, "leave it out, or leave agent.loop out", value=value)
    if recipe.megatron.routing_replay == "rollout":
        problem = f"the requests of {setting} are separate, and no answer has the experts of all tokens of the response"
        yield RecipeError("megatron.routing_replay", problem, "leave it out", value="rollout")
    if recipe.rollout.ignore_eos:
        problem = f"the requests of {setting} end at end-of-text tokens"
        yield RecipeError("rollout.ignore_eos", problem, "set it to false, or leave agent.loop out", value=True)


def _server_errors(section: str, server: McpServer) -> Iterator[ValueError]:
    if bool(server.command) == bool(server.url):
        problem = "an MCP server needs either `command` to start it or `url` to connect to it"
        yield RecipeError(section, problem, "set exactly one of the two")
        return
    if server.command and server.headers:
        yield RecipeError(f"{section}.headers", "headers are sent to a `url`, which is unset", "leave them out")
    if server.url:
        yield from errors_of(check_url, section, server.url)
        yield from errors_of(check_headers, section, server.headers)
        for setting in ("env", "pass_env"):
            if getattr(server, setting):
                problem = "megarl does not start a server with a `url`, and cannot set its environment"
                yield RecipeError(f"{section}.{setting}", problem, "leave it out")
