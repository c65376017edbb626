"""Which devices of this machine a child process sees."""

from __future__ import annotations

import os


class LocalDevices:
    """Hands out this machine's devices in order, by their visible-devices variable.

    variable: the platform's ``visible_devices_env``; "" where devices cannot be told apart (CPU).
    first: number of the first device to hand out: 0 where trainers and engines take turns on the
    same devices, the number of trainers where engines have their own.
    """

    def __init__(self, variable: str, first: int) -> None:
        self._variable, self._next = variable, first

    def claim(self, count: int) -> dict[str, str]:
        """Environment under which a process sees the next `count` devices, as its numbers 0 .. count - 1."""
        if not self._variable:
            return {}
        numbers = range(self._next, self._next + count)
        self._next += count
        visible = os.environ.get(self._variable)
        if visible is None:
            return {self._variable: ",".join(map(str, numbers))}
        ids = visible.split(",")
        if numbers.stop > len(ids):
            raise ValueError(
                f"{numbers.stop} devices are needed on this machine, and {self._variable}={visible} names {len(ids)}: "
                "make more devices visible, or ask for fewer engines (rollout.engines, rollout.tensor_parallel)."
            )
        return {self._variable: ",".join(ids[number] for number in numbers)}
