"""Defects in megarl's dependencies, shown with their unpatched code.

Each function below asserts that one defect exists; docs/upstream.md names megarl's fix.
Run as a module in a separate process (megarl's fixes must not be installed). Prints JSON: for each defect's name null, or
the traceback of the failed check.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import tempfile
import threading
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.support import upstream_mbridge  # noqa: F401 - its defects are registered
from tests.support.upstream_registry import DEFECTS, defect, raises

# Megatron -----------------------------------------------------------------------------------------------------------


def transformer_config(**settings: Any) -> Any:
    import torch
    from megatron.core.transformer import TransformerConfig

    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    return TransformerConfig(**sizes, params_dtype=torch.float32, **settings)


def two_ranks(**sizes: int) -> None:
    """Set up a layout of two ranks without a second process; this process is the first rank."""
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def expert_on_both_ranks() -> Any:
    """A linear of an expert with a copy on both tensor-parallel ranks."""
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
    """Reading the index of a distributed checkpoint executes it: here, it makes a folder."""
    from torch.distributed.checkpoint import FileSystemReader

    class Order:
        def __init__(self, folder: str) -> None:
            self.folder = folder

        def __reduce__(self) -> Any:
            return os.mkdir, (self.folder,)

    with tempfile.TemporaryDirectory() as directory:
        folder = os.path.join(directory, "made")
        Path(directory, ".metadata").write_bytes(pickle.dumps(Order(folder)))
        with contextlib.suppress(Exception):  # only the pickle's side effect counts
            FileSystemReader(directory).read_metadata()
        assert os.path.isdir(folder), "the index was not executed"


def main() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    from megarl.platform import select

    select("cpu").prepare()
    defects: dict[str, str | None] = {}
    for name, function in DEFECTS.items():
        try:
            function()
            defects[name] = None
        except Exception:  # noqa: BLE001 - a changed dependency may raise anything
            defects[name] = traceback.format_exc()

    print(json.dumps({"defects": defects}))


if __name__ == "__main__":
    main()
