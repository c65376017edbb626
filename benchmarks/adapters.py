"""Compare LoRA adapters in the engine with merged weights: time and bytes of an update, and time of sampling.

    python -m benchmarks.adapters [--width 1024] [--layers 6] [--rank 16] [--rounds 6]

One trainer alternates between two vLLM engines of a Qwen3 with adapters on all linears. The first update of each engine is not
counted.
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
    """Return seconds of updates and of sampling, and bytes of an update, for adapters and for merged weights."""
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers, "head_dim": 64}
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": width // 128}
    model = str(make_tiny_model("qwen3", directory / "model", 1, **sizes, **heads))
    lora = {"rank": rank, "alpha": 2.0 * rank, "targets": list(TARGETS)}
    trainers = Trainers(directory, model, {}, 1, lora=lora)
    ways = {"adapters": AdapterSpec(rank, TARGETS), "merged": None}
    engines = {way: EngineProcess() for way in ways}
    requests = make_requests(count=8, n=4, max_tokens=32)
    measured: dict[str, dict[str, Any]] = {way: {"update": [], "sample": []} for way in ways}
    opening = {"adapters": "open_adapters", "merged": "open_export"}
    sending: dict[str, tuple[str, list[Any]]] = {
        "adapters": ("send_adapters", [None, False]),
        "merged": ("send_export", []),
    }
    try:
        for way, engine in engines.items():
            info = engine.begin("start", spec(model, load_weights=False, adapters=ways[way])).result(PATIENCE)
            engine.connect_weight_sync(trainers.call(opening[way], info["receivers"])[0])
        for version in range(1, rounds + 2):
            trainers.call("learn", version, 0.02)
            for way, engine in engines.items():
                start = time.perf_counter()
                method, arguments = sending[way]
                future = trainers.begin(method, version, *arguments)
                engine.begin("update_weights", version).result(PATIENCE)
                measured[way]["bytes"] = future.result(PATIENCE)[0].bytes
                measured[way]["update"].append(time.perf_counter() - start)
                start = time.perf_counter()
                engine.begin("generate", requests).result(PATIENCE)
                measured[way]["sample"].append(time.perf_counter() - start)
    finally:
        trainers.close()
        for engine in engines.values():
            engine.close()
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("width", 1024), ("layers", 6), ("rank", 16), ("rounds", 6)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        measured = measure(Path(directory), arguments.width, arguments.layers, arguments.rank, arguments.rounds)
    print("| weights in the engine | MB of an update | update, s | 32 samples of 32 tokens, s |")
    print("|---|---|---|---|")
    for way, figures in measured.items():
        update, sample = (
            f"{statistics.median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f})"
            for seconds in (figures["update"][1:], figures["sample"][1:])
        )
        print(f"| {way} | {figures['bytes'] / 1e6:.1f} | {update} | {sample} |")


if __name__ == "__main__":
    main()
