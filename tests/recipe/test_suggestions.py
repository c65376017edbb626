"""Remedies for unknown keys: names of other frameworks, and keys in the wrong section."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.preflight.load import load_recipe
from megarl.recipe import RecipeError
from megarl.recipe.former_names import OTHER_NAMES
from megarl.recipe.key import type_of
from megarl.recipe.load import all_keys
from megarl.recipe.schema import Recipe

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("optimizer.learning_rate=1e-6", "did you mean actor.optimizer.lr or critic.optimizer.lr?"),
        ("actor.optimizer.learning_rate=1e-6", "did you mean actor.optimizer.lr?"),
        ("batch_size=4", "did you mean data.prompts_per_step?"),
        ("rollout.max_tokens=4", "did you mean rollout.max_response_length?"),
        ("num_epochs=4", "did you mean train.epochs?"),
        ("rollout.tp=2", "did you mean rollout.tensor_parallel?"),
        ("critic.megatron.tp=2", "did you mean critic.megatron.tensor_parallel?"),
        ("tensor_parallel_size=2", "did you mean megatron.tensor_parallel or rollout.tensor_parallel?"),
        ("algorithm.kl_loss_coef=0.1", "did you mean algorithm.kl_coef?"),
        ("actor.megatron.tensor_parallel=2", "megatron.tensor_parallel?"),
        ("vllm.gpu_memory_utilization=0.8", "did you mean rollout.engine_args.gpu_memory_utilization?"),
        ("engine_args.max_num_seqs=8", "did you mean rollout.engine_args or "),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "convert-config"),
        ("trainer.save_freq=20", "did you mean train.save_every?"),
        ("trainer={logger: x, n_gpus_per_node: 8}", "did you mean observe.trackers or cluster.trainers"),
        ("trainer.test_freq=5", "did you mean evaluation.every?"),
        ("rolout.engines=16", "did you mean rollout.engines?"),
        ("rolout.color=red", "did you mean rollout?"),
        ("rolout={engines: 16, tp: 2}", "did you mean rollout.engines or rollout.tensor_parallel?"),
        ("cluster.nodes=2", "did you mean cluster.trainers (the devices of all nodes together)?"),
        ("foo.bar=1", "keys here: name, "),
        ("actor.ppo_mini_batch_size=256", "did you mean actor.mini_batches (the number of parts, not their size)?"),
        ("global_batch_size=256", "did you mean actor.mini_batches (the number of parts, not their size)?"),
        ("ppo.mini_batch_size=256", "actor.mini_batches (the number of parts, not their size)"),
        ("micro_batch_size=4", "actor.max_tokens_per_micro_batch (tokens, not samples)"),
        ("max_tokens_per_gpu=4096", "did you mean actor.max_tokens_per_micro_batch?"),
        ("use_kl_loss=true", "did you mean algorithm.kl_coef (a number, 0 for none)?"),
        ("gradient_checkpointing=true", "did you mean megatron.recompute (none, selective or full)?"),
    ],
)
def test_the_remedy_names_the_key(override: str, remedy: str) -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe(QUICKSTART, [override])
    assert error.value.problem == "unknown key" and remedy in error.value.remedy


@pytest.mark.parametrize("override", ["lr=1e-6", "wandb=true", "logger=console"])
def test_a_section_is_no_remedy_for_a_value(override: str) -> None:
    """`lora`, `weight_sync` and `sandbox` look like these names."""
    with pytest.raises(RecipeError) as error:
        load_recipe(QUICKSTART, [override])
    assert not {"lora?", "sandbox?"} & {*error.value.remedy.split()}


def test_the_table_has_keys_of_the_schema_and_names_that_are_none() -> None:
    keys = set(all_keys())
    for name, targets in OTHER_NAMES.items():
        assert name not in keys
        for target in targets:
            section, _, leaf = target.rpartition(".")
            assert target in keys or (type_of(Recipe, section) is not None and section.endswith(".engine_args")), leaf
