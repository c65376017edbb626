"""Family tables in files: valid contents, and the config.json that a table applies to."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megarl.commands.rehearse.tiny_copy import make_tiny_copy
from megarl.engines.base import EngineSpec
from megarl.engines.sglang.args import check_plan as check_sglang_plan
from megarl.engines.vllm.args import build_engine_args
from megarl.errors import RecipeError
from megarl.hf.families import family_of, find_family
from megarl.hf.families.check import model_faults
from megarl.hf.families.tables.family_table import FIELD, read_table, table_notice, table_text, to_json, with_table
from megarl.hf.families.tables.megatron_bridge import translate
from megarl.hf.shape import model_shape
from megarl.megatron.model.build import read_model_config
from megarl.preflight.findings import Available
from megarl.preflight.load import load_recipe
from megarl.preflight.models import read_hf_config
from megarl.preflight.survey import prepare_training, survey
from megarl.recipe.derived.critic_view import critic_view
from megarl.recipe.trainers import ModelConfig
from tests.support.megatron_bridge_dump import CONFIG, dense_dump


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "newest.json"
    path.write_text(to_json(translate(dense_dump(), CONFIG).table))
    return path


def test_a_file_holds_the_table(file: Path) -> None:
    assert read_table(str(file)) == asdict(translate(dense_dump(), CONFIG).table)
    assert read_table(file.read_text()) == read_table(str(file))


def test_a_model_with_its_table_is_supported(file: Path) -> None:
    config = with_table(CONFIG, read_table(str(file)))
    assert [*model_faults(config)] == [] and [*model_faults(CONFIG)] != []
    assert model_shape(config).total == model_shape({**CONFIG, "model_type": "qwen3"}).total
    with pytest.raises(
        ValueError, match=r"the table from Megatron-Bridge 9\.9 \(NewestBridge\) has no row for .*mlp\.x"
    ):
        family_of(config).row_of("decoder.layers.0.mlp.x")


def test_an_unknown_model_names_the_command() -> None:
    with pytest.raises(ValueError, match="`megarl model table`"):
        family_of(CONFIG)
    assert find_family(CONFIG) is None


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"logit_scale": 1.0}, r"logit_scale: 1\.0 \(2\.0 in its table\)"),
        ({"attention_bias": True}, r"attention_bias: True \(absent from its table\)"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types: chunked_attention"),
        ({"mlp_layer_types": ["dense", "sparse"]}, r"mlp_layer_types: .* \(layers: never\)"),
        ({"hidden_act": "gelu"}, "hidden_act: gelu"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rotary scaling 'dynamic'"),
    ],
)
def test_another_config_than_the_tables(file: Path, change: dict[str, Any], fault: str) -> None:
    faults = [*model_faults(with_table({**CONFIG, **change}, read_table(str(file))))]
    assert any(re.search(fault, text) for text in faults), faults


def test_sizes_may_differ_from_the_tables(file: Path) -> None:
    smaller = {"num_hidden_layers": 1, "hidden_size": 32, "vocab_size": 100, "layer_types": ["full_attention"]}
    assert [*model_faults(with_table({**CONFIG, **smaller}, read_table(str(file))))] == []


def test_a_table_of_another_model(file: Path) -> None:
    with pytest.raises(ValueError, match="of newest models, and this is a 'other' model"):
        with_table({**CONFIG, "model_type": "other"}, read_table(str(file)))
    own = {**CONFIG, "model_type": "qwen3", FIELD: {**read_table(str(file)), "model_type": "qwen3"}}
    with pytest.raises(ValueError, match="for which megarl has its own, tested table"):
        family_of(own)


_LONG = "{layer:>1000000000}"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"rows": [["reversed", "a", ["b"]]]}, "is not a valid row"),
        ({"rows": [["copy", "a", "b"]]}, "is not a valid row"),
        ({"rows": [[["copy"], "a", ["b"]]]}, "is not a valid row"),
        ({"rows": None}, "rows is None, and must be an array"),
        ({"rows": [["copy", 3, ["b"]]]}, "3 is not a valid name"),
        ({"rows": [["copy", "a", [4]]]}, "4 is not a valid name"),
        ({"rows": [["copy", "a", [_LONG]]]}, "layer.* is not a valid name"),
        ({"rows": [["copy", "a", ["b{layer.real}"]]]}, "is not a valid name"),
        ({"rows": [["copy", "a", []]]}, "a copy row has 1 tensors, and this one has 0"),
        ({"rows": [["gate_up", "a", ["b"]]]}, "a gate_up row has 2 tensors, and this one has 1"),
        ({"rows": [["copy", "a", ["b"]], ["copy", "a", ["c"]]]}, "a has two rows"),
        ({"rows": [["copy", "a.{layer}", ["b"]]]}, "the same placeholders"),
        ({"rows": [["copy", "{layer}{layer}", ["{layer}{layer}"]]]}, "each once"),
        ({"layers": "some"}, "layers is 'some'"),
        ({"layers": []}, r"layers is \[\], and must be a string"),
        ({"settings": []}, r"settings is \[\], and must be an object"),
        ({"settings": {"num_layers": 3}}, r"settings\.num_layers is 3"),
        ({"settings": {"qk_layernorm": "yes"}}, r"settings\.qk_layernorm is 'yes'"),
        ({"settings": {"qk_layernorm": 1}}, r"settings\.qk_layernorm is 1"),
        ({"settings": {"moe_router_score_function": "nonsense"}}, "is 'nonsense', and must be sigmoid or softmax"),
        ({"settings": {"moe_router_dtype": ["fp32"]}}, "and must be fp32 or fp64"),
        ({"settings": {"moe_router_topk_scaling_factor": True}}, "is True, and must be a positive number"),
        ({"settings": {"moe_router_topk_scaling_factor": float("nan")}}, "is nan, and must be a positive number"),
        ({"settings": {"moe_router_topk_scaling_factor": 0}}, "is 0, and must be a positive number"),
        ({"latent": "no"}, "latent is 'no', and must be true or false"),
        ({"ties": "false"}, "ties is 'false', and must be true or false"),
        ({"config": None}, "config is None, and must be an object"),
        ({"unread": None}, "unread is None, and must be an array"),
        ({"unread": ["absent"]}, "unread has 'absent'"),
        ({"unread": [["logit_scale"]]}, r"unread has \['logit_scale'\]"),
        ({"model_type": ""}, "model_type is '', and must be one line"),
        ({"source": "a\nb"}, "and must be one line of text"),
        ({"more": 1}, "it must be an object with"),
    ],
)
def test_a_file_that_is_no_table(file: Path, change: dict[str, Any], fault: str) -> None:
    content = {**json.loads(file.read_text()), **change}
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=fault):
        read_table(str(file))
    with pytest.raises(ValueError, match=fault):  # also in a configuration
        family_of({**CONFIG, FIELD: content})


def test_a_file_that_is_no_json(file: Path) -> None:
    for text in ("[" * 100_000, "{", "[]"):
        file.write_text(text)
        with pytest.raises(ValueError, match="is not a family table"):
            read_table(str(file))


def test_a_config_json_brings_no_table(file: Path, tmp_path: Path) -> None:
    """Only a recipe may name a table: a downloaded config.json may contain anything."""
    brought = {**CONFIG, FIELD: read_table(str(file))}
    (tmp_path / "config.json").write_text(json.dumps(brought))
    config = read_hf_config(str(tmp_path))
    assert FIELD not in config and any("holds a 'newest' model" in text for text in model_faults(config))
    assert FIELD not in with_table(brought, None)


def test_trainers_and_engines_drop_the_table_of_a_config_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "model_type": "qwen3", FIELD: 1}))
    assert FIELD not in read_model_config(ModelConfig(path=str(tmp_path))).to_dict()
    spec = EngineSpec("engine0", str(tmp_path), "bfloat16", 64)
    assert build_engine_args(spec, "cpu")["model"] == str(tmp_path)
    check_sglang_plan(spec, "cuda")


def test_the_recipe_has_the_text(file: Path, tmp_path: Path) -> None:
    recipe = load_recipe("recipes/quickstart.yaml", [f"model.table={file}"])
    assert recipe.model.table is not None and json.loads(recipe.model.table) == json.loads(file.read_text())
    recipe.critic.model_path = "other"
    assert critic_view(recipe).model.table == recipe.model.table
    with pytest.raises(RecipeError, match=r"(?s)model\.table.*megarl model table"):
        load_recipe("recipes/quickstart.yaml", [f"model.table={tmp_path / 'none.json'}"])


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("newest", None),
        ("qwen3", None),
        ("other", "it is a 'other' model without a table: .* model.table is of newest models"),
    ],
)
def test_a_critic_in_another_folder(file: Path, tmp_path: Path, kind: str, fault: str | None) -> None:
    """The critic has the policy's table if it is of its type, else megarl's own."""
    for name, model_type in (("policy", "newest"), ("critic", kind)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**CONFIG, "model_type": model_type}))
    path, critic = Path("recipes/quickstart_ppo.yaml"), tmp_path / "critic"
    settings = [f"model.path={tmp_path / 'policy'}", f"model.table={file}", f"critic.model_path={critic}"]
    recipe = load_recipe(path, settings)
    result = survey(recipe, Available(recipe_file=path))
    faults = [str(error) for error in result.errors if "critic" in str(error)]
    assert bool(faults) == bool(fault) and all(re.search(fault or "", text) for text in faults), faults
    if fault is None:
        assert (FIELD in result.configs["critic.model_path"]) == (kind == "newest")
    if kind == "qwen3":
        assert FIELD not in read_model_config(critic_view(recipe).model, critic=True).to_dict()


def test_the_notice_names_fields_that_nothing_reads(file: Path) -> None:
    notice = table_notice(read_table(str(file)))
    assert "from Megatron-Bridge 9.9 (NewestBridge)" in notice and "neither reads logit_scale=2.0" in notice
    assert "python -m benchmarks.numerics.family_table" in notice


def test_a_recipe_with_a_table_is_checked_and_rehearsed(file: Path, tmp_path: Path) -> None:
    """The survey reads config.json with the table, and says so; the tiny copy's recipe keeps the table."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    settings = [f"model.path={model}", f"model.table={file}", "megatron.expert_parallel=1"]
    recipe = Path("recipes/quickstart_sft.yaml")
    result = survey(load_recipe(recipe, settings), Available(recipe_file=recipe))
    assert not any("'newest' model" in str(error) for error in result.errors), result.errors
    assert [text for text in result.texts("notice") if "(NewestBridge)" in text]
    copied = make_tiny_copy(recipe, settings, tmp_path / "copy", processes=1)
    assert copied.recipe.model.table == table_text(str(file)) and copied.model[FIELD]["model_type"] == "newest"
    assert FIELD not in json.loads(Path(copied.recipe.model.path, "config.json").read_text())
    assert [text for text in prepare_training(copied.recipe).notices if "(NewestBridge)" in text]
    with pytest.raises(ValueError, match="holds a 'newest' model"):
        make_tiny_copy(recipe, [settings[0], settings[2]], tmp_path / "without", processes=1)
