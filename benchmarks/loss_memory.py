"""Peak memory of each loss, forward and backward, divided by the bytes of the vectors that it reads.

    python -m benchmarks.loss_memory [--tokens 262144]

A dispatch mode of torch counts the bytes of all live tensors that the loss creates, its gradient included: no allocator and no other
process changes the figure. The loss is `megarl.algorithms.objective.objective`, as trainers call it.
"""

from __future__ import annotations

import argparse
import gc
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megarl.algorithms.catalogue import LOSSES
from megarl.algorithms.inputs import LossInputs
from megarl.algorithms.objective import objective
from megarl.algorithms.values import ValueInputs, value_objective
from megarl.recipe.algorithm import AlgorithmConfig

BOUND = 3.0  # copies of the inputs
TOP_K = 16  # of a teacher
SETTINGS: dict[str, AlgorithmConfig] = {
    "with entropy, KL and token weights": AlgorithmConfig(entropy_coef=0.01, kl_coef=0.01),
    "with rejected sequences": AlgorithmConfig(),
}
SETTINGS["with entropy, KL and token weights"].correction.weights = "token"
SETTINGS["with rejected sequences"].correction.reject = {"mean_k3": 0.01}


class LiveBytes(TorchDispatchMode):
    """Count the bytes of storages that operations create while the mode is on: `now` and `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in known:
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def peak_bytes(function: Callable[[], Any]) -> int:
    """Return the peak of the live bytes that `function` creates on top of its inputs."""
    gc.collect()
    with LiveBytes() as live:
        function()
    return live.peak


def inputs_of(name: str, tokens: int, settings: AlgorithmConfig) -> LossInputs:
    """Return random inputs with the vectors that the loss reads with `settings`: pairs of sequences of about 2,048 tokens."""
    loss, random = LOSSES[name], torch.Generator().manual_seed(0)

    def vector(*more: int) -> torch.Tensor:
        return torch.rand(tokens, *more, generator=random) - 1.0

    pairs = max(1, tokens // 4096)
    lengths = [tokens // (2 * pairs)] * (2 * pairs)
    lengths[-1] += tokens - sum(lengths)
    share = torch.full((tokens,), 1.0 / tokens)
    optional: dict[str, Any] = {}
    if loss.needs_advantages:
        optional["advantages"] = vector() + 0.5
    if loss.needs_old_log_probs:
        optional["old_log_probs"] = vector()
    if loss.needs_top:
        optional["reference_top_log_probs"] = vector(TOP_K).log_softmax(1)
        optional["top_log_probs"] = vector(TOP_K).log_softmax(1).requires_grad_()
    if settings.kl_coef or (loss.needs_reference and not loss.needs_top):
        optional["reference_log_probs"] = vector()
    if settings.entropy_coef:
        optional["entropy"] = vector().requires_grad_()
    if settings.correction.weights != "none" or settings.correction.reject:
        optional["rollout_log_probs"] = vector()
    if loss.selection is not None:
        optional["selected"] = torch.zeros(tokens, dtype=torch.bool)
    if loss.whole_groups:
        optional["groups"] = (
            torch.arange(len(lengths)).div(2, rounding_mode="floor").repeat_interleave(torch.tensor(lengths))
        )
    return LossInputs(
        log_probs=vector().requires_grad_(),
        loss_mask=torch.ones(tokens),
        loss_weights=share,
        token_share=share.clone(),
        lengths=lengths,
        **optional,
    )


def size_of(inputs: Any) -> int:
    """Return the bytes of all tensors in the fields of `inputs`."""
    values = [getattr(inputs, each.name) for each in fields(inputs)]
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def copies(name: str, tokens: int, settings: AlgorithmConfig | None = None) -> float:
    """Return the peak of the loss `name`, forward and backward, over the bytes of its inputs. `settings`: None: the loss alone."""
    chosen = AlgorithmConfig(loss=name)
    if settings is not None:
        chosen.entropy_coef, chosen.kl_coef, chosen.correction = (
            settings.entropy_coef,
            settings.kl_coef,
            settings.correction,
        )
    inputs = inputs_of(name, tokens, chosen)
    return peak_bytes(lambda: objective(inputs, chosen)[0].backward()) / size_of(inputs)


def value_copies(tokens: int) -> float:
    """Return the same figure for the critic's value loss, with clipping."""
    batch = inputs_of("ppo_clip", tokens, AlgorithmConfig())
    assert batch.old_log_probs is not None and batch.advantages is not None
    inputs = ValueInputs(
        batch.log_probs, batch.old_log_probs, batch.advantages, batch.loss_mask, batch.loss_weights, batch.token_share
    )
    return peak_bytes(lambda: value_objective(inputs, 0.2)[0].backward()) / size_of(inputs)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=262_144)
    tokens = parser.parse_args(arguments).tokens
    print(f"copies of the inputs at the peak, forward and backward; load {os.getloadavg()[0]:.1f}\n")
    print(f"| loss | alone | {' | '.join(SETTINGS)} |\n|---|---|{'---|' * len(SETTINGS)}")
    for name in LOSSES.names():
        rollout = LOSSES[name].source == "rollout" and LOSSES[name].needs_advantages
        more = [f"{copies(name, tokens, each):.2f}" if rollout else "" for each in SETTINGS.values()]
        print(f"| {name} | {copies(name, tokens):.2f} | {' | '.join(more)} |", flush=True)
    print(f"| value loss | {value_copies(tokens):.2f} |{' |' * len(SETTINGS)}")


if __name__ == "__main__":
    main()
