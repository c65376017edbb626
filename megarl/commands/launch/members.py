"""Node rank 0's watch of a run's member nodes: the run goes on without a node that leaves, or ends with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from megarl.commands.launch.rendezvous import RendezvousServer
from megarl.errors import InputError

_ASK_SECONDS = 1.0  # between requests to the run
LEAST_PATIENCE = 30.0  # time for the run to answer, even if `train.grace_seconds` is shorter: it may be at its end


class NoAnswer(Exception):
    """The run has not answered. It may be busy, or at its end."""


@dataclass(frozen=True)
class NodeRelease:
    """Lets the engines of a node leave, so that the run goes on without it.

    directory: of the run; None: the command is not a training run. seconds: time until the node ends (`train.grace_seconds`).
    """

    directory: Path | None
    seconds: float

    def engines_left(self, rank: int, since: float) -> list[str] | str:
        """Ask the run to let the engines of a node leave, which received its signal at `since` (time.monotonic()).

        Returns the engines that the node still has, or why the run cannot go on without the node. Raises NoAnswer.
        """
        if self.directory is None:
            return "the command is not a training run"
        from megarl.commands.engines.command import ask

        seconds = max(0.0, self.seconds - (time.monotonic() - since))
        try:
            answer = ask(self.directory, ["leave", str(rank), f"{seconds:.0f}"])
        except (InputError, RuntimeError) as error:
            raise NoAnswer(str(error)) from error
        if "refused" in answer:
            return str(answer["refused"])
        names: list[str] = answer["engines"]
        return names


class Members:
    """Watches the member nodes, and prints each departure once."""

    def __init__(
        self,
        server: RendezvousServer,
        release: NodeRelease,
        say: Callable[[str], None],
        end: Callable[[], None],
        missing: Collection[int] = (),
    ) -> None:
        """say: prints a line. end: ends the run, by an exception. missing: ranks that have not joined, and so cannot leave."""
        self._server, self._release, self._say, self._end = server, release, say, end
        self._reported: set[int] = set(missing)
        self._leaving: set[int] = set()  # their departure has been printed
        self._since: dict[int, float] = {}  # by rank that received a signal: time of the first request
        self._ask_after = 0.0

    def watch(self) -> None:
        """Release members that received a signal when their engines have left, or end the run in order on all nodes if it refuses
        to go on without one of them, or does not answer in the time that the member has."""
        if time.monotonic() >= self._ask_after:
            ending = self._server.ending()
            self._leaving &= set(ending)  # the others have left, and another machine may take a rank
            self._since = {rank: self._since.get(rank, time.monotonic()) for rank in ending}
            for rank in ending:
                self._let_leave(rank)
            self._ask_after = time.monotonic() + _ASK_SECONDS
        for rank in set(self._server.absent()) - self._reported:
            self._reported.add(rank)
            cause = self._server.failed().get(rank)
            self._say(f"node rank {rank} has left" + (f": {cause}" if cause else ""))
        self._reported &= set(self._server.absent())  # another machine may have taken a rank

    def _let_leave(self, rank: int) -> None:
        since = self._since[rank]
        try:
            left = self._release.engines_left(rank, since)
        except NoAnswer as error:
            if time.monotonic() - since < max(self._release.seconds, LEAST_PATIENCE):
                return  # `watch` asks again; if the run has finished, its command ends meanwhile
            left = f"the run has not answered since. {error}"
        if isinstance(left, str):
            self._say(f"node rank {rank} received a signal to end, which ends the run: {left}")
            self._end()
        elif left and rank not in self._leaving:
            self._leaving.add(rank)
            self._say(f"node rank {rank} received a signal to end: the run goes on, and {', '.join(left)} leave")
        elif not left:
            self._leaving.discard(rank)
            self._server.release(rank)
