"""Fill, balance and planning time of micro batches, compared with methods in common use.

    python -m benchmarks.packing [--samples 100000] [--ranks 64]
    python -m benchmarks.packing --mini-batches [--ranks 64]

Figures are ratios, except the seconds of the whole plan; see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from megarl.batching.flops import ModelFlops, model_flops
from megarl.batching.mini_batches import as_sampled, balanced
from megarl.batching.packing import Bins, imbalance, plan_micro_batches, share

QWEN3_30B_A3B = model_flops(
    {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
    }
)


def draw(name: str, count: int, cap: int, seed: int) -> np.ndarray:
    """Draw `count` lengths of at most `cap` tokens: like GSM8K, log-normal, Pareto (1.2) or uniform."""
    rng = np.random.default_rng(seed)
    if name == "gsm8k":
        lengths = rng.normal(110, 30, count).clip(40) + rng.lognormal(np.log(200), 0.45, count)
    elif name == "lognormal":
        lengths = rng.lognormal(np.log(cap / 16), 1.0, count)
    elif name == "pareto":
        lengths = cap / 40 * (1 + rng.pareto(1.2, count))
    else:
        lengths = rng.uniform(20, cap, count)
    return np.clip(lengths, 1, cap).astype(np.int64)


CASES = [  # (lengths, longest, limit of a micro batch)
    ("gsm8k", 2048, 16384),
    ("gsm8k", 2048, 4096),
    ("lognormal", 8192, 32768),
    ("lognormal", 16384, 32768),
    ("lognormal", 16384, 16384),
    ("pareto", 8192, 32768),
    ("pareto", 16384, 32768),
    ("uniform", 8192, 32768),
]


def first_fit_decreasing(lengths: np.ndarray, limit: int) -> Bins:
    """Put each sample, longest first, into the first bin with room; a tree over the bins' room finds that bin."""
    size = 1 << (len(lengths) - 1).bit_length()
    tree = [limit] * (2 * size)
    bins: Bins = [[] for _ in lengths]
    for sample in np.argsort(-lengths, kind="stable").tolist():
        node, length = 1, int(lengths[sample])
        while node < size:
            node = 2 * node if tree[2 * node] >= length else 2 * node + 1
        bins[node - size].append(sample)
        tree[node] -= length
        while node > 1:
            node //= 2
            tree[node] = max(tree[2 * node], tree[2 * node + 1])
    return [members for members in bins if members]


def largest_differencing(costs: np.ndarray, parts: int) -> Bins:
    """Karmarkar-Karp: merge the two partial divisions with the largest spread, large parts with small parts."""
    number = itertools.count()
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for sample, cost in enumerate(costs.tolist()):
        division: list[tuple[float, list[int]]] = [(0.0, [])] * (parts - 1) + [(cost, [sample])]
        heapq.heappush(heap, (-cost, next(number), division))
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = sorted(
            ((a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)), key=lambda part: part[0]
        )
        heapq.heappush(heap, (merged[0][0] - merged[-1][0], next(number), merged))
    return [members for _, members in heap[0][2]]


def figures(bins: Bins, lengths: np.ndarray, costs: np.ndarray, limit: int) -> tuple[float, float, float]:
    """Return share, imbalance, and tokens of the fullest bin divided by the limit."""
    tokens = np.array([lengths[members].sum() for members in bins])
    loads = np.array([costs[members].sum() for members in bins])
    return tokens.sum() / (len(bins) * limit), loads.max() / loads.mean(), tokens.max() / limit


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of `work` and its CPU seconds, which other load disturbs less than wall time."""
    began = time.process_time()
    return work(), time.process_time() - began


def at_scale(samples: int, ranks: int, flops: ModelFlops) -> None:
    print(f"{samples} samples over {ranks} ranks, planned by megarl\n")
    print(
        "| lengths | longest | limit | samples per micro batch | costliest / mean | share | imbalance | s | x sorting |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, cap, limit in CASES:
        lengths = draw(name, samples, cap, seed=0)
        costs = flops.of(lengths)
        plan, seconds = timed(partial(plan_micro_batches, lengths, ranks, limit, 1, costs))
        values = lengths.tolist()
        _, sorting = timed(partial(sorted, range(len(values)), key=values.__getitem__))
        bins = sum(map(len, plan))
        print(
            f"| {name} | {cap} | {limit} | {samples / bins:.1f} | {costs.max() * bins / costs.sum():.2f} "
            f"| {share(plan, lengths, limit):.3f} | {imbalance(plan, costs):.3f} | {seconds:.2f} | {seconds / sorting:.0f} |"
        )


def compare_methods(flops: ModelFlops, samples: int = 2048, ranks: int = 8) -> None:
    print(f"\n{samples} samples over {ranks} ranks: share / imbalance / fullest over the limit\n")
    print("| lengths | longest | limit | megarl | first fit decreasing | differencing, same number of parts |")
    print("|---|---|---|---|---|---|")
    for name, cap, limit in CASES:
        lengths = draw(name, samples, cap, seed=0)
        costs = flops.of(lengths)
        plan = plan_micro_batches(lengths, ranks, limit, 1, costs)
        ours = [[slot.sample for slot in batch if not slot.filler] for rank in plan for batch in rank]
        columns = [ours, first_fit_decreasing(lengths, limit), largest_differencing(costs, len(ours))]
        cells = (" / ".join(f"{value:.3f}" for value in figures(bins, lengths, costs, limit)) for bins in columns)
        print(f"| {name} | {cap} | {limit} | {' | '.join(cells)} |")


def siblings(groups: int, samples: int, seed: int) -> np.ndarray:
    """Draw log-normal lengths with mean 2,000, at most 20,000 tokens: int64 [groups, samples]. Half of the variance of the
    logarithm (1) is between groups."""
    rng, half = np.random.default_rng(seed), np.sqrt(0.5)
    logarithms = half * (rng.standard_normal((groups, 1)) + rng.standard_normal((groups, samples)))
    lengths = np.exp(logarithms)
    for _ in range(20):  # until the mean after the cut is 2,000
        lengths *= 2000 / np.minimum(lengths, 20_000).mean()
    return np.clip(lengths, 1, 20_000).astype(np.int64)


def over_ideal(
    parts: list[np.ndarray], lengths: np.ndarray, flops: ModelFlops, ranks: int, limit: int
) -> tuple[float, float, float]:
    """Return figures of an update, each over the ideal of even ranks: FLOPs of the rank that a mini batch waits for; the same if
    ranks wait for each other after each micro batch; the lower bound that the costliest sample of each mini batch sets."""
    waits = rounds = bound = ideal = 0.0
    for part in parts:
        tokens = lengths[part].ravel()
        costs = flops.of(tokens)
        plan = plan_micro_batches(tokens, ranks, limit, 1, costs)
        loads = np.array([[sum(costs[slot.sample] for slot in batch) for batch in rank] for rank in plan])
        waits, rounds = waits + loads.sum(1).max(), rounds + loads.max(0).sum()
        bound += max(costs.max(), costs.sum() / ranks)
        ideal += costs.sum() / ranks
    return waits / ideal, rounds / ideal, bound / ideal


def token_weights(parts: list[np.ndarray], lengths: np.ndarray) -> tuple[float, float]:
    """Return the smallest and largest weight of a token in the step with `token_mean`, over the mean weight of a token."""
    weights = np.array([1.0 / lengths[part].sum() for part in parts]) * lengths.sum() / len(parts)
    return float(weights.min()), float(weights.max())


def mini_batch_orders(ranks: int, flops: ModelFlops, groups: int = 512, samples: int = 16, limit: int = 32_768) -> None:
    print(f"{groups} groups of {samples} over {ranks} ranks, medians of three seeds, load {os.getloadavg()[0]:.1f}\n")
    print(
        "| update / ideal | mini batches | order | waits after each micro batch | bound of the longest sample | weight of a token |"
    )
    print("|---|---|---|---|---|---|")
    for count in (1, 4, 16):
        for order in ("as_sampled", "balanced"):
            figures = []
            for seed in range(3):
                lengths = siblings(groups, samples, seed)
                costs, sizes = flops.of(lengths.ravel()), [samples] * groups
                parts = as_sampled(groups, count) if order == "as_sampled" else balanced(costs, sizes, count, seed)
                figures.append((*over_ideal(parts, lengths, flops, ranks, limit), *token_weights(parts, lengths)))
            waits, rounds, bound, least, most = (statistics.median(column) for column in zip(*figures, strict=True))
            print(
                f"| {waits:.3f} | {count} | {order} | {rounds:.3f} | {bound:.3f} | {least:.2f} to {most:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mini-batches", action="store_true", help="compare orders of mini batches instead")
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=64)
    arguments = parser.parse_args()
    if arguments.mini_batches:
        mini_batch_orders(arguments.ranks, QWEN3_30B_A3B)
    else:
        at_scale(arguments.samples, arguments.ranks, QWEN3_30B_A3B)
        compare_methods(QWEN3_30B_A3B)
