"""What advantages and losses cost, in times of a copy of their inputs.

    python -m benchmarks.algorithms [--samples 8192] [--length 20000] [--micro-batch 5]

Vectors of all samples lie in memory; each function walks over them micro batch by micro batch, as a step does, on one core.
The copy is that of the vectors it reads, from memory to memory. Peaks are what the process holds beyond its inputs.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from megarl.algorithms.catalogue import ADVANTAGES, LOSSES
from megarl.algorithms.inputs import LossInputs, Outcomes
from megarl.algorithms.objective import objective
from megarl.algorithms.returns import gae
from megarl.algorithms.token_advantages import TokenOutcomes
from megarl.config.algorithm import AlgorithmConfig

READS = ("log_probs", "old_log_probs", "advantages", "loss_mask", "loss_weights", "token_share")


class Batch:
    """`samples` responses of `length` tokens, cut into micro batches of `per_micro` samples."""

    def __init__(self, samples: int, length: int, per_micro: int):
        self.samples, self.length, self.per_micro = samples, length, per_micro
        random = torch.Generator().manual_seed(0)
        tokens = samples * length

        def vector() -> torch.Tensor:
            return torch.empty(tokens).uniform_(-1.0, 0.0, generator=random)

        self.vectors = {"log_probs": vector(), "old_log_probs": vector(), "advantages": vector()}
        self.vectors["loss_mask"] = torch.ones(tokens)
        self.vectors["loss_weights"] = torch.full((tokens,), 1.0 / tokens)
        self.vectors["token_share"] = torch.full((tokens,), 1.0 / tokens)

    def micro_batches(self) -> Iterator[LossInputs]:
        for first in range(0, self.samples, self.per_micro):
            count = min(self.per_micro, self.samples - first)
            part = slice(first * self.length, (first + count) * self.length)
            sequences = torch.arange(count).repeat_interleave(self.length)
            own = {name: vector[part] for name, vector in self.vectors.items()}
            yield LossInputs(**own, sequences=sequences, sequence_count=count, selected=torch.zeros(len(sequences)) > 0)

    def arrays(self) -> Iterator[tuple[np.ndarray, np.ndarray, list[int]]]:
        for inputs in self.micro_batches():
            yield inputs.log_probs.numpy(), inputs.loss_mask.numpy() > 0, [self.length] * inputs.sequence_count


def seconds(function: Callable[[], Any]) -> float:
    """CPU seconds, the better of two runs."""
    times = []
    for _ in range(2):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


def copy_of(batch: Batch, names: tuple[str, ...]) -> float:
    targets = {name: torch.empty_like(batch.vectors[name]) for name in names}

    def copy() -> None:
        for name in names:
            targets[name].copy_(batch.vectors[name])

    copy()  # the first touch maps the pages
    return seconds(copy)


def run_losses(batch: Batch) -> list[str]:
    rows, baseline = [], copy_of(batch, READS)
    for name in LOSSES.names():
        if LOSSES[name].source != "rollout":
            continue
        settings = AlgorithmConfig(loss=name)

        def forward(settings: AlgorithmConfig = settings) -> None:
            with torch.no_grad():
                for inputs in batch.micro_batches():
                    objective(inputs, settings)

        def both(settings: AlgorithmConfig = settings) -> None:
            for inputs in batch.micro_batches():
                inputs.log_probs = inputs.log_probs.detach().requires_grad_()
                objective(inputs, settings)[0].backward()

        before, held = _peak(), seconds(forward)
        extra = _peak() - before
        rows.append(
            f"| {name} | {held / baseline:.2f} | {seconds(both) / baseline:.2f} | {extra / _bytes(batch):.3f} |"
        )
    return rows


def run_advantages(batch: Batch) -> list[str]:
    outcomes = Outcomes(
        np.random.default_rng(0).normal(size=batch.samples), np.arange(batch.samples) // 16, np.full(batch.samples, 20)
    )
    rows = []
    for name in ADVANTAGES.names():
        function = ADVANTAGES[name].function
        if function is not None and not ADVANTAGES[name].needs_greedy:
            took = seconds(lambda function=function, name=name: function(outcomes, AlgorithmConfig(advantage=name)))
            rows.append(f"| {name} | of samples | {1e3 * took:.1f} ms for all of them |")
    baseline = copy_of(batch, ("log_probs", "loss_mask"))

    def of_tokens() -> None:
        for values, mask, lengths in batch.arrays():
            outcome = TokenOutcomes(np.zeros(len(lengths)), values, mask, lengths)
            ADVANTAGES["reinforce_plus_plus"].of_tokens(outcome, AlgorithmConfig(gamma=0.999))

    def of_critic() -> None:
        for values, mask, lengths in batch.arrays():
            gae(np.zeros(len(lengths)), values, mask, lengths, gamma=1.0, lam=0.95)

    for name, run in (("reinforce_plus_plus", of_tokens), ("gae", of_critic)):
        rows.append(f"| {name} | of tokens | {seconds(run) / baseline:.2f} copies |")
    return rows


def _bytes(batch: Batch) -> int:
    return sum(vector.numel() * vector.element_size() for vector in batch.vectors.values())


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--length", type=int, default=20000)
    parser.add_argument("--micro-batch", type=int, default=5, help="samples in a micro batch")
    given = parser.parse_args()
    torch.set_num_threads(1)
    assert {field.name for field in fields(LossInputs)} >= set(READS)
    batch = Batch(given.samples, given.length, given.micro_batch)
    print("| loss | forward, copies | forward and backward, copies | held besides, inputs |\n|---|---|---|---|")
    print("\n".join(run_losses(batch)))
    print("\n| advantage | | takes |\n|---|---|---|")
    print("\n".join(run_advantages(batch)))


if __name__ == "__main__":
    main()
