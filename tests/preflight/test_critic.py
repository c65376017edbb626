"""The critic's section: settings that its processes read, and errors before any process starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.preflight.load import load_recipe
from megarl.recipe import RecipeError
from megarl.recipe.derived.critic_view import critic_view

GAE = ["algorithm.advantage=gae", "train.steps=10"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.yaml"
    file.write_text("model: {path: some/model}\nmegatron: {tensor_parallel: 2}\ncluster: {trainers: 4}\n")
    return file


def test_the_critic_view_has_the_critics_settings_as_the_actors(recipe: Path) -> None:
    settings = [
        "critic.trainers=2", "critic.mini_batches=4", "critic.megatron.pipeline_parallel=2", "critic.optimizer.lr=0.5",
        "critic.max_tokens_per_micro_batch=99", "actor.mini_batches=2", "algorithm.aggregation=seq_mean_token_mean",
        "actor.mini_batch_order=balanced",
    ]  # fmt: skip
    loaded = load_recipe(recipe, [*GAE, *settings])
    view = critic_view(loaded)
    assert (view.cluster.trainers, view.megatron.pipeline_parallel, view.megatron.tensor_parallel) == (2, 2, 1)
    assert (view.actor.mini_batches, view.actor.max_tokens_per_micro_batch, view.actor.optimizer.lr) == (4, 99, 0.5)
    assert view.algorithm.aggregation == "token_mean" and view.model.path == "some/model"
    assert view.actor.mini_batch_order == "as_sampled", (
        "its loss is a mean over tokens, which the other order would change"
    )
    assert (loaded.cluster.trainers, loaded.actor.mini_batches) == (4, 2), "the recipe itself is unchanged"
    assert critic_view(load_recipe(recipe, [*GAE, "critic.model_path=another"])).model.path == "another"


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["critic.trainers=2"], "critic", "uses no critic"),
        (["algorithm.lam=0.9"], "algorithm.lam", "only gae reads it"),
        (
            ["algorithm.whiten_advantages=false"],
            "algorithm.whiten_advantages",
            "only gae, on_policy_distillation or reinforce_plus_plus reads it",
        ),
        ([*GAE, "cluster.transport=torchrun"], "cluster.transport", "Ray can start"),
        ([*GAE, "train.source=sft", "algorithm.loss=sft"], "algorithm.advantage", "no rewards"),
        ([*GAE, "critic.warmup_steps=10"], "critic.warmup_steps", "the policy would never be updated"),
        ([*GAE, "critic.trainers=3", "critic.megatron.tensor_parallel=2"], "critic.trainers", "3 processes"),
        ([*GAE, "critic.mini_batches=5"], "critic.mini_batches", "does not divide into 5"),
        (
            [*GAE, "critic.megatron.virtual_pipeline=2"],
            "critic.megatron.virtual_pipeline",
            "more than one pipeline stage",
        ),
        ([*GAE, "critic.megatron.keep_logits=true"], "critic.megatron.keep_logits", "no log-probs"),
        ([*GAE, "critic.megatron.routing_replay=rollout"], "critic.megatron.routing_replay", "no log-probs"),
        ([*GAE, "critic.optimizer.betas=[1.0,0.9]"], "critic.optimizer.betas", "must be in"),
        ([*GAE, "critic.value_clip=0"], "critic.value_clip", "above 0"),
        (
            [*GAE, "critic.megatron.offload=true", "cluster.placement=disaggregated"],
            "critic.megatron.offload",
            "shares its devices with no engine",
        ),
    ],
)
def test_unsupported_critic_settings_are_refused(recipe: Path, overrides: list[str], key: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, overrides)
    assert caught.value.key == key and words in str(caught.value)
