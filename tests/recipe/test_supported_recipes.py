"""Recipes for models too large for tests: checks that need no weights.

Without them, an error would appear after the devices were allocated."""

from __future__ import annotations

import json
import re
from itertools import takewhile
from pathlib import Path

import pytest

from docs.generate.supported_recipes import PAGE, Row, document, rows
from docs.generate.verl_rows import VERL_ROWS
from megarl import load_recipe
from megarl.algorithms.advantages import uses_critic
from megarl.batching.flops import model_flops
from megarl.cluster.device_map import Demand, place
from megarl.hf import published
from megarl.hf.config import text_fields
from megarl.hf.families import has_zero_centered_norms
from megarl.hf.families.check import check_model
from megarl.hf.shape import model_shape
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
    "DeepSeek-V3.2": 671.9,  # DeepSeek-V3's and 61 indexers
    "ERNIE-4.5-21B-A3B-PT": 21.8,
    "GLM-4.5": 355,
    "GLM-5": 744,
    "GLM-4.5-Air": 106,
    "GLM-4.7": 355,
    "GLM-4.7-Flash": 30,
    "Kimi-K2-Instruct": 1040,
    "Llama-3.1-70B": 70.6,
    "Llama-3.1-8B": 8.03,
    "MiniMax-M2": 230,
    "Mistral-7B-Instruct-v0.3": 7.25,
    "Mistral-Small-24B-Instruct-2501": 23.6,
    "Mixtral-8x7B-v0.1": 46.7,
    "Moonlight-16B-A3B": 16,
    "Qwen1.5-MoE-A2.7B-Chat": 14.3,
    "Qwen3-Next-80B-A3B-Instruct": 80,
    "Qwen3.5-122B-A10B": 122,
    "Qwen3.5-27B": 27,
    "Qwen3.5-35B-A3B": 35,
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
    "gemma-3-1b-it": 1.0,
    "gemma-3-27b-it": 27.0,  # the text part
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
    assert longest <= text_fields(model)["max_position_embeddings"]


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
    recipe, shape = load_recipe(row.path), model_shape(published.read(row.shape))
    if recipe.train.source != "rollout":
        return
    rollout = recipe.rollout
    over = rollout.tensor_parallel * rollout.data_parallel
    of_a_rank = (shape.total - shape.routed) / rollout.tensor_parallel + shape.routed / over
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
    """Parameters computed from the config equal the published number, which detects a wrong field. Without vision towers and
    layers for multi-token prediction."""
    check_model(config := published.read(name))
    assert model_shape(config).total / 1e9 == pytest.approx(PUBLISHED[name], rel=0.02)


def test_published_names_have_a_source() -> None:
    """The table of sources lists each config.json, so that a value can be looked up."""
    table = (ROOT / "megarl" / "hf" / "published" / "sources.md").read_text()
    assert re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE) == sorted({*published.names()} - {"quickstart"})


def test_the_quickstarts_config_equals_the_generated_one(quickstart_data: Path) -> None:
    """The copy of the quickstart's config equals the generated one; plans and rehearsals use the copy."""
    config = json.loads((quickstart_data / "model" / "config.json").read_text())
    assert published.read("quickstart") == config


def test_flops_of_each_model_can_be_counted() -> None:
    """perf/mfu needs the FLOPs of every recipe's model."""
    assert all(model_flops(published.read(name)) is not None for name in published.names())


def test_an_unknown_model_is_named_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'Qwen3-8b'.*Nearest: Qwen3-8B"):
        published.read("Qwen3-8b")


def test_each_row_of_verls_table_has_a_recipe_or_a_reason() -> None:
    """A recipe that is renamed, or a row that is left out, shows here; so does a family that is refused no longer."""
    assert len(VERL_ROWS) == len({row.number for row in VERL_ROWS}) == 41
    assert all(row.recipe in ROWS or (not row.recipe and row.remark) for row in VERL_ROWS)
    for number, name in (("35", "Qwen3.5-27B"), ("36", "Qwen3.5-35B-A3B"), ("38", "Qwen3-Next-80B-A3B-Instruct")):
        row = next(row for row in VERL_ROWS if row.number == number)
        assert ("MindSpeed" in row.remark) == has_zero_centered_norms(published.read(name))


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
