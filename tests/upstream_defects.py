"""What is wrong in the packages that megarl stands on, shown with their own code, unmended.

Each function below asserts that one defect is still there; docs/upstream.md names the mend that it calls for.
Run as a module, in a process of its own (megarl's mends must not be installed): prints, as JSON, the name of each
defect with null, or with what was found instead; and which models mbridge knows.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

DEFECTS: dict[str, Callable[[], None]] = {}


def defect(function: Callable[[], None]) -> Callable[[], None]:
    DEFECTS[function.__name__] = function
    return function


def raises(kind: type[BaseException], words: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    try:
        result = function(*args, **kwargs)
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"nothing was raised; the result is {result!r}")


# mbridge ------------------------------------------------------------------------------------------------------------


def places(**sizes: int) -> Any:
    from mbridge.core.parallel_states import ParallelStates

    return ParallelStates(**{"vpp_size": None, **sizes})


def qwen3_moe(**config: Any) -> Any:
    """mbridge's own bridge for a tiny model. The name that transformers 5 dropped is put back."""
    import transformers
    from mbridge.models.qwen3moe import Qwen3MoEBridge

    hf_config = transformers.Qwen3MoeConfig(num_hidden_layers=2, hidden_size=64, head_dim=16, num_experts=4, **config)
    hf_config.rope_theta = 10000.0
    return Qwen3MoEBridge(hf_config, parallel_states=places())


def deepseek_settings(**config: Any) -> dict[str, Any]:
    """What mbridge's bridge for DeepSeek-V3 asks Megatron for."""
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
    """What a bridge makes of a configuration: a model's arguments and its settings."""
    own = [name for name, value in vars(bridge.config).items() if callable(value) and name != "activation_func"]
    return bridge._get_gptmodel_args(), {k: v for k, v in vars(bridge.config).items() if k not in own}


@defect
def fields_are_left_out() -> None:
    """A configuration with them and one without come to the same model."""
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
def scales_of_quantised_weights_are_not_read() -> None:
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


# Megatron -----------------------------------------------------------------------------------------------------------


@defect
def mtp_layers_need_labels() -> None:
    import torch
    from megatron.core.models.gpt import GPTModel

    model = mock.Mock(post_process=True, share_embeddings_and_output_weights=False, training=False)
    model.config.mtp_num_layers = 1
    rows = torch.zeros(2, 1, 4)
    raises(AttributeError, "clone", GPTModel._postprocess, model, rows, None, None, None, None, None, None)


def transformer_config(**settings: Any) -> Any:
    import torch
    from megatron.core.transformer import TransformerConfig

    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    return TransformerConfig(**sizes, params_dtype=torch.float32, **settings)


def two_ranks(**sizes: int) -> None:
    """Lay out two ranks, of which this process is the first and the other does not exist."""
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def expert_on_both_ranks() -> Any:
    """A linear of an expert that both tensor-parallel ranks hold."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    two_ranks(tensor_model_parallel_size=2, expert_tensor_parallel_size=1)
    config = transformer_config(
        tensor_model_parallel_size=2, expert_tensor_parallel_size=1, num_moe_experts=2, add_bias_linear=False
    )
    return ColumnParallelLinear(
        8, 8, config=config, init_method=config.init_method, bias=False, skip_bias_add=True, is_expert=True
    )


@defect
def experts_that_tensor_parallel_ranks_share_count_as_dense() -> None:
    assert expert_on_both_ranks().weight.allreduce is True


@defect
def expert_optimizer_asks_the_tensor_parallel_group() -> None:
    import torch
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import MegatronModule

    expert = expert_on_both_ranks()
    expert.weight.allreduce = False  # as it should be

    class Model(MegatronModule):
        def __init__(self) -> None:
            super().__init__(expert.config)
            self.expert, self.dense = expert, torch.nn.Linear(8, 8)

    wrapped = DistributedDataParallel(expert.config, DistributedDataParallelConfig(), Model())
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1), [wrapped], use_gloo_process_groups=False)
    dense, experts = optimizer.chained_optimizers
    assert experts.param_groups[0]["is_expert_parallel"] and not dense.param_groups[0]["is_expert_parallel"]
    assert experts.tp_group is parallel_state.get_tensor_model_parallel_group()


@defect
def recomputation_asks_transformer_engine() -> None:
    import megatron.core.tensor_parallel.random as random

    assert not hasattr(random, "FP8GlobalStateManager")
    raises(NameError, "FP8GlobalStateManager", random.CheckpointWithoutOutput().checkpoint, lambda: None)


@defect
def float32_router_asks_transformer_engine() -> None:
    import torch
    from megatron.core.transformer.moe import moe_utils

    rows = torch.zeros(2, 4)
    raises(NameError, "te_general_gemm", moe_utils.router_gating_linear, rows, rows, None, torch.float32)


@defect
def fallback_adam_keeps_a_step_for_each_parameter() -> None:
    import torch
    from megatron.core.optimizer import Adam

    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = Adam([parameter])
    optimizer.step()
    assert "step" in optimizer.state[parameter] and "step" not in optimizer.param_groups[0]


@defect
def a_sum_of_gradients_is_lost_where_they_are_not_contiguous() -> None:
    import torch
    from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

    value = torch.zeros(2, 3, requires_grad=True)
    two_ranks: Any = SimpleNamespace(size=lambda: 2)
    with mock.patch("torch.distributed.all_reduce", lambda tensor, **_: tensor.mul_(2)):
        copy_to_tensor_model_parallel_region(value, group=two_ranks).backward(torch.ones(3, 2).T)
        assert value.grad is not None and (value.grad == 1).all(), "2 is the sum"
        value.grad = None
        copy_to_tensor_model_parallel_region(value, group=two_ranks).backward(torch.ones(2, 3))
        assert (value.grad == 2).all()


# PEFT ---------------------------------------------------------------------------------------------------------------


@defect
def linears_outside_the_experts_are_taken_for_theirs() -> None:
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=["self_attn.o_proj", *(f"mlp.shared_experts.{n}_proj" for n in ("gate", "up"))])
    model: Any = SimpleNamespace(config=SimpleNamespace(model_type="deepseek_v3"))
    convert_peft_config_for_transformers(config, model, None)
    assert config.target_modules == {"self_attn.o_proj"} and config.target_parameters == {"gate_up_proj"}, config


# torch --------------------------------------------------------------------------------------------------------------


@defect
def gloo_refuses_parts_of_different_sizes() -> None:
    import torch
    import torch.distributed as dist

    store = dist.HashStore()
    refusals: list[str] = []

    def rank(number: int) -> None:
        group = dist.ProcessGroupGloo(store, number, 2)
        parts = [torch.zeros(1), torch.zeros(2)]
        try:
            group.allgather([parts], [parts[number].clone()]).wait()
        except RuntimeError as error:
            refusals.append(str(error))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refusals) == 2 and "invalid tensor size" in refusals[0], refusals


@defect
def checkpoint_index_is_a_pickle() -> None:
    """Reading the index of a distributed checkpoint does what the index says: here, it makes a folder."""
    from torch.distributed.checkpoint import FileSystemReader

    class Order:
        def __init__(self, folder: str) -> None:
            self.folder = folder

        def __reduce__(self) -> Any:
            return os.mkdir, (self.folder,)

    with tempfile.TemporaryDirectory() as directory:
        folder = os.path.join(directory, "made")
        Path(directory, ".metadata").write_bytes(pickle.dumps(Order(folder)))
        with contextlib.suppress(Exception):  # what it makes of the result is not the point
            FileSystemReader(directory).read_metadata()
        assert os.path.isdir(folder), "the index was not executed"


def main() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    from megarl.platform import select

    select("cpu").prepare()
    found: dict[str, str | None] = {}
    for name, function in DEFECTS.items():
        try:
            function()
            found[name] = None
        except Exception:  # noqa: BLE001 - what is found instead of a defect may be anything
            found[name] = traceback.format_exc()
    from mbridge import AutoBridge

    print(json.dumps({"defects": found, "models": AutoBridge.list_supported_models()}))


if __name__ == "__main__":
    main()
