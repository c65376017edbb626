"""The critic's cases of tests/megatron/test_layouts.py: the worker's part and the checks of its results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.megatron_models import LENGTHS, global_batch


def case(model: str, *words: str, per_micro: int = 3, resume: bool = False, **megatron: Any) -> dict[str, Any]:
    """Describe a case; `words` distinguish names of cases with equal settings."""
    name = "-".join(["critic", model, *words, *(f"{key}={value}" for key, value in megatron.items())])
    return {
        "name": name,
        "kind": "critic",
        "model": model,
        "per_micro": per_micro,
        "resume": resume,
        "megatron": megatron,
    }


ONE = [case("qwen3_moe", per_micro=2), case("qwen2_tied", per_micro=2)]
TWO = [
    case("qwen3_moe", "DP2"),
    case("qwen3_moe", expert_parallel=2),
    case("qwen3_moe", tensor_parallel=2, resume=True),
    case("qwen3_moe", per_micro=2, pipeline_parallel=2, virtual_pipeline=2),
    case("qwen3_moe", context_parallel=2),
    case("qwen2_tied", tensor_parallel=2, sequence_parallel=False),
    case("qwen2_tied", pipeline_parallel=2),
]


# --- in a worker ----------------------------------------------------------------------------------------------


def run_case(case: dict[str, Any], output: Path) -> None:
    """Compute values, metrics and weights of two steps; write the exported critic, and a checkpoint if the case sets it."""
    from tests.support import held_ranks
    from tests.support.megatron_offload import bytes_of
    from tests.support.megatron_training import weights_of

    trainer = build(case)
    held_ranks.record(trainer, bytes_of(trainer), case, output)
    batches, numbers = micro_batches(trainer, case["per_micro"])
    before = weights_of(trainer)
    rows = trainer.values(batches)
    for batch, values in zip(batches, rows or [], strict=rows is not None):
        batch.vectors["old_values"] = values
    metrics = train(trainer, batches, 2)
    after, learned = weights_of(trainer), trainer.values(batches)
    directory = output / f"{case['name']}.hf"
    trainer.save_hf(directory)
    equal, untrained = trainer.compare_with_hf(directory)
    where = trainer.coordinates
    assert (rows is None) == (metrics[0] is None) == (not where.is_last_stage)
    assert torch.distributed.get_rank() != 0 or (equal == len(after) and untrained == 0)
    if where.reports:
        by_sequence = {}
        for group, first, last in zip(numbers, rows, learned, strict=True):
            lengths = [LENGTHS[i] for i in group]
            for i, *of_sequence in zip(group, first.split(lengths), last.split(lengths), strict=True):
                by_sequence[i] = [values.clone() for values in of_sequence]
        torch.save(by_sequence, output / f"{case['name']}.values.{where.dp_rank}.pt")
        if where.dp_rank == 0:
            torch.save({"before": before, "after": after, "metrics": metrics}, output / f"{case['name']}.pt")
    if case["resume"]:
        check_resume(case, output, trainer, batches)


def check_resume(case: dict[str, Any], output: Path, trainer: Any, batches: list[Any]) -> None:
    """Training from a loaded checkpoint is bit-identical, including the head; an exported critic keeps its head."""
    from tests.support.megatron_checkpoints import save
    from tests.support.megatron_training import weights_of

    now = trainer.values(batches)
    save(trainer, output / f"{case['name']}.checkpoint")
    went_on, weights = train(trainer, batches, 2), weights_of(trainer)
    resumed = build(case)
    resumed.load(output / f"{case['name']}.checkpoint")
    assert train(resumed, batches, 2) == went_on
    for name, weight in resumed.export_weights():
        assert torch.equal(weights[name], weight), name
    again = build({**case, "model": str(output / f"{case['name']}.hf")}).values(batches)
    assert all(torch.equal(a, b) for a, b in zip(now or [], again or [], strict=True))


def build(case: dict[str, Any]) -> Any:
    from megatron.core import parallel_state

    from megarl.megatron.critic import CriticTrainer
    from tests.support.megatron_training import platform, recipe_of

    parallel_state.destroy_model_parallel()
    recipe = recipe_of(case)
    recipe.actor.optimizer.lr, recipe.actor.optimizer.clip_grad = 1e-3, 0.1
    return CriticTrainer(recipe, platform, total_optimizer_steps=10)


def train(trainer: Any, batches: list[Any], steps: int) -> list[dict[str, float] | None]:
    from megarl.algorithms.values import value_objective

    metrics = [trainer.train_step(batches, lambda inputs: value_objective(inputs, 0.01)) for _ in range(steps)]
    return [None if step is None else {k: v for k, v in step.items() if "memory" not in k} for step in metrics]


def micro_batches(trainer: Any, per_micro: int) -> tuple[list[Any], list[list[int]]]:
    """The global batch of the other cases, with returns instead of advantages."""
    from tests.support.megatron_training import micro_batches

    batches, numbers = micro_batches(trainer, per_micro)
    for batch in batches:
        batch.vectors["returns"] = batch.vectors.pop("advantages")
    return batches, numbers


# --- in the test ----------------------------------------------------------------------------------------------


def values_of(results: Path, name: str) -> dict[int, list[torch.Tensor]]:
    """Values of each sequence, before and after training, from all data-parallel ranks."""
    merged: dict[int, Any] = {}
    for file in results.glob(f"{name}.values.*.pt"):
        merged.update(torch.load(file, weights_only=True))
    return merged


def check_against_transformers(results: Path, name: str) -> None:
    """The exported critic is a token classification model with the trainer's values."""
    import transformers

    directory = results / f"{name}.hf"
    architecture = getattr(transformers, json.loads((directory / "config.json").read_text())["architectures"][0])
    assert architecture.__name__.endswith("ForTokenClassification")
    model, loading = architecture.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading
    tokens, _ = global_batch()
    for number, (_, values) in values_of(results, name).items():
        with torch.no_grad():
            expected = model.eval()(tokens[number][None]).logits[0, :, 0]
        assert values[0] == 0, "the first token was not chosen"
        torch.testing.assert_close(values[1:], expected[:-1], atol=2e-5, rtol=0)


def check_against_one_process(results: Path, case: dict[str, Any]) -> None:
    from tests.support.megatron_runs import check_weights

    reference = f"critic-{case['model']}"
    base, got = (torch.load(results / f"{name}.pt", weights_only=True) for name in (reference, case["name"]))
    assert torch.equal(base["before"]["score.weight"], got["before"]["score.weight"]), "another head at the start"
    values = values_of(results, case["name"])
    assert sorted(values) == list(range(len(LENGTHS)))
    for number, expected in values_of(results, reference).items():
        for value, of_one in zip(values[number], expected, strict=True):
            torch.testing.assert_close(value, of_one, atol=2e-6, rtol=0)
    for metrics, expected_metrics in zip(got["metrics"], base["metrics"], strict=True):
        assert metrics["critic/grad_norm"] > 0.1, "nothing is clipped: a wrong norm would not show"
        assert 0 <= metrics["critic/vf_clipfrac"] < 1
        assert metrics == pytest.approx(expected_metrics, rel=2e-6), "a loss or gradient norm depends on the layout"
    check_weights(got["after"], base["after"], base["before"])
