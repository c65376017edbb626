"""Compare a sharded weight sync with a full export, on the same trainers and the same engine.

    python -m benchmarks.weight_sync [--layout TP2xPP2|EP4] [--engine TP2|EP2] [--transport auto|collective] [--parameters 224]
    python -m benchmarks.weight_sync --parameters 1000 --dtype bfloat16  # 14 GB of memory
    python -m benchmarks.weight_sync --fingerprints 60 ...  # cost of fingerprints: 60 updates with and 60 without them

The full route (`weight_sync.route: full`) is mbridge's export on all ranks, rank 0's shared memory, and vLLM's
`load_weights`. The clock runs from the moment all processes are ready until the engine has loaded. The routes alternate,
after one warm-up update each. Compare ratios: seconds depend on the number of cores.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from megarl.weight_sync.session import compare_reports, merge_reports
from tests.support.engine_process import EngineProcess, spec
from tests.support.live_trainers import Trainers

PATIENCE = 900  # seconds
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2xPP2": {"tensor_parallel": 2, "pipeline_parallel": 2},
    "EP4": {"expert_parallel": 4},
}
ENGINES: dict[str, dict[str, Any]] = {
    "TP2": {"tensor_parallel": 2},
    "EP2": {"tensor_parallel": 2, "expert_parallel": True},
}


def write_model(directory: Path, millions: int, dtype: str) -> tuple[str, int]:
    """Write a Qwen3-MoE of about `millions` parameters, mostly in experts. Returns its path and number of parameters."""
    import torch
    import transformers

    width = 64 * max(round(512 * (millions / 224) ** 0.5) // 64, 1)
    config = transformers.Qwen3MoeConfig(
        vocab_size=32000,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=16,
        moe_intermediate_size=width * 15 // 8 // 32 * 32,  # of which vLLM pads none on a CPU
        num_experts_per_tok=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(directory)
    return str(directory), sum(parameter.numel() for parameter in model.parameters())


def connect(process: EngineProcess, session: Any) -> None:
    process.begin("connect_weight_sync", session).result(PATIENCE)


def sharded(process: EngineProcess, trainers: Trainers, version: int) -> tuple[float, Any, Any]:
    start = time.perf_counter()
    sending = trainers.begin("send_planned", version)
    received = process.begin("update_weights", version).result(PATIENCE)
    sent = merge_reports(sending.result(PATIENCE))
    seconds = time.perf_counter() - start
    compare_reports(sent, received)
    return seconds, sent, received


def exported(process: EngineProcess, trainers: Trainers, version: int) -> tuple[float, Any]:
    start = time.perf_counter()
    sending = trainers.begin("send_export", version)
    received = process.begin("update_weights", version).result(PATIENCE)
    sent = sending.result(PATIENCE)[0]
    seconds = time.perf_counter() - start
    compare_reports(sent, received)
    return seconds, sent


def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    path, count = write_model(directory / "model", arguments.parameters, arguments.dtype)
    process = EngineProcess()
    trainers = Trainers(directory, path, LAYOUTS[arguments.layout], 4, arguments.dtype, weights_only=True)
    try:
        process.replace("megarl.engines.vllm.engine", "build_engine_args", "with_digests")  # and `set_fingerprints`
        started = process.begin(
            "start", spec(path, dtype=arguments.dtype, load_weights=False, **ENGINES[arguments.engine])
        )
        receivers = started.result(PATIENCE)["receivers"]
        names = ("layout", "engine", "transport", "dtype")
        figures = {"parameters": count, **{name: getattr(arguments, name) for name in names}}
        if arguments.fingerprints:
            return figures | fingerprints(process, trainers, receivers, arguments)
        return figures | both_routes(process, trainers, receivers, arguments)
    finally:
        trainers.close()
        process.process.kill()


def open_planned(process: EngineProcess, trainers: Trainers, receivers: Any, arguments: argparse.Namespace) -> None:
    options = {"bucket_mb": arguments.bucket_mb, "timeout": 600.0, "transport": arguments.transport}
    connect(process, trainers.call("open_planned", receivers, options)[0])


def both_routes(
    process: EngineProcess, trainers: Trainers, receivers: Any, arguments: argparse.Namespace
) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {"sharded": [], "full": []}
    for turn in range(arguments.rounds):
        open_planned(process, trainers, receivers, arguments)
        sharded(process, trainers, 10 * turn)  # warm-up: connects, and is verified against an export
        for number in range(1, 4):
            took, sent, received = sharded(process, trainers, 10 * turn + number)
            seconds["sharded"].append(took)
        connect(process, trainers.call("open_export", receivers, arguments.bucket_mb << 20)[0])
        updates = [exported(process, trainers, 10 * turn + number) for number in (7, 8)]
        seconds["full"].append(updates[1][0])
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ranks = ENGINES[arguments.engine]["tensor_parallel"]
    return {
        "times_faster": round(medians["full"] / medians["sharded"], 1),
        "bytes_to_an_engine_rank_over_export": round(received.bytes / ranks / updates[-1][1].bytes, 3),
        "sent_once": sent.bytes == received.bytes or round(received.bytes / sent.bytes, 2),
        "phases": {
            side: {phase: round(value / medians["sharded"], 2) for phase, value in report.seconds.items()}
            for side, report in (("trainers", sent), ("engine", received))
        },
        "seconds": {name: [round(value, 2) for value in values] for name, values in seconds.items()},
    }


def fingerprints(
    process: EngineProcess, trainers: Trainers, receivers: Any, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Return the share of fingerprints in an update's wall time, and in the CPU time of all processes.

    Other work on the machine disturbs CPU time less. Updates come in groups of four (with, without, without, with
    fingerprints), which cancels a linear drift of the machine's speed.
    """
    spent: dict[str, dict[bool, list[float]]] = {"seconds": {True: [], False: []}, "cpu_seconds": {True: [], False: []}}
    open_planned(process, trainers, receivers, arguments)
    sharded(process, trainers, 0)  # warm-up: connects, and is verified against an export
    for number in range(2 * arguments.fingerprints + 4):
        on = number % 4 in (0, 3)
        trainers.call("set_fingerprints", on)
        process.begin("rpc", "set_fingerprints", on).result(PATIENCE)
        before = cpu_seconds()
        took, _, _ = sharded(process, trainers, 1 + number)
        if number >= 4:  # the first four warm up
            spent["seconds"][on].append(took)
            spent["cpu_seconds"][on].append(cpu_seconds() - before)
    return {"updates_of_each": arguments.fingerprints} | {kind: _share(values) for kind, values in spent.items()}


def cpu_seconds() -> float:
    """Return the CPU seconds of all descendants of this process."""
    descendants = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return sum(times.user + times.system for times in descendants)


def _share(values: dict[bool, list[float]]) -> dict[str, float]:
    """Return medians, the share of fingerprints in the median, and its standard error by bootstrap."""
    source = random.Random(0)

    def share(sample: Callable[[list[float]], list[float]]) -> float:
        return 1 - statistics.median(sample(values[False])) / statistics.median(sample(values[True]))

    resampled = [share(lambda updates: source.choices(updates, k=len(updates))) for _ in range(1000)]
    return {
        "with": round(statistics.median(values[True]), 3),
        "without": round(statistics.median(values[False]), 3),
        "share": round(share(list), 3),
        "standard_error": round(statistics.stdev(resampled), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=LAYOUTS, default="TP2xPP2")
    parser.add_argument("--engine", choices=ENGINES, default="EP2")
    parser.add_argument("--transport", choices=["auto", "collective", "device"], default="auto")
    parser.add_argument("--parameters", type=int, default=224, help="in millions")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of trainers and engine")
    parser.add_argument("--bucket-mb", type=int, default=64, help="of both routes")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--fingerprints", type=int, default=0, metavar="UPDATES")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(measure(arguments, Path(directory)), indent=1))


if __name__ == "__main__":
    main()
