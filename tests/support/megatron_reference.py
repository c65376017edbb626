"""Checkpoints with a refreshed reference policy, in trainer processes of tests/megatron/test_reference.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support import held_ranks
from tests.support import megatron_training as training
from tests.support.megatron_checkpoints import assembled, assert_same, save
from tests.support.megatron_models import LENGTHS

STEP = 7


def run_case(case: dict[str, Any], output: Path) -> None:
    """Refresh the reference policy, train on and save; a resumed trainer has the same reference policy and weights.

    A case with `from` loads the checkpoint of that case, of another layout, and saves it again: bit-identical.
    """
    directory = output / f"{case['name']}.checkpoint"
    if "from" in case:
        resumed = load(case, output / f"{case['from']}.checkpoint")
        save(resumed, directory)
        if dist.get_rank() == 0:
            assert_same(output / f"{case['from']}.checkpoint", directory, resumed.model.vocab_size)
        write(case, resumed, output)
        return
    trainer = build(case)
    batches, _ = training.micro_batches(trainer, 2)
    trainer.keep_reference()
    start = rows(trainer, batches, reference=True)
    training.train(trainer, batches, 1)
    save(trainer, directory.with_suffix(".before"))
    trainer.keep_reference(STEP)
    refreshed = rows(trainer, batches)
    training.train(trainer, batches, 1)
    current = rows(trainer, batches)
    assert same(rows(trainer, batches, reference=True), refreshed), "the reference is not the policy at the refresh"
    assert same(rows(trainer, batches), current), "the pass of the reference changed the policy"
    if start is not None:
        assert not same(start, refreshed) and not same(refreshed, current)
    staged = trainer.stage_save(directory, copy=True)
    held_ranks.check_saved(trainer, staged)
    trainer.keep_reference(STEP + 1)  # the checkpoint must not include it
    staged.start()
    staged.wait()
    dist.barrier()
    resumed = load(case, directory)
    assert same(rows(resumed, batches, reference=True), refreshed) and same(rows(resumed, batches), current)
    before = load(case, directory.with_suffix(".before"), step=0)
    assert same(rows(before, batches, reference=True), start), "a checkpoint before the first refresh has no reference"
    if dist.get_rank() == 0:
        names = {
            kind: {name.partition(".")[2] for name in tensors_of(directory, kind)} for kind in ("weight", "reference")
        }
        assert names["weight"] and names["weight"] == names["reference"], names
        assert not tensors_of(directory.with_suffix(".before"), "reference")
    write(case, resumed, output)


def build(case: dict[str, Any]) -> Any:
    case = {**case, "megatron": case.get("megatron", {})}
    trainer = training.build(case)
    trainer.recipe.algorithm.refresh_reference_every = 1  # the planner's count of a checkpoint reads it
    return trainer


def load(case: dict[str, Any], directory: Path, step: int = STEP) -> Any:
    trainer = build(case)
    trainer.keep_reference()
    trainer.load(directory)
    assert trainer.reference.step == step
    return trainer


def rows(trainer: Any, batches: list[Any], *, reference: bool = False) -> list[torch.Tensor] | None:
    results = trainer.log_probs(batches, temperature=1.0, reference=reference)
    return None if results is None else [log_probs for log_probs, _ in results]


def same(left: list[torch.Tensor] | None, right: list[torch.Tensor] | None) -> bool:
    """Compare bit for bit; True on stages without results."""
    if left is None or right is None:
        return left is right
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def tensors_of(directory: Path, kind: str) -> list[str]:
    return [name for name in assembled(directory) if name.startswith(f"{kind}.")]


def write(case: dict[str, Any], trainer: Any, output: Path) -> None:
    """Write the reference policy's log-probs of each sequence."""
    batches, numbers = training.micro_batches(trainer, 2)
    log_probs = rows(trainer, batches, reference=True)
    if not trainer.coordinates.reports:
        return
    by_sequence = {}
    for group, values in zip(numbers, log_probs or [], strict=True):
        by_sequence.update(zip(group, values.split([LENGTHS[i] for i in group]), strict=True))
    torch.save(
        {i: (row.clone(),) for i, row in by_sequence.items()},
        output / f"{case['name']}.log_probs.{trainer.coordinates.dp_rank}.pt",
    )
