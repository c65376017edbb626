"""A rank loses its network in mid-update and no connection closes: all other ranks name it within seconds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from megarl.weight_sync.process_group import BroadcastGroup
from tests.support.sharded_ranks import SHAPES
from tests.weight_sync.test_deaths import LARGE, TIMEOUT, split

SECONDS = 12.0  # eight missing heartbeats, and a second or two to count them and to report


class Cable:
    """A link between this process's network and a new namespace. `inside`: the prefix that runs a command there."""

    def __init__(self) -> None:
        name = f"mgl{os.getpid() % 1000000}"
        self.namespace, self.here, self.there = name, f"{name}a", f"{name}b"
        self.inside = ["ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={self.there}"]
        net = f"10.213.{os.getpid() % 250}"
        self.address, self._other = f"{net}.1", f"{net}.2"

    def lay(self) -> None:
        name = self.namespace
        self._ip("netns", "add", name)
        self._ip("link", "add", self.here, "type", "veth", "peer", "name", self.there, "netns", name)
        self._ip("addr", "add", f"{self.address}/30", "dev", self.here)
        self._ip("link", "set", self.here, "up")
        self._ip("-n", name, "addr", "add", f"{self._other}/30", "dev", self.there)
        for interface in ("lo", self.there):
            self._ip("-n", name, "link", "set", interface, "up")

    def cut(self) -> None:
        self._ip("-n", self.namespace, "link", "set", self.there, "down")

    def remove(self) -> None:
        subprocess.run(
            ["ip", "link", "del", self.here], check=False, capture_output=True
        )  # may be missing after a failed `lay`
        subprocess.run(["ip", "netns", "del", self.namespace], check=False, capture_output=True)

    def _ip(self, *arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def cable(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cable]:
    if shutil.which("ip") is None:
        pytest.skip("the command ip (iproute2) is missing: cannot create a network namespace")
    link = Cable()
    try:
        try:
            link.lay()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {' '.join(error.cmd)}: {error.stderr.strip()}")
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", link.here)
        yield link
    finally:
        link.remove()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [([3], []), ([], [3])])
def test_a_lost_network_is_detected_on_both_sides(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, cable: Cable, ranks: tuple[list[int], list[int]]
) -> None:
    """Each side of a cut network reports the other as silent. The cut comes just before the first transfer begins."""
    monkeypatch.setitem(SHAPES, "odd", LARGE["odd"])
    begin, cut = BroadcastGroup.start, []

    def cutting(self: BroadcastGroup, memory: Any) -> Any:
        if not cut:
            cut.append(time.monotonic())
            cable.cut()
        return begin(self, memory)

    with split(tmp_path, ["b", "b", "c", "d"], *ranks, shapes=LARGE, host=cable.address, inside=cable.inside) as run:
        monkeypatch.setattr(BroadcastGroup, "start", cutting)
        in_flight = run.start(2)
        errors = [str(rank.exception(TIMEOUT / 2)) for rank in in_flight]
        run.here.close()
        local_seconds = time.monotonic() - cut[0]
        alone = run.process.communicate(timeout=TIMEOUT / 2)[1]
        remote_seconds = time.monotonic() - cut[0]
    peer = "trainer 3" if ranks[0] else "engine rank e1/1"
    pattern = rf"aborted: {peer} \(process \d+ on .*\) sent no heartbeat for 8 s in the update to version 2: it is"
    failed = [error for error in errors if error != "None"]
    assert failed and all(re.search(pattern, error) for error in failed), errors
    assert "trainer 0 sent no heartbeat for 8 s" in alone, alone
    assert max(local_seconds, remote_seconds) < SECONDS, (local_seconds, remote_seconds)
