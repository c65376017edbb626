"""`without_times`: the metrics that a repeated run must repeat."""

from __future__ import annotations

from megarl.observe.metrics import without_times


def test_times_of_samples_are_left_out_for_all_samples_evaluations_and_sources() -> None:
    repeated = {"step": 1, "agent/calls/mean": 2.0, "agent/ended/tool_time": 0.5, "rollout/scoring_failed": 1.0}
    areas = ("", "eval/", "source/a/b/", "eval/a/b/", "rollout/")
    times = [
        *(f"{area}agent/tool_seconds/{kind}" for area in areas for kind in ("mean", "max")),
        *(f"{area}scoring_retries" for area in areas),
        "rollout/judge_seconds", "rollout/engines_idle", "rollout/wait_seconds/window", "timing_s/step", "perf/mfu/actor",
        "perf/tflops_per_device/actor", "perf/max_memory_allocated_gb", "weight_sync/seconds/load",
    ]  # fmt: skip
    assert without_times([repeated | dict.fromkeys(times, 1.0)]) == [repeated]
