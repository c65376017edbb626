"""Rollout process that also returns plain completions."""

from __future__ import annotations

from megarl.rollout.server import RolloutServer
from megarl.types import Completion, GenerationRequest


class CompletionServer(RolloutServer):
    """Runs inside a service process (see cluster/)."""

    async def complete(self, requests: list[GenerationRequest]) -> list[list[Completion]]:
        """Sample `requests`; their group numbers must differ from running ones. Returns each one's completions, in seed order."""
        done: dict[int, list[Completion]] = {}
        await self._generate(requests, done.__setitem__)
        return [done[request.group] for request in requests]
