"""Adapters beside an engine's weights against merged weights, in one run: what an update takes, and what sampling takes.

    python -m benchmarks.adapters [--width 1024] [--layers 6] [--rank 16] [--rounds 6]

One trainer and two vLLM engines of a Qwen3, each with all linears adapted, in turns. The first update of each engine counts not.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from megarl.commands.data.tiny_model import make_tiny_model
from megarl.engines.base import AdapterSpec
from tests.support.engine_process import EngineProcess, make_requests, spec
from tests.support.live_trainers import Trainers

PATIENCE = 900  # seconds
TARGETS = ("all-linear",)


def measure(directory: Path, width: int, layers: int, rank: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds of updates and of sampling, and bytes of an update, by way."""
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers, "head_dim": 64}
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": width // 128}
    model = str(make_tiny_model("qwen3", directory / "model", 1, **sizes, **heads))
    lora = {"rank": rank, "alpha": 2.0 * rank, "targets": list(TARGETS)}
    trainers = Trainers(directory, model, {}, 1, lora=lora)
    ways = {"adapters": AdapterSpec(rank, TARGETS), "merged": None}
    engines = {way: EngineProcess() for way in ways}
    requests = make_requests(count=8, n=4, max_tokens=32)
    found: dict[str, dict[str, Any]] = {way: {"update": [], "sample": []} for way in ways}
    sending = {"adapters": ("open_adapters", "send_adapters", None, False), "merged": ("open_export", "send_export")}
    try:
        for way, engine in engines.items():
            info = engine.begin("start", spec(model, load_weights=False, adapters=ways[way])).result(PATIENCE)
            engine.connect_weight_sync(trainers.call(sending[way][0], info["receivers"])[0])
        for version in range(1, rounds + 2):
            trainers.call("learn", version, 0.02)
            for way, engine in engines.items():
                start = time.perf_counter()
                _, method, *arguments = sending[way]
                future = trainers.begin(method, version, *arguments)
                engine.begin("update_weights", version).result(PATIENCE)
                found[way]["bytes"] = future.result(PATIENCE)[0].bytes
                found[way]["update"].append(time.perf_counter() - start)
                start = time.perf_counter()
                engine.begin("generate", requests).result(PATIENCE)
                found[way]["sample"].append(time.perf_counter() - start)
    finally:
        trainers.close()
        for engine in engines.values():
            engine.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, usual in (("width", 1024), ("layers", 6), ("rank", 16), ("rounds", 6)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = measure(Path(directory), given.width, given.layers, given.rank, given.rounds)
    print("| engines have | MB of an update | update, s | 32 samples of 32 tokens, s |")
    print("|---|---|---|---|")
    for way, own in found.items():
        update, sample = (
            f"{statistics.median(own[name][1:]):.3f} ({min(own[name][1:]):.3f} to {max(own[name][1:]):.3f})"
            for name in ("update", "sample")
        )
        print(f"| {way} | {own['bytes'] / 1e6:.1f} | {update} | {sample} |")


if __name__ == "__main__":
    main()
