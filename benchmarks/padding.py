"""Compare packed with padded micro batches: tokens per second of an update at GSM8K's lengths.

    python -m benchmarks.padding [--samples 48] [--rounds 3]

Each of four cases computes the same samples with the same token limit per micro batch, in a whole `PolicyTrainer.train_step`:

- packed;
- padded to the longest sample of the micro batch, sorted by length (`megatron.packing: false`);
- padded to the longest sample of the micro batch, in the original order;
- padded to the longest sample that the recipe allows, as in trainers with batches of a fixed shape.

Seconds are CPU time on a CPU, wall time elsewhere. The result is the ratio of tokens per second, without padding tokens.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.models import VOCABULARY, write_dense
from benchmarks.packing import draw
from benchmarks.update_step import platform, seconds
from megarl.batching.packing import plan_micro_batches
from megarl.batching.padding import plan_padded_micro_batches

LIMIT = 4096
LONGEST = 2048  # the recipe's limit for prompt plus response


def as_they_come(lengths: np.ndarray) -> list[list[int]]:
    """Fill micro batches in the original order, counting each sample with the length of the longest."""
    batches: list[list[int]] = [[]]
    for sample in range(len(lengths)):
        longest = max(lengths[[*batches[-1], sample]])
        if batches[-1] and longest * (len(batches[-1]) + 1) > LIMIT:
            batches.append([])
        batches[-1].append(sample)
    return batches


def micro_batches(
    plan: Iterable[Iterable[int]], lengths: np.ndarray, tokens: list[Any], padded_to: int | None = None
) -> list[Any]:
    """Return the micro batches of `plan`. `padded_to`: pad every sample to this length, with tokens outside the loss."""
    import torch
    from torch.nn.functional import pad

    from megarl.megatron.batch import MicroBatch

    batches = []
    for members in plan:
        members = list(members)
        sizes = [padded_to or int(lengths[sample]) for sample in members]
        filled = [pad(tokens[i], (0, size - len(tokens[i]))) for i, size in zip(members, sizes, strict=True)]
        masks = [pad(torch.ones_like(tokens[i]), (0, n - len(tokens[i]))) for i, n in zip(members, sizes, strict=True)]
        ids, mask = torch.cat(filled), torch.cat(masks).float()
        share = mask / int(lengths.sum())
        vectors = {"loss_mask": mask, "loss_weights": share, "token_share": share, "advantages": mask}
        batches.append(MicroBatch(ids, sizes, vectors))
    return batches


def measure(samples: int, rounds: int) -> dict[str, float]:
    """Return the median seconds of a step for each case."""
    import torch

    from megarl.megatron.trainer import PolicyTrainer
    from megarl.recipe.schema import Recipe

    with tempfile.TemporaryDirectory() as folder:
        recipe = Recipe()
        recipe.model.path = str(write_dense(Path(folder)))
        recipe.model.dtype = "float32" if platform.name == "cpu" else "bfloat16"
        trainer = PolicyTrainer(recipe, platform, total_optimizer_steps=100)
    lengths = draw("gsm8k", samples, LONGEST, seed=0)
    tokens = [torch.randint(0, VOCABULARY, (length,), device=platform.device()) for length in lengths]
    packed, padded = plan_micro_batches(lengths, 1, LIMIT)[0], plan_padded_micro_batches(lengths, 1, LIMIT)[0]
    plans = {
        "packed": (True, [[slot.sample for slot in slots] for slots in packed], None),
        "padded, sorted by length": (False, [[slot.sample for slot in slots] for slots in padded], None),
        "padded, original order": (False, as_they_come(lengths), None),
        f"padded, all to {LONGEST}": (False, as_they_come(np.full(samples, LONGEST)), LONGEST),
    }
    times: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(rounds + 1):
        for name, (packing, plan, padded_to) in plans.items():
            recipe.megatron.packing = packing
            batches = micro_batches(plan, lengths, tokens, padded_to)
            loss: Callable[[Any], Any] = lambda x: (-(x.log_probs * x.loss_weights).sum(), {})  # noqa: E731
            update = functools.partial(trainer.train_step, batches, loss, temperature=1.0, with_entropy=False)
            times[name].append(seconds(update))
    print(f"{int(lengths.sum())} tokens, at most {LIMIT} per micro batch\n")
    return {name: statistics.median(values[1:]) for name, values in times.items()}  # the first round warms up


def main() -> None:
    import torch
    import torch.distributed as dist

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29551"}.items():
        os.environ.setdefault(name, value)
    platform.set_device(0)
    dist.init_process_group(platform.process_group_backend)
    medians = measure(options.samples, options.rounds)
    print("| micro batches | s per step | packed is faster by |\n|---|---|---|")
    for name, median in medians.items():
        print(f"| {name} | {median:.2f} | {median / medians['packed']:.2f} x |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
