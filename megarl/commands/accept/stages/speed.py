"""Stage 7, speed: rates of devices and links, training and decoding of a tiny model, a calibration for `megarl plan`."""

from __future__ import annotations

import datetime
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

from megarl.commands.accept.context import StageContext
from megarl.commands.accept.engine_probe import (
    START_SECONDS,
    requests,
    start_engine,
    start_trainers,
    timed,
    tiny_recipe,
)
from megarl.commands.accept.ranks import LocalRanks, local_ranks
from megarl.commands.accept.speed_rank import REPEATS
from megarl.commands.accept.tiny_families import LENGTHS, write_family
from megarl.commands.doctor.machine import Machine
from megarl.commands.doctor.versions import installed_versions
from megarl.commands.plan.time.calibration import Calibration, CalibrationEntry
from megarl.platform.device_table import Device, device_of, devices

RANK = "megarl.commands.accept.speed_rank:SpeedRank"
FILE = "calibration.yaml"
TRAIN_SIZE, TRAIN_REPEATS = 8, 10


def run(context: StageContext) -> None:
    """Report the rate of each operation and its share of the rate in the table of devices. Only a crash fails the stage."""
    rates: dict[str, CalibrationEntry] = {}
    context.doing("timing products, copies and the optimizer")
    # One rank on a CPU, since its processes have no links.
    with local_ranks(context, RANK, 1 if context.tiny else min(context.settings.devices, 8), name="rates") as ranks:
        name = ranks.call("describe")[0]["device"]
        device = devices()["CPU"] if context.tiny else device_of(name)
        _rates(context, ranks, rates, device)
    _training(context)
    _decoding(context)
    if device is None:
        context.not_run(
            "calibration.yaml", f"{name} is not in the table of devices: docs/planner.md says how to add it"
        )
        return
    source = f"acceptance on {platform.node()}, {datetime.date.today()}"
    path = context.folder / FILE
    Calibration(device.name, source, rates, {}, installed_versions(Machine())).write(path)
    context.figure("calibration", f"megarl plan RECIPE --device {device.name} --calibration {path}")


def _rates(context: StageContext, ranks: LocalRanks, rates: dict[str, CalibrationEntry], device: Device | None) -> None:
    """Measure rates. The result for several devices is the slowest one, since all wait for it."""
    tiny = context.tiny
    side, elements = (512, 1 << 20) if tiny else (8192, 1 << 28)
    expected: dict[str, float] = {}
    if device is not None:
        expected = {
            "matmul_flops": device.flops, "memory_bandwidth": device.bandwidth, "host_link": device.host_link,
            "link": device.link, "adam_bandwidth": device.bandwidth,
        }  # fmt: skip

    def measure(rate: str, work: float, method: str, *arguments: Any, how: str) -> None:
        context.doing(f"timing {rate}")
        answers = [seconds for seconds in ranks.call(method, *arguments) if seconds is not None]
        reached = [work / statistics.median(seconds) for seconds in answers]
        slowest = f"the slowest of {len(reached)} devices; the fastest: {max(reached):.4g}"
        rates[rate] = CalibrationEntry(min(reached), "measured", f"{how}, median of {REPEATS}, {slowest}")
        context.figure(f"{rate}: reached", min(reached) / 1e9, unit="G/s")
        if rate in expected:
            context.figure(f"{rate}: of the table's", min(reached) / expected[rate], unit="share")

    measure("matmul_flops", 2.0 * side**3, "matmul", side, how=f"bfloat16 product of {side} x {side} matrices")
    measure("memory_bandwidth", 8.0 * elements, "copy", elements, how=f"copy of {elements >> 18} MiB")
    measure("adam_bandwidth", 28.0 * elements, "adam", elements, how=f"Adam on {elements >> 20} Mi float32 weights")
    if not tiny:
        measure("host_link", 4.0 * elements, "to_device", elements, how="page-locked copy to all devices at once")
    if ranks.size >= 2 and device is not None and device.mesh:
        # Two devices of a full mesh share one link: `link` is of all links, which only a collective uses.
        used = device.link_rate(range(ranks.size)) / device.link
        how = f"all-gather of {ranks.size} devices"
        if ranks.size < device.mesh:
            how += f", x {1 / used:.3g} for all links of a full mesh of {device.mesh}"
        measure("link", 4.0 * elements * (ranks.size - 1) / ranks.size / used, "gather", elements, how=how)
    elif ranks.size >= 2:
        measure("link", 4.0 * elements, "send", elements, how="rank 0 to rank 1")


def _training(context: StageContext) -> None:
    """Measure the tokens per second of one trainer of the tiny dense model, calls included."""
    context.doing("timing a trainer")
    write_family("dense", context.shared)
    recipe = tiny_recipe(context, "dense", 1)
    with closing(start_trainers(context, recipe, 1, "trainer")) as trainers:
        samples = [[8 + (number % 400)] * 64 for number in range(TRAIN_SIZE)]
        trainers.call("probe", samples)
        began = time.monotonic()
        for _ in range(TRAIN_REPEATS):
            trainers.call("probe", samples)
        seconds = (time.monotonic() - began) / TRAIN_REPEATS
    context.figure("log-probs of a trainer", TRAIN_SIZE * 64 / seconds, unit="tokens/s")


def _decoding(context: StageContext) -> None:
    """Measure the tokens per second of an engine of the tiny dense model: decoding with several numbers of sequences, and
    prefill, cached prefixes included."""
    context.doing("timing an engine")
    recipe = tiny_recipe(context, "dense", 1)
    tokens, counts = (24, (1, 8)) if context.tiny else (128, (1, 32, 128))
    engine = start_engine(context, recipe, load_weights=True)
    try:
        timed(engine.call("start"), START_SECONDS)

        def rate(count: int, length: int, work: Callable[[], float]) -> float:
            timed(engine.call("generate", requests("dense", count, length)))
            _, seconds = timed(engine.call("generate", requests("dense", count, length)))
            return work() / seconds

        for count in counts:
            value = rate(count, tokens, lambda count=count: float(count * tokens))  # type: ignore[misc]
            context.figure(f"decode, {count} sequences", value, unit="tokens/s")
        prompts = counts[-1]
        work = float(sum(LENGTHS[number % len(LENGTHS)] for number in range(prompts)))
        value = rate(prompts, 1, lambda: work)
        context.figure(f"prefill, {prompts} prompts", value, unit="tokens/s")
    finally:
        engine.stop()
