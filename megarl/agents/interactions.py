"""Interactions: a user's class answers each of the policy's turns as the user, until it ends the conversation. docs/interactions.md.

An interaction is a tool with state that megarl calls instead of the policy: it runs in the sample's process, with the same limits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from megarl.agents.tool import INTERACTION, Answer, Reply, Tool, ToolFault, check_methods, find

C = TypeVar("C", bound=type)


def interaction(class_: C) -> C:
    """Let a class play the user: ``@interaction``. It is returned unchanged.

    Its method ``reply(messages)`` receives the conversation so far, a list of ``{"role", "content"}`` that ends with the policy's
    turn, and returns a `Reply`, or the user's text. The methods ``start``, ``reward`` and ``end`` may exist as in a class of `tool`;
    all may be ``async def``.

    Raises:
        ValueError: a method is missing or takes other arguments.
    """
    title = f"interaction {class_.__name__!r}"
    check_methods(class_, title)
    reply = getattr(class_, "reply", None)
    if not callable(reply):
        raise ValueError(f"{title}: its class has no method reply, which answers the policy's turns")
    try:
        inspect.signature(reply).bind(None, None)
    except TypeError as error:
        raise ValueError(f"{title}: its method reply must take the list of messages: {error}") from error
    class_.__megarl_tool__ = interaction_tool(class_.__name__, class_)  # type: ignore[attr-defined]
    return class_


def interaction_tool(name: str, create: Callable[[], Any]) -> Tool:
    """Return an interaction as a tool with state. `create`: returns the object of a sample, with a method `reply`."""
    parameters = {"type": "object", "properties": {}}
    return Tool(INTERACTION + name, "", parameters, lambda: _User(create()), stateful=True, is_interaction=True)


def find_interaction(path: str) -> Tool:
    """Return the interaction of `agent.interaction`. Raises ValueError if there is none."""
    tool = find(path)
    if not tool.is_interaction:
        raise ValueError(
            f"{path!r} is a tool: name it in agent.tools, or decorate a class with megarl.agents.interaction"
        )
    return tool


class _User:
    """The object of a sample, with the methods of a class that `megarl.agents.tool` takes."""

    def __init__(self, user: Any) -> None:
        self._user = user
        for method in ("start", "reward", "end"):
            if hasattr(user, method):
                setattr(self, method, getattr(user, method))

    async def call(self, messages: list[dict[str, Any]]) -> Reply:
        """Return the user's reply. Raises ToolFault if it is neither text nor a `Reply`."""
        reply = self._user.reply(messages)
        if inspect.isawaitable(reply):
            reply = await reply
        if isinstance(reply, str):
            return Reply(reply)
        if not isinstance(reply, Reply):
            hint = ". An Answer is a tool's" if isinstance(reply, Answer) else ""
            raise ToolFault(f"it replied with {reply!r} ({type(reply).__name__}), and not with text or a Reply{hint}")
        return reply
