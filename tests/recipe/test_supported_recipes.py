"""Recipes for models too large for tests: checks that need no weights.

Without them, an error would appear after the devices were allocated."""

from __future__ import annotations

import json
import re
from itertools import takewhile
from pathlib import Path

import pytest

from docs.generate.supported_recipes import PAGE, Row, document, rows
from megarl import load_recipe
from megarl.algorithms.advantages import uses_critic
from megarl.batching.flops import model_flops
from megarl.cluster.device_map import Demand, place
from megarl.hf import published
from megarl.hf.config import number_of_experts, text_fields
from megarl.hf.families.check import check_model
from megarl.megatron.extra_settings import check_extra
from megarl.megatron.layout import check_layout
from megarl.megatron.lora.targets import check_lora
from megarl.preflight.engines import check_engines, check_experts
from megarl.recipe.derived.critic_view import critic_view

ROOT = Path(__file__).parents[2]
ROWS = {row.path.name: row for row in rows()}
EACH = pytest.mark.parametrize("row", ROWS.values(), ids=list(ROWS))

BYTES_OF_BFLOAT16 = 2
DEVICE_BYTES = 64e9  # of each device that a head names; a fifth is left to the cache and to activations

# Billions of parameters as published: a wrong field of a config.json shows here.
PUBLISHED = {
    "DeepSeek-V3": 671,
    "Qwen2-7B-Instruct": 7.6,
    "Qwen2.5-0.5B-Instruct": 0.49,
    "Qwen2.5-7B-Instruct": 7.6,
    "Qwen2.5-32B": 32.5,
    "Qwen2.5-32B-Instruct": 32.5,
    "Qwen2.5-VL-3B-Instruct": 3.1,  # the text part: Qwen2.5-3B
    "Qwen2.5-VL-7B-Instruct": 7.6,
    "Qwen2.5-VL-32B-Instruct": 32.5,
    "Qwen3-VL-8B-Instruct": 8.2,  # the text part: Qwen3-8B
    "Qwen3-VL-30B-A3B-Instruct": 30.5,
    "Qwen3-4B": 4.0,
    "Qwen3-8B": 8.2,
    "Qwen3-14B": 14.8,
    "Qwen3-30B-A3B": 30.5,
    "Qwen3-32B": 32.8,
    "Qwen3-235B-A22B": 235,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
}


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.name)
def test_every_recipe_loads(path: Path) -> None:
    """Every recipe passes the checks, including recipes too large for CI."""
    load_recipe(path)


@EACH
def test_the_layout_divides_the_real_model(row: Row) -> None:
    """TP 8 of a model with 4 key/value heads, pipeline stages that leave layers over, experts that do not divide."""
    recipe, model = load_recipe(row.path), published.read(row.shape)
    check_model(model)
    check_layout(model, recipe.megatron, recipe.cluster.trainers)
    check_lora(model, recipe.lora, recipe.megatron)
    if uses_critic(recipe.algorithm):
        critic = critic_view(recipe)
        check_layout(model, critic.megatron, critic.cluster.trainers)
    longest = recipe.data.max_prompt_length + recipe.rollout.max_response_length
    assert longest <= model["max_position_embeddings"]


@EACH
def test_engines_can_cut_the_model(row: Row) -> None:
    """vLLM refuses heads that do not divide; of fewer key/value heads than devices it keeps copies."""
    recipe, model = load_recipe(row.path), text_fields(published.read(row.shape))
    if recipe.train.source == "rollout":
        size = recipe.rollout.tensor_parallel
        assert model["num_attention_heads"] % size == 0
        groups = model["num_key_value_heads"]
        assert groups % size == 0 or size % groups == 0
        check_experts(recipe.rollout, model)
    check_engines(recipe.rollout)


@EACH
def test_weights_of_an_engine_rank_fit_its_device(row: Row) -> None:
    """671 billion parameters on 16 devices: the run would end when its engines load."""
    recipe, model = load_recipe(row.path), text_fields(published.read(row.shape))
    if recipe.train.source != "rollout":
        return
    rollout = recipe.rollout
    experts = expert_parameters(model)
    over = rollout.tensor_parallel * rollout.data_parallel
    of_a_rank = (parameters(model) - experts) / rollout.tensor_parallel + experts / over
    share = rollout.engine_args.get("gpu_memory_utilization", 0.9)
    assert of_a_rank * BYTES_OF_BFLOAT16 < 0.8 * share * DEVICE_BYTES, f"{of_a_rank / 1e9:.1f} billion on a device"


@EACH
def test_processes_fill_the_devices_of_the_head(row: Row) -> None:
    """No device idles, no recipe needs more devices than exist, and no engine spans two machines."""
    recipe = load_recipe(row.path)
    samples = recipe.train.source == "rollout"
    demand = Demand.of(recipe, trainers=True, engines=samples, critic=uses_critic(recipe.algorithm))
    assert demand.devices == row.devices
    plan = place([(f"node{i}", row.per_node) for i in range(row.nodes)], demand, "devices")
    assert plan.per_machine(row.nodes) == [row.per_node] * row.nodes
    if demand.shared and samples:
        assert demand.engine_devices == row.devices  # colocated engines use all of them


@EACH
def test_batches_divide(row: Row) -> None:
    """A mini batch must not have fewer samples than data-parallel ranks, or ranks would idle."""
    recipe = load_recipe(row.path)
    megatron, actor = recipe.megatron, recipe.actor
    samples = recipe.rollout.samples_per_prompt if recipe.train.source == "rollout" else 1
    ranks = recipe.cluster.trainers // (
        megatron.tensor_parallel * megatron.pipeline_parallel * megatron.context_parallel
    )
    mini_batch, rest = divmod(recipe.data.prompts_per_step * samples, actor.mini_batches)
    assert rest == 0 and mini_batch >= ranks
    longest = recipe.data.max_prompt_length + recipe.rollout.max_response_length
    assert actor.max_tokens_per_micro_batch * megatron.context_parallel >= longest


@EACH
def test_extra_names_real_settings(row: Row) -> None:
    """A field must belong to Megatron or MindSpeed, which accepts any silently; exclusive settings are refused."""
    recipe, model = load_recipe(row.path), published.read(row.shape)
    check_extra(recipe, model, "megatron")
    if uses_critic(recipe.algorithm):
        check_extra(critic_view(recipe), model, "critic.megatron")


@pytest.mark.parametrize("name", sorted({*published.names()} - {"quickstart"}))
def test_config_has_the_published_size(name: str) -> None:
    """Parameters computed from the config equal the published number, which detects a wrong field."""
    assert parameters(text_fields(published.read(name))) / 1e9 == pytest.approx(PUBLISHED[name], rel=0.02)


def test_the_quickstarts_config_equals_the_generated_one(quickstart_data: Path) -> None:
    """The copy of the quickstart's config equals the generated one; plans and rehearsals use the copy."""
    config = json.loads((quickstart_data / "model" / "config.json").read_text())
    assert published.read("quickstart") == config


def parameters(config: dict[str, int]) -> float:
    """Count the parameters of the text model: embeddings, and each layer's attention and MLP or experts."""
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    if rank := config.get("kv_lora_rank"):
        nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
        attention = width * config["q_lora_rank"] + config["q_lora_rank"] * heads * (nope + rope)
        attention += width * (rank + rope) + rank * heads * (nope + value) + heads * value * width
    else:
        size = config.get("head_dim") or width // heads
        attention = 2 * width * heads * size + 2 * width * config["num_key_value_heads"] * size
    dense = 3 * width * config["intermediate_size"]
    first = config.get("first_k_dense_replace", 0) if number_of_experts(config) else layers
    shared = config.get("n_shared_experts", 0) * (layers - first) * 3 * width * config.get("moe_intermediate_size", 0)
    tables = 1 if config["tie_word_embeddings"] else 2
    rest = tables * config["vocab_size"] * width + layers * attention + first * dense
    return rest + shared + expert_parameters(config)


def expert_parameters(config: dict[str, int]) -> float:
    """Count the parameters of the routed experts in all layers."""
    layers = config["num_hidden_layers"] - config.get("first_k_dense_replace", 0)
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    return layers * number_of_experts(config) * 3 * config["hidden_size"] * width


def test_flops_of_each_model_can_be_counted() -> None:
    """perf/mfu needs the FLOPs of every recipe's model."""
    assert all(model_flops(published.read(name)) is not None for name in published.names())


def test_an_unknown_model_is_named_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'Qwen3-8b'.*Nearest: Qwen3-8B"):
        published.read("Qwen3-8b")


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text() == document(), "run python -m docs.generate.supported_recipes"


@pytest.mark.parametrize(
    "file", [path for path in (ROOT / "recipes").rglob("*.yaml") if "tiny" not in path.parts], ids=str
)
def test_the_head_of_a_file_has_the_commands_for_the_model_and_data_that_it_names(file: Path) -> None:
    text = file.read_text()
    head = "".join(takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True)))
    for model in re.findall(r"^  path: models/(\S+)$", text, re.MULTILINE):
        assert re.search(rf"hf download \S+ --local-dir models/{re.escape(model.removesuffix('-BF16'))}\n", head)
    for folder in set(re.findall(r"data/(\w+)/\w+\.parquet", text.removeprefix(head))):
        assert re.search(rf"--out data/{folder}$", head, re.MULTILINE), folder
