"""Cost of advantages and losses, in units of one copy of their inputs.

    python -m benchmarks.algorithms [--samples 8192] [--length 20000] [--micro-batch 5] [--rounds 3]

The vectors of all samples are in memory. Each function processes them by micro batch, as a step does, on one core. The unit
is a memory-to-memory copy of the same vectors into pages that are already mapped. Copy and function alternate, and the
figures are medians of the ratios of their CPU times, because other work on the machine slows down both.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.algorithms.catalogue import ADVANTAGES, LOSSES
from megarl.algorithms.inputs import LossInputs, Outcomes, TokenOutcomes
from megarl.algorithms.objective import objective
from megarl.algorithms.returns import gae
from megarl.algorithms.values import ValueInputs, value_objective
from megarl.recipe.algorithm import AlgorithmConfig

READS = ("log_probs", "old_log_probs", "advantages", "loss_mask", "loss_weights", "token_share")
WHOLE = 64  # samples of the micro batch for the peak memory
_LIBC = ctypes.CDLL("libc.so.6")


class Batch:
    """`samples` responses of `length` tokens in micro batches of `per_micro` samples.

    The numbers of each token are random and independent, so that branches are hard to predict.
    """

    def __init__(self, samples: int, length: int, per_micro: int):
        self.samples, self.length, self.per_micro = samples, length, per_micro
        random = torch.Generator().manual_seed(0)
        tokens = samples * length

        def vector() -> torch.Tensor:
            return torch.empty(tokens).uniform_(-1.0, 0.0, generator=random)

        self.vectors = {"log_probs": vector(), "old_log_probs": vector(), "advantages": vector().add_(0.5)}
        self.vectors["loss_mask"] = torch.ones(tokens)
        self.vectors["loss_weights"] = torch.full((tokens,), 1.0 / tokens)
        self.vectors["token_share"] = torch.full((tokens,), 1.0 / tokens)

    def slices(self, per_micro: int | None = None) -> Iterator[tuple[int, slice]]:
        """Yield the number of samples of each micro batch and the slice of its tokens."""
        size = per_micro or self.per_micro
        for first in range(0, self.samples, size):
            count = min(size, self.samples - first)
            yield count, slice(first * self.length, (first + count) * self.length)

    def micro_batches(self, per_micro: int | None = None) -> Iterator[LossInputs]:
        selected = torch.zeros((per_micro or self.per_micro) * self.length, dtype=torch.bool)
        for count, part in self.slices(per_micro):
            tokens = count * self.length
            inputs = {name: vector[part] for name, vector in self.vectors.items()}
            inputs["log_probs"] = inputs["log_probs"].detach().requires_grad_()
            yield LossInputs(**inputs, lengths=[self.length] * count, selected=selected[:tokens])


def _loss(settings: AlgorithmConfig, inputs: LossInputs) -> torch.Tensor:
    return objective(inputs, settings)[0]


def seconds(function: Callable[[], Any]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def in_copies(copy: Callable[[], Any], functions: list[Callable[[], Any]], rounds: int) -> list[float]:
    """Return each function's time divided by the time of the next copy: medians over `rounds`, after a warm-up round."""
    ratios: list[list[float]] = [[] for _ in functions]
    for number in range(rounds + 1):
        for function, measured in zip(functions, ratios, strict=True):
            ratio = seconds(function) / seconds(copy)
            if number:
                measured.append(ratio)
    return [statistics.median(measured) for measured in ratios]


def copying(arrays: list[np.ndarray]) -> Callable[[], None]:
    targets = {array.dtype: np.zeros_like(array) for array in arrays}

    def copy() -> None:
        for array in arrays:
            np.copyto(targets[array.dtype], array)

    copy()  # maps the pages
    return copy


def run_losses(batch: Batch, rounds: int) -> list[str]:
    copy = copying([batch.vectors[name].numpy() for name in READS])
    rows = []

    def row(name: str, forward: Callable[[LossInputs], torch.Tensor]) -> None:
        def alone() -> None:
            with torch.no_grad():
                for inputs in batch.micro_batches():
                    forward(inputs)

        def both() -> None:
            for inputs in batch.micro_batches():
                forward(inputs).backward()

        ratios = in_copies(copy, [alone, both], rounds)
        whole = next(batch.micro_batches(min(WHOLE, batch.samples)))
        size = sum(getattr(whole, field).nbytes for field in READS)
        peak = peak_of(lambda: forward(whole).backward()) / size
        rows.append(f"| {name} | {ratios[0]:.1f} | {ratios[1]:.1f} | {peak:.1f} |")

    for name in LOSSES.names():
        if LOSSES[name].source == "rollout" and not LOSSES[name].needs_reference:
            settings = AlgorithmConfig(loss=name)
            row(name, functools.partial(_loss, settings))
    row("value loss", lambda inputs: value_objective(_value_inputs(inputs), 0.2)[0])
    row("(exp of one vector)", lambda inputs: inputs.log_probs.exp().sum())
    return rows


def _value_inputs(inputs: LossInputs) -> ValueInputs:
    assert inputs.old_log_probs is not None and inputs.advantages is not None
    return ValueInputs(
        values=inputs.log_probs,
        old_values=inputs.old_log_probs,
        returns=inputs.advantages,
        loss_mask=inputs.loss_mask,
        loss_weights=inputs.loss_weights,
        token_share=inputs.token_share,
    )


def run_outcomes(batch: Batch) -> list[str]:
    outcomes = Outcomes(
        np.random.default_rng(0).normal(size=batch.samples), np.arange(batch.samples) // 16, np.full(batch.samples, 20)
    )
    rows = []
    for name in ADVANTAGES.names():
        function = ADVANTAGES[name].function
        if function is not None and not ADVANTAGES[name].needs_greedy:
            took = seconds(functools.partial(function, outcomes, AlgorithmConfig(advantage=name)))
            rows.append(f"| {name} | {1e3 * took:.1f} |")
    return rows


def run_tokens(batch: Batch, rounds: int) -> list[str]:
    """Measure advantages of tokens. The copies are of values (float32), mask (bool) and token rewards (float64)."""
    values = batch.vectors["log_probs"].numpy()
    mask = batch.vectors["loss_mask"].numpy() > 0
    earned = np.zeros(len(values))
    copy_both = copying([mask, earned])
    copy_all = copying([values, mask, earned])
    advantages_of_tokens = ADVANTAGES["reinforce_plus_plus"].of_tokens
    assert advantages_of_tokens is not None

    def of_tokens(per_micro: int | None = None, most: int | None = None) -> None:
        for count, part in list(batch.slices(per_micro))[:most]:
            outcome = TokenOutcomes(np.zeros(count), mask[part], [batch.length] * count, penalties=earned[part])
            advantages_of_tokens(outcome, AlgorithmConfig(gamma=0.999))

    def of_critic(per_micro: int | None = None, most: int | None = None) -> None:
        for count, part in list(batch.slices(per_micro))[:most]:
            lengths, rewards = [batch.length] * count, np.zeros(count)
            gae(rewards, values[part], mask[part], lengths, gamma=1.0, lam=0.95, token_rewards=earned[part])

    rows = []
    for name, run, copy, width in (("reinforce_plus_plus", of_tokens, copy_both, 9), ("gae", of_critic, copy_all, 13)):
        (ratio,) = in_copies(copy, [run], rounds)
        samples = min(WHOLE, batch.samples)
        peak = peak_of(functools.partial(run, samples, 1)) / (width * samples * batch.length)
        rows.append(f"| {name} | {ratio:.1f} | {peak:.1f} |")
    return rows


def keep_freed_memory() -> None:
    """Make malloc keep freed pages: mapping pages again costs more than the arithmetic, and varies."""
    m_trim_threshold, m_mmap_threshold = -1, -3
    _LIBC.mallopt(m_trim_threshold, 1 << 30)
    _LIBC.mallopt(m_mmap_threshold, 1 << 30)


def peak_of(function: Callable[[], Any]) -> int:
    """Return the growth of the process's resident memory during the call: peak minus the value before it, in bytes."""
    _LIBC.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current value
    before = _status("VmRSS")
    function()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) << 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--length", type=int, default=20000)
    parser.add_argument("--micro-batch", type=int, default=5, help="samples in a micro batch")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    batch = Batch(arguments.samples, arguments.length, arguments.micro_batch)
    print("| loss | forward, copies | forward and backward, copies | peak of a call, inputs |\n|---|---|---|---|")
    print("\n".join(run_losses(batch, arguments.rounds)), flush=True)
    for name in ("old_log_probs", "advantages", "loss_weights", "token_share"):
        del batch.vectors[name]
    print("\n| advantage of tokens | copies | peak of a call, inputs |\n|---|---|---|")
    print("\n".join(run_tokens(batch, arguments.rounds)), flush=True)
    print("\n| advantage of samples | ms for all samples |\n|---|---|")
    print("\n".join(run_outcomes(batch)))


if __name__ == "__main__":
    main()
