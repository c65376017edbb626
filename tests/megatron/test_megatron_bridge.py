"""The reader of Megatron-Bridge: its process with a small package, and every family that both know with the real package.

MEGARL_MEGATRON_BRIDGE names a folder with the package: `pip install --no-deps --target FOLDER megatron-bridge==0.3.1`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megarl.cli import app
from megarl.commands.model import check
from megarl.commands.rehearse.changes import Changes
from megarl.commands.rehearse.model import shrink_model
from megarl.exit_status import guarded
from megarl.hf import published
from megarl.hf.families import FAMILIES, family_of
from megarl.hf.families.sizes import parameters
from megarl.hf.families.slices import ParameterShard
from megarl.hf.families.tables.family_table import family_of_table, read_table
from megarl.hf.families.tables.megatron_bridge import Translation, translate
from megarl.megatron.megatron_bridge import reader
from megarl.megatron.megatron_bridge.reader import before_transformers_5, read_bridge, read_bridges, whole_config
from tests.support.megatron_bridge_dump import FOLDER, WITH_PACKAGE

PACKAGE = {
    "package_info.py": '__version__ = "7.0"\n',
    "models/conversion/param_mapping.py": """
import transformer_engine.pytorch as te
from mamba_ssm.ops import scan

class Base(te.Linear):
    def __init__(self, megatron_param, hf_param, permute_dims=None):
        self.megatron_param, self.hf_param, self.permute_dims = megatron_param, hf_param, permute_dims

@scan.jit
class AutoMapping(Base):
    pass
""",
    "models/conversion/model_bridge.py": """
import dataclasses, types
from megatron.core.transformer import TransformerConfig
from megatron.bridge.models.conversion.param_mapping import AutoMapping

@dataclasses.dataclass
class Provider(TransformerConfig):
    rotary_base: float = 10000.0
    def __post_init__(self): pass
    def provide(self): pass

class MegatronModelBridge:
    def maybe_modify_loaded_hf_weight(self): pass
    def maybe_modify_converted_hf_weight(self): pass
    def build_conversion_tasks(self): pass

class SmallBridge(MegatronModelBridge):
    def build_conversion_tasks(self): pass
    def provider_bridge(self, pretrained):
        config = pretrained.config
        print("imports print")
        return Provider(num_layers=config.num_hidden_layers, num_attention_heads=4, qk_layernorm=True, rotary_base=config.rope_theta)
    def mapping_registry(self):
        assert self.hf_config.num_hidden_layers
        return types.SimpleNamespace(mappings=[AutoMapping("a.*", "b.*", (1, 0)), AutoMapping("c", "d")])

get_model_bridge = types.SimpleNamespace(_exact_types={"SmallForCausalLM": lambda _: SmallBridge()})
""",
}


@pytest.fixture(scope="module")
def small_package(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("package")
    for name, text in PACKAGE.items():
        file = folder / "megatron" / "bridge" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return str(folder)


@pytest.mark.slow
@pytest.mark.stack
def test_the_process_reads_names_and_values(small_package: str) -> None:
    config = {"architectures": ["SmallForCausalLM"], "num_hidden_layers": 3, "rope_parameters": {"rope_theta": 5.0}}
    good, no_layers, other = read_bridges(
        [config, {"architectures": ["SmallForCausalLM"]}, {"architectures": ["OtherForCausalLM"]}], small_package
    )
    assert good["version"] == "7.0" and good["bridge"] == "SmallBridge" and good["hooks"] == ["build_conversion_tasks"]
    assert {"mamba_ssm", "transformer_engine"} <= {*good["absent"]}
    assert [(each["parameter"], each["tensors"], each["options"]) for each in good["mappings"]] == [
        ("a.*", "b.*", {"permute_dims": [1, 0]}),
        ("c", "d", {}),
    ]
    assert good["mappings"][0]["module"] == "megatron.bridge.models.conversion.param_mapping"
    provider = good["provider"]
    assert provider["provide"] == "megatron.bridge.models.conversion.model_bridge.Provider"
    assert (provider["fields"]["num_layers"], provider["fields"]["rotary_base"]) == (3, 5.0)
    assert provider["fields"]["qk_layernorm"] is True and provider["defaults"]["qk_layernorm"] is False
    assert good["read"] == ["num_hidden_layers", "rope_theta"]
    assert no_layers["error"] == "AttributeError: num_hidden_layers" and "bridge" not in other


def test_without_the_package(tmp_path: Path) -> None:
    assert reader.installed_version() is None, "these tests expect an environment without the package"
    with pytest.raises(ValueError, match="Megatron-Bridge is not installed"):
        read_bridge({}, None)
    with pytest.raises(ValueError, match="holds no megatron/bridge"):
        read_bridge({}, str(tmp_path))
    with pytest.raises(ValueError, match="transformers does not know the model_type 'newest'"):
        whole_config({"model_type": "newest"})
    (hint,) = check.bridge_hints({"model_type": "newest"})
    assert hint.startswith("Megatron-Bridge: not installed.") and "megarl model table" in hint


def test_check_lists_the_reasons_of_an_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "installed_version", lambda: "7.0")
    first, reason = check.bridge_hints({"model_type": "newest"})
    assert first == "Megatron-Bridge 7.0 has no table that can be used:" and "does not know the model_type" in reason
    monkeypatch.setattr(reader, "whole_config", lambda config: config)
    monkeypatch.setattr(reader, "read_bridge", lambda config, folder: {})
    monkeypatch.setattr(check, "translate", lambda dump, config: Translation(None, []))  # type: ignore[arg-type]
    assert check.bridge_hints({}) == [
        "Megatron-Bridge 7.0 has a table that can be used: megarl model table MODEL --out FILE"
    ]


def test_names_of_transformers_4() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 7.0, "factor": 4.0, "partial_rotary_factor": 0.5}
    fields = before_transformers_5({"hidden_size": 8, "rope_parameters": yarn, "_private": 1})
    assert (fields["rope_theta"], fields["partial_rotary_factor"], fields["torch_dtype"]) == (7.0, 0.5, "bfloat16")
    assert fields["rope_scaling"]["type"] == "yarn" and "_private" not in fields
    text = before_transformers_5({"text_config": {"hidden_size": 8, "rope_theta": 3.0}})["text_config"]
    assert text["rope_theta"] == 3.0 and text["rope_scaling"] is None


# --- the package ------------------------------------------------------------------------------------------------------

OLMOE = {
    "model_type": "olmoe",
    "architectures": ["OlmoeForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 256,
}
BOTH = {
    "DeepSeek-V3": {
        "DeepSeekV3Bridge.maybe_modify_converted_hf_weight changes tensors in code",  # adds rotary frequencies, if a file has them
        "moe_router_num_groups is 4: megarl's tables have None or 1",
        "moe_router_group_topk is 2: megarl's tables have None or 1",
    },
    "GLM-4.5": {
        "GLM45Bridge.build_conversion_tasks changes tensors in code"
    },  # for the layers of multi-token prediction
    "Llama-3.1-8B": set(),
    "Mistral-7B-Instruct-v0.3": set(),
    "Moonlight-16B-A3B": {"DeepSeekV3Bridge.maybe_modify_converted_hf_weight changes tensors in code"},
    "OLMoE": {
        "GPTModelProvider uses a custom layer spec (megatron.bridge.models.olmoe.olmoe_provider.olmoe_layer_spec)"
    },
    "Qwen2-7B-Instruct": set(),
    "Qwen3-8B": set(),
    "Qwen3-30B-A3B": set(),
}
"""Models of families that both know, at tiny size, and the reasons against Megatron-Bridge's table."""

OTHER_SETTINGS: dict[str, dict[str, tuple[Any, Any]]] = {
    "DeepSeek-V3": {"moe_router_num_groups": (4, None), "moe_router_group_topk": (2, None)},  # refused, above
    "GLM-4.5": {"moe_router_pre_softmax": (True, None)},  # without effect on sigmoid scores
    # Its norms span all heads: refused, above; megarl has `wide_norms`, and sets the router's dtype by `model.dtype`.
    "OLMoE": {"qk_layernorm": (None, True), "moe_router_dtype": (None, "fp32")},
    "Qwen3-30B-A3B": {"moe_router_pre_softmax": (False, None)},  # Megatron's default
}
"""Fields of TransformerConfig with other values: megarl's and the table's."""


def _tiny(name: str) -> dict[str, Any]:
    if name == "OLMoE":
        return whole_config(OLMOE)
    config = published.read(name)
    return whole_config({**shrink_model(config, 4, Changes()), "architectures": config["architectures"]})


@pytest.fixture(scope="module")
def tiny() -> dict[str, dict[str, Any]]:
    return {name: _tiny(name) for name in BOTH}


@pytest.fixture(scope="module")
def translations(tiny: dict[str, dict[str, Any]]) -> dict[str, Translation]:
    dumps = read_bridges([*tiny.values()], FOLDER)
    return {name: translate(dump, tiny[name]) for name, dump in zip(tiny, dumps, strict=True)}


@WITH_PACKAGE
@pytest.mark.stack
@pytest.mark.parametrize("name", BOTH)
def test_tables_of_families_that_both_know(
    name: str, tiny: dict[str, dict[str, Any]], translations: dict[str, Translation]
) -> None:
    """The same tensors and slices for each shard of each parameter, and the same settings."""
    config, translation = tiny[name], translations[name]
    assert {*translation.reasons} == BOTH[name]
    own, table = family_of(config), family_of_table(asdict(translation.table))
    for parameter, shape in parameters(own, config):
        row = table.row_of(parameter.parameter)
        assert row.tensors == parameter.tensors
        for ranks in (1, 2):
            shard = (shape[0] // ranks, *shape[1:])
            for rank in range(ranks if shape[0] % ranks == 0 else 0):
                place = ParameterShard(rank, ranks)
                assert row.kind(config, shard, place) == parameter.kind(config, shard, place), parameter
    ours, theirs = own.settings(config), table.settings(config)
    differing = {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}
    assert {key: (ours.get(key), theirs.get(key)) for key in differing} == OTHER_SETTINGS.get(name, {})
    layers = range(config["num_hidden_layers"])
    assert [own.sparse(config, layer) for layer in layers] == [table.sparse(config, layer) for layer in layers]


REFUSED = {
    "GemmaForCausalLM": "builds the model in code",
    "Gemma2ForCausalLM": "builds the model in code",
    "NemotronForCausalLM": "normalization is 'LayerNorm'",
    "GptOssForCausalLM": "GPTOSSMLPDownProjMapping cannot be expressed as slices",
    "NemotronHForCausalLM": "MambaInProjMapping cannot be expressed as slices",
    "Mistral3ForConditionalGeneration": "the model has a vision tower",
}


@WITH_PACKAGE
@pytest.mark.stack
def test_models_that_are_refused() -> None:
    import transformers

    configs = []
    for name in REFUSED:
        config = getattr(transformers, name).config_class().to_dict()
        configs.append({**config, "architectures": [name]})
    for (name, reason), config, dump in zip(REFUSED.items(), configs, read_bridges(configs, FOLDER), strict=True):
        assert "error" not in dump, dump["error"]
        reasons = translate(dump, config).reasons
        assert any(reason in text for text in reasons), (name, reasons)


DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "routed_scaling_factor": 1.0,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
    "vocab_size": 102400,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""The fields of DeepSeek-V2-Lite's config.json. megarl has no table for this model type."""


@pytest.fixture(scope="module")
def lite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lite")
    (folder / "config.json").write_text(json.dumps(DEEPSEEK_V2_LITE))
    return folder


def _table(folder: Path) -> tuple[int, Path]:
    out = folder / "table.json"
    out.unlink(missing_ok=True)
    arguments = ["model", "table", str(folder), "--out", str(out), "--megatron-bridge", FOLDER]
    return guarded(lambda: app(args=arguments, standalone_mode=False), debug=False), out


@WITH_PACKAGE
@pytest.mark.stack
def test_the_command_writes_a_table_that_a_model_is_trained_by(
    lite: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tiny DeepSeek-V2: log-probs, gradient, two steps in TP2, PP2 and EP2, and export equal transformers'."""
    from benchmarks.numerics.family_table import compare

    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert "deepseek_v2" not in FAMILIES, "choose another family for this test"
    status, out = _table(lite)
    text = capsys.readouterr().out
    assert status == 0 and "deepseek_v2 models from Megatron-Bridge" in text and 'topk_method: "greedy"' in text
    assert read_table(str(out))["unread"] == ["moe_layer_freq", "norm_topk_prob", "topk_method"]
    results = compare(DEEPSEEK_V2_LITE, out, lite / "results")
    assert {layout: faults for layout, (_, faults) in results.items()} == {"TP1": [], "TP2": [], "PP2": [], "EP2": []}


@WITH_PACKAGE
@pytest.mark.stack
def test_the_command_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of experts: transformers takes the best score of a group, Megatron the sum of the best two."""
    monkeypatch.setattr("signal.signal", lambda *_: None)
    (tmp_path / "config.json").write_text(json.dumps({**DEEPSEEK_V2_LITE, "n_group": 8, "topk_group": 3}))
    status, out = _table(tmp_path)
    assert status == 1 and not out.exists()
    assert "moe_router_num_groups is 8" in capsys.readouterr().out
