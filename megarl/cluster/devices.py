"""Visible-devices variables of child processes on this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence


class LocalDevices:
    """Assigns this machine's devices to processes in order, through the visible-devices variable.

    variable: ``DeviceKind.visible``; "" if it has none (CPU).
    numbers: device numbers to assign, in this order.
    """

    def __init__(self, variable: str, numbers: Sequence[int]) -> None:
        self._variable, self._left = variable, list(numbers)

    def claim(self, count: int) -> dict[str, str]:
        """Return the environment in which a process sees the next `count` devices, numbered 0 .. count - 1."""
        if not self._variable:
            return {}
        assert count <= len(self._left), f"{count} devices, but {len(self._left)} of the reserved ones are left"
        numbers, self._left = self._left[:count], self._left[count:]
        visible = os.environ.get(self._variable)
        if visible is None:
            return {self._variable: ",".join(map(str, numbers))}
        ids = visible.split(",")
        needed = max(numbers) + 1
        if needed > len(ids):
            raise ValueError(
                f"the run needs {needed} devices on this machine, but {self._variable}={visible} lists {len(ids)}: "
                "make more devices visible, or use fewer or smaller engines (engines and tensor_parallel of "
                "rollout, teacher and judge)."
            )
        return {self._variable: ",".join(ids[number] for number in numbers)}
