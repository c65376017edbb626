"""Experts' linears: one grouped product against one product an expert, forward and backward.

    python -m benchmarks.experts [--experts 16] [--tokens 2048] [--rounds 15]

Rounds of both alternate, so that other work on the machine meets both; the ratio of medians is the figure. Seconds are CPU
time on a CPU, wall time elsewhere.
"""

from __future__ import annotations

import argparse
import statistics

import torch

from benchmarks.update_step import platform, seconds

SIZES = {"Qwen3-30B-A3B / 8": (256, 96), "tiny": (64, 48)}  # hidden and intermediate size, shrunk


def measure(experts: int, tokens: int, hidden: int, width: int, rounds: int) -> dict[str, float]:
    """Median seconds by way. Tokens are spread over experts as a router of no balance would."""
    from megarl.megatron import native_experts
    from megarl.megatron.kernels import Kernel, grouped_gemm

    torch.manual_seed(0)
    device, dtype = platform.device(), torch.float32 if platform.name == "cpu" else torch.bfloat16
    counts = torch.bincount(torch.multinomial(torch.rand(experts), tokens, True), minlength=experts).tolist()
    block = torch.randn(experts, 2 * width, hidden, device=device, dtype=dtype)
    weights = [torch.nn.Parameter(weight) for weight in block]
    x = torch.randn(tokens, hidden, device=device, dtype=dtype, requires_grad=True)
    found = grouped_gemm(device, dtype)
    if found.function is None:
        raise SystemExit(f"no grouped product here: {found.reason}")
    ways = {"grouped": found, "one by one": Kernel(None, "", "benchmark")}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 2):
        for way, kernel in ways.items():
            native_experts.grouped_gemm = lambda *_, kernel=kernel: kernel  # type: ignore[assignment]
            taken = seconds(lambda: native_experts.expert_linears(x, counts, weights).sum().backward())
            if number >= 2:
                times[way].append(taken)
    return {way: statistics.median(values) for way, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    print(f"{given.experts} experts, {given.tokens} tokens, {platform.device_name()}\n")
    print("| size | grouped, ms | one by one, ms | one by one / grouped |\n|---|---|---|---|")
    for name, (hidden, width) in SIZES.items():
        found = measure(given.experts, given.tokens, hidden, width, given.rounds)
        ratio = found["one by one"] / found["grouped"]
        print(f"| {name} | {1e3 * found['grouped']:.2f} | {1e3 * found['one by one']:.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
