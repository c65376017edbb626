"""Memory of the ranks of layout tests: trainer processes record it, and the test compares it with the planner's."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megarl.commands.plan.count.rank_client import RankRequest
from megarl.recipe.schema import Recipe
from tests.support.count_ranks import count_ranks


def record(trainer: Any, held_by_kind: dict[str, int], case: dict[str, Any], output: Path) -> None:
    """Write the counts of `held` for `trainer`, in a trainer process. `held_by_kind`: the test's count."""
    import torch.distributed as dist

    from megarl.commands.plan.count.parameters import held

    memory = asdict(held(trainer))
    for kind in ("weights", "gradients", "moments"):
        assert memory[kind] == held_by_kind[kind], (kind, memory, held_by_kind)
    assert memory["masters"] in (0, held_by_kind["masters"]), (memory, held_by_kind)
    assert (memory["masters"] > 0) == (case.get("dtype") == "bfloat16"), "float32 weights are their own masters"
    if trainer.reference is not None:
        assert memory["reference"] == sum(tensor.nbytes for tensor in trainer.reference.tensors().values())
    memory["processes"] = dist.get_world_size()
    (output / f"{case['name']}.held.{dist.get_rank()}.json").write_text(json.dumps(memory))


def check_saved(trainer: Any, part: Any) -> None:
    """Compare a rank's part of a checkpoint with `held`, in a trainer process, except tensors that other ranks write.
    Buffers, which have no moments, are counted in addition."""
    from megarl.commands.plan.count.parameters import held

    memory, megatron = held(trainer), trainer.recipe.megatron
    assert part.bytes <= memory.saved + memory.buffers, (part.bytes, memory)
    if megatron.distributed_optimizer and megatron.tensor_parallel == megatron.context_parallel == 1:
        assert part.bytes >= memory.saved, (part.bytes, memory)


def check(results: Path, cases: list[dict[str, Any]]) -> None:
    """Compare the planner's counts with the record of every rank of `cases`, to the byte, and its choice of the largest
    rank of each stage."""
    questions, recorded, names, by_stage = [], [], [], {}
    for case in cases:
        files = sorted(results.glob(f"{case['name']}.held.*.json"))
        real = [json.loads(file.read_text()) for file in files]
        assert real and {entry.pop("processes") for entry in real} == {len(real)}, (
            f"{case['name']}: a rank recorded nothing"
        )
        recipe = recipe_of(case, results, len(real))
        critic = case.get("kind") == "critic"
        if critic:
            recipe.critic.trainers, recipe.critic.megatron = len(real), recipe.megatron
        for rank, memory in enumerate(real):
            questions.append(RankRequest(recipe, rank, critic))
            recorded.append(memory)
            names.append(f"{case['name']}, rank {rank}")
            each = len(real) // recipe.megatron.pipeline_parallel
            first = rank // each * each
            by_stage[names[-1]] = dict(enumerate(real[first : first + each], first))
    for name, memory, answer in zip(names, recorded, count_ranks(questions), strict=True):
        assert answer.get("held") == memory, f"{name}: {answer} planned, {memory} real"
        stage, largest = by_stage[name], answer["largest"]
        assert _states(stage[largest]) == max(map(_states, stage.values())), f"{name}: not rank {largest} of {stage}"


def recipe_of(case: dict[str, Any], results: Path, processes: int) -> Recipe:
    recipe = Recipe()
    recipe.model.path, recipe.model.dtype = str(results / "models" / case["model"]), case.get("dtype", "float32")
    recipe.cluster.trainers = processes
    for section, settings in ((recipe.megatron, case.get("megatron", {})), (recipe.lora, case.get("lora", {}))):
        for name, value in settings.items():
            setattr(section, name, value)
    return recipe


def _states(memory: dict[str, int]) -> int:
    return memory["masters"] + memory["moments"]
