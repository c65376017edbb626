"""Rollout process that can serve another controller after the first one has died."""

from __future__ import annotations

import asyncio
from typing import Any

from megarl.engines.base import EngineDead, GroupRank
from megarl.rollout.server import RolloutServer

_LOOK_SECONDS = 0.01  # between looks at calls that end


class KeptRolloutServer(RolloutServer):
    """Runs inside a service process (see cluster/)."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._description: dict[str, Any] | None = None  # of the loaded engine
        self._in_group = False  # of engines that step together
        self._watch: asyncio.Task[None] | None = None

    async def start(self, group_rank: GroupRank | None = None) -> dict[str, Any]:
        """Load the engine, unless an earlier controller has; returns its description."""
        if self._description is None:
            self._in_group = group_rank is not None
            self._description = await super().start(group_rank)
        return self._description

    async def watch(self) -> None:
        """Return when the engine has been shut down; raise as soon as it has failed. All calls share a thread."""
        if self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(super().watch())
        await asyncio.shield(self._watch)

    async def release(self) -> bool:
        """End all requests of a controller that has died, and forget their results. Returns whether the engine can serve another
        controller: it is loaded and has not failed. Waits for an update of the weights."""
        if self._description is None or self._in_group:
            return False
        try:
            await asyncio.to_thread(self.engine.abort)
            while self._unsettled:  # calls of `submit`; they end with GenerationAborted
                await asyncio.sleep(_LOOK_SECONDS)
                await asyncio.to_thread(self.engine.abort)
        except EngineDead as error:
            print(f"the engine cannot serve another controller: {error}")
            return False
        for task in [*self._settling]:
            task.cancel()
        await asyncio.gather(*self._settling, return_exceptions=True)
        self._finished.forget()
        if self._responses is not None:
            self._responses.clear()
        return True
