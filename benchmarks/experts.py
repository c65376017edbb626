"""Compare one grouped product for all experts with one product per expert, forward and backward.

    python -m benchmarks.experts [--experts 16] [--tokens 2048] [--rounds 15]

Rounds of both alternate, so that other work on the machine affects both. The result is the ratio of the medians. Seconds are
CPU time on a CPU, wall time elsewhere.
"""

from __future__ import annotations

import argparse
import statistics

import torch

from benchmarks.update_step import platform, seconds

SIZES = {"Qwen3-30B-A3B / 8": (256, 96), "tiny": (64, 48)}  # hidden and intermediate size, shrunk


def measure(experts: int, tokens: int, hidden: int, width: int, rounds: int) -> dict[str, float]:
    """Return median seconds for each implementation. Experts receive unequal numbers of tokens."""
    from megarl.megatron.native_layers import experts as native_experts
    from megarl.megatron.native_layers.fused_kernels import Kernel, grouped_gemm

    torch.manual_seed(0)
    device, dtype = platform.device(), torch.float32 if platform.name == "cpu" else torch.bfloat16
    counts = torch.bincount(torch.multinomial(torch.rand(experts), tokens, True), minlength=experts).tolist()
    block = torch.randn(experts, 2 * width, hidden, device=device, dtype=dtype)
    weights = [torch.nn.Parameter(weight) for weight in block]
    x = torch.randn(tokens, hidden, device=device, dtype=dtype, requires_grad=True)
    grouped = grouped_gemm(device, dtype)
    if grouped.function is None:
        raise SystemExit(f"no kernel for grouped products: {grouped.reason}")
    ways = {"grouped": grouped, "one by one": Kernel(None, "", "benchmark")}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 2):
        for way, kernel in ways.items():
            native_experts.grouped_gemm = lambda *_, kernel=kernel: kernel  # type: ignore[assignment]
            elapsed = seconds(lambda: native_experts.expert_linears(x, counts, weights).sum().backward())
            if number >= 2:
                times[way].append(elapsed)
    return {way: statistics.median(values) for way, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    print(f"{arguments.experts} experts, {arguments.tokens} tokens, {platform.device_name()}\n")
    print("| size | grouped, ms | one by one, ms | one by one / grouped |\n|---|---|---|---|")
    for name, (hidden, width) in SIZES.items():
        medians = measure(arguments.experts, arguments.tokens, hidden, width, arguments.rounds)
        ratio = medians["one by one"] / medians["grouped"]
        print(f"| {name} | {1e3 * medians['grouped']:.2f} | {1e3 * medians['one by one']:.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
