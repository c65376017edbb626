"""Stage 7: the link between two of several ranks, with real processes on the CPU; the saved link of a full mesh."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.commands.accept.context import StageContext
from megarl.commands.accept.ranks import local_ranks
from megarl.commands.accept.settings import Settings
from megarl.commands.accept.stages import speed
from megarl.commands.plan.time.calibration import Calibration, CalibrationEntry
from megarl.commands.plan.time.cost import ring_seconds, send_seconds
from megarl.platform.device_table import devices


@pytest.mark.slow
@pytest.mark.stack
def test_the_link_is_measured_with_more_than_two_devices(tmp_path: Path) -> None:
    """Rank 0 sends to rank 1; the third rank takes no part, and does not wait for a message. All three gather."""
    context = StageContext(Settings("cpu", 3), tmp_path, tmp_path, 1e9)
    rates: dict[str, CalibrationEntry] = {}
    with local_ranks(context, speed.RANK, 3) as ranks:
        seconds = ranks.call("send", 1024)
        assert seconds[2] is None and all(len(each) == speed.REPEATS for each in seconds[:2])
        assert all(len(each) == speed.REPEATS for each in ranks.call("gather", 1024))

        class TinyProducts:
            """The same ranks; sizes of devices are replaced by one that a CPU computes."""

            size = 3
            call = staticmethod(lambda method, _: ranks.call(method, 1024 if method != "matmul" else 8))

        context.settings = replace(context.settings, device="cuda")
        speed._rates(context, TinyProducts(), rates, None)  # type: ignore[arg-type]
    assert rates["link"].value > 0 and "the slowest of 2 devices" in rates["link"].how


class StubRanks:
    """Ranks on a machine. Links reach `share` of their rates in the table of devices."""

    def __init__(self, size: int, name: str, share: float) -> None:
        self.size, self.device = size, replace(devices()[name], link_share=share)

    def call(self, method: str, size: int) -> list[Any]:
        if method == "send":
            return [[send_seconds(self.device, 4 * size, 1)]] * 2 + [None] * (self.size - 2)
        if method == "gather":
            return [[ring_seconds(self.device, 4 * size, self.size)]] * self.size
        return [[1.0]] * self.size


@pytest.mark.parametrize(
    ("name", "size", "how"),
    [
        ("910B", 8, "all-gather of 8 devices, median"),
        ("910B", 2, "all-gather of 2 devices, x 7 for all links of a full mesh of 8, median"),
        ("910B", 4, "all-gather of 4 devices, x 2.33 for all links of a full mesh of 8, median"),
        ("910C", 8, "rank 0 to rank 1, median"),
        ("H100", 2, "rank 0 to rank 1, median"),
    ],
)
def test_the_saved_link_reproduces_the_measurement(name: str, size: int, how: str, tmp_path: Path) -> None:
    context = StageContext(Settings("npu", size), tmp_path, tmp_path, 1e9)
    ranks, rates = StubRanks(size, name, 0.5), dict[str, CalibrationEntry]()
    speed._rates(context, ranks, rates, devices()[name])  # type: ignore[arg-type]
    link = rates["link"]
    assert link.value == pytest.approx(0.5 * devices()[name].link) and link.how.startswith(how)
    share = next(check for check in context.checks if check.name.startswith("link: of the table's"))
    assert share.value == pytest.approx(0.5)
    planned = Calibration(name, "a test", {"link": link}).apply(devices()[name])
    for members in (2, 4, 8):
        assert ring_seconds(planned, 1e9, members) == pytest.approx(ring_seconds(ranks.device, 1e9, members))
    assert send_seconds(planned, 1e9, 1) == pytest.approx(send_seconds(ranks.device, 1e9, 1))
