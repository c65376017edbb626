"""Owner of each group that has not arrived: the engine's process that samples it. A pure state machine; each group arrives once.

A group has one owner, or is lost: its engine has died or left, or has handed it over, and another engine samples or continues it.
Results and errors from another process than the owner do not count. While an engine hands groups over, errors of its
groups are kept until its reply says which of them it has handed over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from megarl.rollout.fleet.states import Member

MOST_DEATHS = 3  # of engines that sample the same group


class GroupOwners:
    """State machine of the module's docstring. Not thread-safe: the caller needs a lock."""

    def __init__(self) -> None:
        self._owner: dict[int, Member] = {}  # by group
        self._lost: list[int] = []
        self._deaths: Counter[int] = Counter()  # by group that has not arrived
        self._moving: dict[int, dict[int, BaseException]] = {}  # engines that hand groups over -> errors of groups

    @property
    def lost(self) -> bool:
        """True if groups wait for another engine."""
        return bool(self._lost)

    @property
    def moving(self) -> bool:
        """True while an engine hands groups over."""
        return bool(self._moving)

    def give(self, groups: Iterable[int], owner: Member) -> None:
        """Record that a process samples `groups`."""
        self._owner |= dict.fromkeys(groups, owner)

    def owns(self, group: int, member: Member) -> bool:
        """Return whether a process samples a group, so that its result or error counts."""
        return self._owner.get(group) == member

    def of(self, engine: int) -> list[int]:
        """Return the groups that an engine samples."""
        return sorted(group for group, (owner, _) in self._owner.items() if owner == engine)

    def counts(self) -> Counter[int]:
        """Return the number of groups of each engine."""
        return Counter(engine for engine, _ in self._owner.values())

    def arrive(self, group: int) -> None:
        """Record the result of a group's owner."""
        del self._owner[group]
        del self._deaths[group]

    def lose(self, group: int) -> None:
        """Record that a group needs another engine."""
        self._owner.pop(group, None)
        self._lost.append(group)

    def count_death(self, group: int, engine: str) -> None:
        """Record that an engine died while it sampled a group. Raises RuntimeError after `MOST_DEATHS` of them."""
        self._deaths[group] += 1
        if self._deaths[group] >= MOST_DEATHS:
            raise RuntimeError(
                f"{MOST_DEATHS} engines have died while they sampled group {group}, {engine} last: does its prompt end them? See "
                "their logs in the run's logs/"
            )

    def take_lost(self) -> list[int]:
        """Return the lost groups, which another engine samples now."""
        groups, self._lost = self._lost, []
        return groups

    def begin_move(self, engine: int) -> list[int]:
        """Return the groups of an engine that hands them over now."""
        self._moving[engine] = {}
        return self.of(engine)

    def hold(self, engine: int, group: int, error: BaseException) -> bool:
        """Keep the error of a group until `end_move`; return False if its engine hands no groups over now."""
        if engine not in self._moving:
            return False
        self._moving[engine][group] = error
        return True

    def end_move(self, engine: int) -> dict[int, BaseException]:
        """Return the errors since `begin_move`, by group."""
        return self._moving.pop(engine)
