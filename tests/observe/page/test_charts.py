"""Curves of a chart: their order, their largest number, and the note about those left out."""

from __future__ import annotations

from megarl.observe.page.charts import present

MACHINES = ("gpu1", "gpu10", "gpu2", "gpu3", "gpu4", "gpu5", "gpu6", "max", "mean")


def test_a_chart_of_many_machines_has_the_maximum_and_the_mean() -> None:
    names = [f"host/{load}/{m}" for load in ("received_per_second", "sent_per_second") for m in MACHINES]
    received, sent = present(names)
    assert [received["title"], sent["title"]] == ["Network: received", "Network: sent"]
    labels = ["max", "mean", "gpu1", "gpu2", "gpu3", "gpu4", "gpu5", "gpu6"]
    assert received["series"] == [(f"host/received_per_second/{label}", label) for label in labels]
    assert received["note"] == "Bytes per second. 8 of 9 curves; All metrics has the others."
    assert present(names[:8])[0]["note"] == "Bytes per second."


def test_curves_are_in_the_order_of_their_numbers() -> None:
    (chart,) = present([f"rollout/logprob_gap_by_lag/{lag}" for lag in range(12)])
    assert [label for _, label in chart["series"]] == [f"lag {lag}" for lag in range(8)]  # type: ignore[attr-defined]
