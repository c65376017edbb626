"""Time to plan a sharded weight sync of DeepSeek-V3, for several layouts and numbers of ranks.

    python benchmarks/weight_sync_plan.py

Needs no device and no weights: slice tables are built from the shapes of the tensors. Each rank of a run does the timed work.
"""

from __future__ import annotations

import argparse
import math
import resource
import time
from functools import cache

import numpy as np

from megarl.commands.plan.weight_flows import totals
from megarl.hf import published
from megarl.weight_sync.sharded.plan import Hosts, plan_transfers
from megarl.weight_sync.sharded.slices import SliceTable, SliceTableBuilder

BUCKET = 64 << 20
PER_NODE = 16
# Trainers: ranks, TP, PP, EP. Engines: ranks, TP, EP (0: TP cuts the experts).
CASES = [
    ((64, 1, 8, 8), (32, 4, 32)),
    ((256, 1, 8, 32), (256, 2, 256)),
    ((1024, 1, 16, 64), (256, 2, 256)),
    ((1024, 8, 16, 8), (256, 2, 256)),
    ((1024, 1, 16, 64), (256, 32, 256)),
    ((1024, 1, 16, 64), (256, 32, 0)),
]


@cache
def tensors() -> list[tuple[str, tuple[int, int], int | None, int | None, str]]:
    """Return (name, (rows, columns), layer, expert, dimension that tensor parallel cuts) of each tensor."""
    c = published.read("DeepSeek-V3")
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    attention = {
        "q_a_proj": ((c["q_lora_rank"], hidden), ""),
        "q_a_layernorm": ((1, c["q_lora_rank"]), ""),
        "q_b_proj": ((heads * (nope + rope), c["q_lora_rank"]), "rows"),
        "kv_a_proj_with_mqa": ((c["kv_lora_rank"] + rope, hidden), ""),
        "kv_a_layernorm": ((1, c["kv_lora_rank"]), ""),
        "kv_b_proj": ((heads * (nope + value), c["kv_lora_rank"]), "rows"),
        "o_proj": ((hidden, heads * value), "columns"),
    }
    last = c["num_hidden_layers"] - 1
    entries: list[tuple[str, tuple[int, int], int, int | None, str]] = [
        ("model.embed_tokens", (c["vocab_size"], hidden), 0, None, "rows")
    ]
    for layer in range(last + 1):
        at = f"model.layers.{layer}"
        entries += [(f"{at}.{norm}_layernorm", (1, hidden), layer, None, "") for norm in ("input", "post_attention")]
        entries += [(f"{at}.self_attn.{name}", shape, layer, None, cut) for name, (shape, cut) in attention.items()]
        dense = layer < c["first_k_dense_replace"]
        mlps: list[tuple[str, int, int | None]] = (
            [("mlp", c["intermediate_size"], None)]
            if dense
            else [("mlp.shared_experts", c["moe_intermediate_size"], None)]
        )
        if not dense:
            entries.append((f"{at}.mlp.gate", (c["n_routed_experts"], hidden), layer, None, ""))
            width = c["moe_intermediate_size"]
            mlps += [(f"mlp.experts.{number}", width, number) for number in range(c["n_routed_experts"])]
        for name, width, expert in mlps:
            entries += [(f"{at}.{name}.{part}_proj", (width, hidden), layer, expert, "rows") for part in ("gate", "up")]
            entries.append((f"{at}.{name}.down_proj", (hidden, width), layer, expert, "columns"))
    return [
        *entries,
        ("model.norm", (1, hidden), last, None, ""),
        ("lm_head", (c["vocab_size"], hidden), last, None, "rows"),
    ]


@cache
def description(tensor: int, tensor_size: int, expert: int, expert_size: int, stage: int, stages: int) -> SliceTable:
    """Return the slice table of the rank at these coordinates. `expert_size` 0: tensor parallel cuts the experts too."""
    describer = SliceTableBuilder()
    layers = tensors()[-1][2] + 1  # type: ignore[operator]
    for name, (rows, columns), layer, number, cut in tensors():
        if layer is not None and layer * stages // layers != stage:
            continue
        box = [0, 0, rows, columns]
        if number is not None and expert_size:
            if number * expert_size // 256 != expert:
                continue
        elif cut:
            side = int(cut == "columns")
            box[2 + side] //= tensor_size
            box[side] = tensor * box[2 + side]
        place = (box[0], box[1], box[2], box[3])
        describer.add(describer.tensor(name, (rows, columns)), place, describer.parameter(name, "bfloat16"), 0, box[3])
    return describer.build()


def ranks(count: int, tensor: int, stages: int, expert: int) -> list[SliceTable]:
    each = count // stages
    return [
        description(rank % tensor, tensor, rank % each % expert if expert else 0, expert, rank // each, stages)
        for rank in range(count)
    ]


def measure(trainers: tuple[int, int, int, int], engines: tuple[int, int, int]) -> str:
    held = ranks(*trainers)
    needed = ranks(engines[0], engines[1], 1, engines[2])
    for table in {*held, *needed}:
        _ = table.digest  # cached: in a run each rank has published its digest
    hosts = Hosts(
        [f"trainers {rank // PER_NODE}" for rank in range(len(held))],
        [f"engines {rank // PER_NODE}" for rank in range(len(needed))],
    )
    start = time.process_time()
    plan = plan_transfers(held, needed, hosts, BUCKET)
    planned = time.process_time()
    plan.streams_from(len(held) // 2)
    plan.streams_to(len(needed) // 2)
    streams_ready = time.process_time()
    flows = totals(plan)
    balance = flows.sent_by_rank / np.bincount(plan.sources, plan.stream_bytes, len(held)).mean()
    layout = (
        f"TP{trainers[1]} PP{trainers[2]} EP{trainers[3]}",
        f"TP{engines[1]}" + (f" EP{engines[2]}" if engines[2] else ""),
    )
    cells = [
        f"{trainers[0]}: {layout[0]}",
        f"{engines[0]}: {layout[1]}",
        f"{len(plan.pieces):,}",
        f"{planned - start:.2f}",
        f"{streams_ready - planned:.2f}",
        f"{flows.received_by_rank / 1e9:.1f}",
        f"{flows.received_by_rank / max(table.nbytes for table in needed):.3f}",
        f"{balance:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    size = sum(math.prod(shape) for _, shape, *_ in tensors()) * 2
    print(f"DeepSeek-V3, {len(tensors()):,} tensors, {size / 1e9:,.0f} GB in bfloat16, buckets of {BUCKET >> 20} MiB\n")
    print(
        "| trainer ranks | engine ranks | slices | plan, s | local part, s | GB to an engine rank | "
        "of its parameters | busiest sender / mean |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for trainers, engines in CASES:
        print(measure(trainers, engines), flush=True)
        description.cache_clear()
    print(
        f"\nCPU seconds of one rank; {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB of memory at most."
    )


if __name__ == "__main__":
    main()
