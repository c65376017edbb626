"""How often a start asks Ray for its machines, with an answer that the test decides."""

from __future__ import annotations

import pytest

from megarl.cluster.ray import env

env.prepare(private=True)

from megarl.cluster.ray import devices  # noqa: E402 -- after the variables that Ray reads at import


def test_ray_is_asked_once_a_second_and_again_before_a_machine_counts_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, living, now = [], ["a", "b"], [100.0]

    def nodes() -> list[dict[str, str]]:
        asked.append(now[0])
        return [{"NodeID": node} for node in living]

    monkeypatch.setattr(devices, "living_nodes", nodes)
    monkeypatch.setattr(devices.time, "monotonic", lambda: now[0])
    is_alive = devices.LivingNodes()
    assert all(is_alive(node) for node in ("a", "b") * 500) and asked == [100.0], "1,000 processes that start"
    living.remove("b")
    now[0] += 1.0
    assert is_alive("a") and not is_alive("b") and asked == [100.0, 101.0, 101.0]
    living.append("c")
    assert is_alive("c"), "a machine that has just joined is not lost"
