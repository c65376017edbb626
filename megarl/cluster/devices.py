"""Which devices of this machine a child process sees."""

from __future__ import annotations

import os
from collections.abc import Sequence


class LocalDevices:
    """Hands out this machine's devices in order, by their visible-devices variable.

    variable: the platform's ``visible_devices_env``; "" where devices cannot be told apart (CPU).
    numbers: of the devices to hand out, one after the other.
    """

    def __init__(self, variable: str, numbers: Sequence[int]) -> None:
        self._variable, self._left = variable, list(numbers)

    def claim(self, count: int) -> dict[str, str]:
        """Environment under which a process sees the next `count` devices, as its numbers 0 .. count - 1."""
        if not self._variable:
            return {}
        assert count <= len(self._left), f"{count} devices; {len(self._left)} are left of what was connected for"
        numbers, self._left = self._left[:count], self._left[count:]
        visible = os.environ.get(self._variable)
        if visible is None:
            return {self._variable: ",".join(map(str, numbers))}
        ids = visible.split(",")
        needed = max(numbers) + 1
        if needed > len(ids):
            raise ValueError(
                f"{needed} devices are needed on this machine, and {self._variable}={visible} names {len(ids)}: "
                "make more devices visible, or ask for fewer engines (engines and tensor_parallel of "
                "rollout, teacher and judge)."
            )
        return {self._variable: ",".join(ids[number] for number in numbers)}
