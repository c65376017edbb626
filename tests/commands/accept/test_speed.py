"""Stage 7: the link between two of several ranks, with real processes on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.commands.accept.context import StageContext
from megarl.commands.accept.ranks import local_ranks
from megarl.commands.accept.settings import Settings
from megarl.commands.accept.stages import speed
from megarl.commands.plan.time.calibration import CalibrationEntry


@pytest.mark.stack
def test_the_link_is_measured_with_more_than_two_devices(tmp_path: Path) -> None:
    """Rank 0 sends to rank 1; the third rank takes no part, and does not wait for a message."""
    context = StageContext(Settings("cpu", 3), tmp_path, tmp_path, 1e9)
    rates: dict[str, CalibrationEntry] = {}
    with local_ranks(context, speed.RANK, 3) as ranks:
        seconds = ranks.call("send", 1024)
        assert seconds[2] is None and all(len(each) == speed.REPEATS for each in seconds[:2])

        class TinyProducts:
            """The same ranks; sizes of devices are replaced by one that a CPU computes."""

            size = 3
            call = staticmethod(lambda method, _: ranks.call(method, 1024 if method != "matmul" else 8))

        context.settings = replace(context.settings, device="cuda")
        speed._rates(context, TinyProducts(), rates, None)  # type: ignore[arg-type]
    assert rates["link"].value > 0 and "the slowest of 2 devices" in rates["link"].how
