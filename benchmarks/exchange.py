"""A planned update against today's practice, on the same trainers and the same engine, in one run.

    python -m benchmarks.exchange [--layout TP2xPP2|EP4] [--engine TP2|EP2] [--transport auto|collective] [--parameters 224]

The other route is mbridge's export on all ranks, rank 0's shared memory, and vLLM's `load_weights` (`exchange.route:
export`). Both begin when all are ready and end when the engine has loaded; they take turns, after one update of each that
counts not. Ratios are the figure: seconds are those of a machine with as many cores as it has.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from megarl.exchange.session import compare_planned, compare_reports, together
from tests.engine_process import EngineProcess, spec
from tests.planned_live import Trainers

PATIENCE = 900  # seconds
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2xPP2": {"tensor_parallel": 2, "pipeline_parallel": 2},
    "EP4": {"expert_parallel": 4},
}
ENGINES: dict[str, dict[str, Any]] = {
    "TP2": {"tensor_parallel": 2},
    "EP2": {"tensor_parallel": 2, "expert_parallel": True},
}


def write_model(directory: Path, millions: int) -> tuple[str, int]:
    """A Qwen3-MoE of about so many parameters, nearly all of them experts'; its path, and how many there are."""
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
        moe_intermediate_size=width * 15 // 8 // 16 * 16,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config)
    model.save_pretrained(directory)
    return str(directory), sum(parameter.numel() for parameter in model.parameters())


def connect(process: EngineProcess, session: Any) -> None:
    process.begin("connect_exchange", session).result(PATIENCE)


def planned(process: EngineProcess, trainers: Trainers, version: int) -> tuple[float, Any, Any]:
    start = time.perf_counter()
    sending = trainers.begin("send_planned", version)
    received = process.begin("update_weights", version).result(PATIENCE)
    sent = together(sending.result(PATIENCE))
    seconds = time.perf_counter() - start
    compare_planned(sent, received)
    return seconds, sent, received


def exported(process: EngineProcess, trainers: Trainers, version: int) -> tuple[float, Any]:
    start = time.perf_counter()
    sending = trainers.begin("send_export", version)
    received = process.begin("update_weights", version).result(PATIENCE)
    sent = sending.result(PATIENCE)[0]
    seconds = time.perf_counter() - start
    compare_reports(sent, {"e0": received})
    return seconds, sent


def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    path, count = write_model(directory / "model", arguments.parameters)
    process, trainers = EngineProcess(), Trainers(directory, path, LAYOUTS[arguments.layout], 4)
    try:
        process.replace("megarl.engines.vllm", "build_engine_args", "with_digests")  # and `set_fingerprints`
        started = process.begin("start", spec(path, load_weights=False, **ENGINES[arguments.engine]))
        info = started.result(PATIENCE)
        options = {"bucket_mb": arguments.bucket_mb, "timeout": 600.0, "transport": arguments.transport}
        seconds: dict[str, list[float]] = {"planned": [], "without fingerprints": [], "export": []}
        for turn in range(arguments.rounds):
            connect(process, trainers.call("open_planned", info["receivers"], options)[0])
            planned(process, trainers, 10 * turn)  # checked, and connects
            for number in range(1, 7):  # in turns
                kind = ("planned", "without fingerprints")[number % 2]
                trainers.call("set_fingerprints", kind == "planned")
                process.begin("rpc", "set_fingerprints", kind == "planned").result(PATIENCE)
                took, sent, received = planned(process, trainers, 10 * turn + number)
                seconds[kind].append(took)
            connect(process, trainers.call("open_export", info["receivers"])[0])
            others = [exported(process, trainers, 10 * turn + number) for number in (7, 8)]
            seconds["export"].append(others[1][0])
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        ranks = ENGINES[arguments.engine]["tensor_parallel"]
        return {
            "parameters": count,
            "layout": arguments.layout,
            "engine": arguments.engine,
            "transport": arguments.transport,
            "times_faster": round(medians["export"] / medians["planned"], 1),
            "fingerprints": round(1 - medians["without fingerprints"] / medians["planned"], 3),
            "bytes_to_an_engine_rank_over_export": round(received.bytes / ranks / others[-1][1].bytes, 3),
            "sent_once": sent.bytes == received.bytes or round(received.bytes / sent.bytes, 2),
            "phases": {
                side: {phase: round(value / medians["planned"], 2) for phase, value in one.seconds.items()}
                for side, one in (("trainers", sent), ("engine", received))
            },
            "seconds": {name: [round(value, 2) for value in values] for name, values in seconds.items()},
        }
    finally:
        trainers.close()
        process.process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=LAYOUTS, default="TP2xPP2")
    parser.add_argument("--engine", choices=ENGINES, default="EP2")
    parser.add_argument("--transport", choices=["auto", "collective"], default="auto")
    parser.add_argument("--parameters", type=int, default=224, help="in millions")
    parser.add_argument("--bucket-mb", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(measure(arguments, Path(directory)), indent=1))


if __name__ == "__main__":
    main()
