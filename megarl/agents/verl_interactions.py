"""Interactions written for verl: a YAML file (`interaction_config_path`) of classes derived from verl.interactions.base.BaseInteraction.

The classes run unchanged. A row names its interaction in extra_info.interaction_kwargs, as with verl's tool agent loop
(verl/experimental/agent_loop/tool_agent_loop.py at b178a3cd), which never finalizes an interaction; here it is finalized at the
sample's end.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.agents import Context, verl_stand_in
from megarl.agents.interactions import interaction_tool
from megarl.agents.tool import Reply, Tool, ToolFault
from megarl.agents.verl_tools import class_of, entries_of

_METHODS = ("start_interaction", "generate_response", "finalize_interaction")
KWARGS = "interaction_kwargs"


def interaction_of_file(file: str) -> Tool:
    """Return the interactions of a YAML file as one, which is the row's. The file is read once per process.

    Raises ValueError for a file or class that cannot be used.
    """
    return _interaction_of(Path(file).absolute())


@functools.cache
def _interaction_of(file: Path) -> Tool:
    verl_stand_in.provide()
    makers: dict[str, Callable[[], Any]] = {}
    for number, entry in enumerate(entries_of(file, "interaction")):
        place = f"{file}, interaction {number + 1}"
        class_ = class_of(entry.get("class_name"), place, "BaseInteraction", _METHODS)
        name = entry.get("name") or class_.__name__.removesuffix("Interaction").lower()
        if name in makers:
            raise ValueError(f"{file}: two interactions have the name {name!r}")
        makers[name] = functools.partial(class_, config={**(entry.get("config") or {}), "name": name})
    for name, make in makers.items():
        try:
            make()
        except Exception as error:
            raise ValueError(
                f"{file}: interaction {name!r} cannot be created: {type(error).__name__}: {error}"
            ) from error
    return interaction_tool(file.name, lambda: _VerlUser(makers))


class _VerlUser:
    """The interaction of a sample, with the methods of a class that `megarl.agents.interaction` takes."""

    def __init__(self, makers: dict[str, Callable[[], Any]]) -> None:
        self._makers = makers

    async def start(self, context: Context) -> None:
        """Create the row's interaction. Raises ToolFault if the row names none."""
        self._kwargs: dict[str, Any] = context.extra_info.get(KWARGS) or {}
        name = self._kwargs.get("name")
        if name not in self._makers:
            names = ", ".join(self._makers)
            raise ToolFault(f"the row's extra_info.{KWARGS}.name is {name!r}, and the file has {names}")
        self._interaction = self._makers[name]()
        self._instance = str(context.sample)
        await self._interaction.start_interaction(self._instance, **self._kwargs)

    async def reply(self, messages: list[dict[str, Any]]) -> Reply:
        """Return the user's reply. A score of None counts as 0."""
        ends, text, score, *_ = await self._interaction.generate_response(self._instance, messages, **self._kwargs)
        return Reply(text, 0.0 if score is None else score, bool(ends))

    async def end(self) -> None:
        """Finalize the interaction; verl's base class takes no argument, and its subclasses take the instance."""
        finalize = self._interaction.finalize_interaction
        await (finalize(self._instance) if inspect.signature(finalize).parameters else finalize())
