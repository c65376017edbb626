"""Defects in mbridge; see `upstream_defects`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.upstream_registry import defect, raises


def places(**sizes: int) -> Any:
    from mbridge.core.parallel_states import ParallelStates

    return ParallelStates(**{"vpp_size": None, **sizes})


def qwen3_moe(**config: Any) -> Any:
    """Build mbridge's bridge for a tiny model, with the name that transformers 5 dropped."""
    import transformers
    from mbridge.models.qwen3moe import Qwen3MoEBridge

    hf_config = transformers.Qwen3MoeConfig(num_hidden_layers=2, hidden_size=64, head_dim=16, num_experts=4, **config)
    hf_config.rope_theta = 10000.0
    return Qwen3MoEBridge(hf_config, parallel_states=places())


def deepseek_settings(**config: Any) -> dict[str, Any]:
    """Megatron settings of mbridge's bridge for DeepSeek-V3."""
    import transformers
    from mbridge.models.deepseek_v3 import DeepseekV3Bridge

    class Bridge(DeepseekV3Bridge):
        def _build_base_config(self, **settings: Any) -> Any:
            return settings

    hf_config = transformers.DeepseekV3Config(num_hidden_layers=2, **config)
    hf_config.rope_theta = 10000.0
    return Bridge(hf_config, parallel_states=places()).config


@defect
def rope_theta_is_read_where_transformers_4_had_it() -> None:
    import transformers
    from mbridge.models.qwen3 import Qwen3Bridge

    hf_config = transformers.Qwen3Config(num_hidden_layers=2)
    bridge = Qwen3Bridge(hf_config, parallel_states=places())
    raises(AttributeError, "rope_theta", bridge._get_gptmodel_args)


@defect
def rotary_scaling_is_left_out() -> None:
    scaling = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    with_it = qwen3_moe(rope_parameters=scaling)
    assert with_it.hf_config.rope_parameters["rope_type"] == "linear"
    assert asked_of_megatron(with_it) == asked_of_megatron(qwen3_moe())


def asked_of_megatron(bridge: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A bridge's model arguments and settings from a configuration."""
    callables = [name for name, value in vars(bridge.config).items() if callable(value) and name != "activation_func"]
    return bridge._get_gptmodel_args(), {k: v for k, v in vars(bridge.config).items() if k not in callables}


@defect
def fields_are_left_out() -> None:
    """A configuration with these fields and one without give the same model."""
    import transformers
    from mbridge.models.glm4moe import GLM4MoEBridge
    from mbridge.models.llama import LLaMABridge

    def of(bridge: Any, config: Any, **fields: Any) -> Any:
        hf_config = config(num_hidden_layers=2, **fields)
        hf_config.rope_theta = 10000.0
        return asked_of_megatron(bridge(hf_config, parallel_states=places()))

    odd = {"attention_bias": True, "hidden_act": "gelu", "use_sliding_window": True, "sliding_window": 8}
    assert asked_of_megatron(qwen3_moe(**odd)) == asked_of_megatron(qwen3_moe())
    llama = LLaMABridge, transformers.LlamaConfig
    assert of(*llama, mlp_bias=True) == of(*llama)
    glm, odd = (GLM4MoEBridge, transformers.Glm4MoeConfig), {"n_group": 2, "n_shared_experts": 2}
    assert of(*glm, **odd, norm_topk_prob=False, attention_bias=False) == of(*glm, attention_bias=True)


@defect
def scales_of_quantized_weights_are_not_read() -> None:
    import torch
    from safetensors.torch import save_file

    numbers, name = torch.full((2, 2), 3.0).to(torch.float8_e4m3fn), "model.layers.0.self_attn.o_proj.weight"
    with tempfile.TemporaryDirectory() as directory:
        scales = {f"{name}_scale_inv": torch.full((1, 1), 0.5)}
        save_file({name: numbers, **scales}, os.path.join(directory, "model.safetensors"))
        Path(directory, "config.json").write_text("{}")  # without which no directory is a model's to mbridge
        read = qwen3_moe()._get_safetensor_io(directory).load_one_hf_weight(name)
    assert torch.equal(read.float(), numbers.float())


@defect
def dense_layers_of_qwen3_moe_have_no_names() -> None:
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    raises(NotImplementedError, name, qwen3_moe()._weight_name_mapping_mlp, name)


@defect
def norm_topk_prob_is_not_read() -> None:
    settings = [qwen3_moe(norm_topk_prob=value).config.moe_router_pre_softmax for value in (True, False)]
    assert settings == [False, False]


@defect
def tied_embeddings_change_the_class() -> None:
    import transformers
    from mbridge.models.qwen2 import Qwen2Bridge

    kept = dict(Qwen2Bridge._DIRECT_MAPPING)
    try:
        Qwen2Bridge(transformers.Qwen2Config(num_hidden_layers=2, tie_word_embeddings=True), parallel_states=places())
        assert Qwen2Bridge._DIRECT_MAPPING["output_layer.weight"] == "model.embed_tokens.weight"
    finally:
        Qwen2Bridge._DIRECT_MAPPING.update(kept)


@defect
def experts_are_merged_over_tensor_parallel() -> None:
    import torch

    halves = [torch.zeros(4, 2), torch.ones(4, 2)]
    bridge = qwen3_moe()
    bridge.mpu = places(tp_size=1, etp_size=2)
    name = "decoder.layers.0.mlp.experts.linear_fc2.weight0"
    raises(AssertionError, "", bridge._weight_merge_across_tp, name, halves, halves[0])
    bridge.mpu = places(tp_size=4, etp_size=2)
    gathered = [*halves, *halves]  # what export_weights gathers: over the tensor-parallel group
    raises(AssertionError, "", bridge._weight_merge_across_tp, name, gathered, halves[0])


@defect
def deepseek_asks_for_a_field_that_megatron_renamed() -> None:
    import transformers
    from mbridge.models.deepseek_v3 import DeepseekV3Bridge

    hf_config = transformers.DeepseekV3Config(num_hidden_layers=2)
    hf_config.rope_theta = 10000.0
    raises(TypeError, "max_position_embeddings", DeepseekV3Bridge, hf_config, parallel_states=places())


@defect
def deepseek_loses_yarn() -> None:
    yarn = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 128, "rope_theta": 10000.0}
    settings = deepseek_settings(rope_parameters=yarn)
    assert (settings["rope_type"], settings["rotary_scaling_factor"]) == ("rope", 1)


@defect
def deepseek_loses_groups_of_experts() -> None:
    assert "moe_router_num_groups" not in deepseek_settings(n_group=8, topk_group=4)


@defect
def deepseek_reads_float32_weights_not_at_all() -> None:
    import torch
    from mbridge.models.deepseek_v3 import DeepseekV3Bridge

    raises(TypeError, "", DeepseekV3Bridge._get_safetensor_io, SimpleNamespace(dtype=torch.float32), "path")


@defect
def deepseek_mtp_layers_are_those_of_61_layers() -> None:
    from mbridge.models.deepseek_v3 import DeepseekV3Bridge

    bridge = SimpleNamespace(config=SimpleNamespace(mtp_num_layers=1, num_layers=4))
    name = "mtp.layers.0.enorm.weight"
    raises(AssertionError, "61 layers", DeepseekV3Bridge._convert_mtp_param, bridge, name)
