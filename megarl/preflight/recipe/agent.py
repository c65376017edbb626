"""Checks of the section `agent`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.errors import RecipeError
from megarl.recipe.urls import check_headers, check_url

if TYPE_CHECKING:
    from megarl.recipe.schema import Recipe
from megarl.recipe.agent import AgentConfig, uses_tools


def check_agent(recipe: Recipe) -> None:
    """Raise RecipeError for an agent loop that cannot be had as asked."""
    agent = recipe.agent
    if not uses_tools(recipe):
        if agent != AgentConfig():
            what = "no tool is named: this section would change nothing"
            raise RecipeError("agent", what, "name one in agent.tools or agent.mcp, or leave the section out")
        return
    if recipe.train.source != "rollout":
        what = f"engines sample nothing where train.source is '{recipe.train.source}'"
        remedy = "leave the section out: demonstrations name tools in their own column `tools`"
        raise RecipeError("agent", what, remedy)
    if not recipe.data.chat_template:
        what = "tools, and what they answer, are written by a chat template"
        raise RecipeError("data.chat_template", what, "set it to true", value=False)
    if len(set(agent.tools)) < len(agent.tools):
        raise RecipeError("agent.tools", "a tool is named twice", "name it once", value=list(agent.tools))
    for name, server in agent.mcp.items():
        if bool(server.command) == bool(server.url):
            what = "an MCP server is started by `command`, or listens at `url`: one of the two"
            raise RecipeError(f"agent.mcp.{name}", what, "set one of the two")
        if server.command and server.headers:
            raise RecipeError(
                f"agent.mcp.{name}.headers", "they are sent to a `url`, and there is none", "leave them out"
            )
        if server.url:
            check_url(f"agent.mcp.{name}", server.url)
            check_headers(f"agent.mcp.{name}", server.headers)
        for setting in ("env", "pass_env"):
            if server.url and getattr(server, setting):
                what = "a server that listens at a URL was started by somebody else, with its own environment"
                raise RecipeError(f"agent.mcp.{name}.{setting}", what, "leave it out")
