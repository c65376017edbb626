"""An engine of vllm-ascend that woke up: parameters that it replaced are put back. Nothing here runs on a device."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megarl.engines import engine_env
from megarl.engines.base import EngineSpec
from megarl.engines.vllm import ascend
from megarl.engines.vllm.engine import _VllmBackend

ROOT = Path(__file__).parents[2]


class Experts(torch.nn.Module):
    """Two experts as vllm-ascend keeps them: transposed against the checkpoint."""

    def __init__(self, hidden: int = 4, width: int = 3) -> None:
        super().__init__()
        self.w13_weight = torch.nn.Parameter(torch.randn(2, hidden, 2 * width), requires_grad=False)
        self.w2_weight = torch.nn.Parameter(torch.randn(2, width, hidden), requires_grad=False)
        self.register_parameter("bias", None)


def wake_up(model: torch.nn.Module, hidden: int = 4) -> None:
    """Do as versions 0.12 to 0.26: turn weights in the kernels' layout into the loaders' layout."""
    for name, parameter in list(model.named_parameters()):
        owner, _, attribute = name.rpartition(".")
        at = 2 if attribute == "w2_weight" else 1 if attribute == "w13_weight" else None
        if at is not None and parameter.shape[at] == hidden:
            turned = torch.nn.Parameter(parameter.transpose(1, 2), requires_grad=False)
            setattr(model.get_submodule(owner), attribute, turned)


def test_parameters_replaced_by_wake_up_are_restored() -> None:
    model = torch.nn.Sequential(Experts(), torch.nn.Linear(4, 4))
    before = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
    held = ascend.hold_parameters(model)
    wake_up(model)
    assert model[0].w13_weight.shape == (2, 6, 4)
    assert ascend.put_back(held) == 2
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0] and torch.equal(parameter, before[name][1])
    held = ascend.hold_parameters(model)
    assert ascend.put_back(held) == 0


def test_an_engine_on_an_npu_restores_parameters_after_wake_up() -> None:
    calls: list[object] = []
    backend = _VllmBackend(EngineSpec("e0", "", "bfloat16", 64, sleep_mode=True))
    backend._engine = SimpleNamespace(
        sleep=lambda level: calls.append(level),
        wake_up=lambda *tags: calls.append(["wake", *tags]),
        collective_rpc=lambda name: calls.append(name),
    )
    held, back = "megarl_hold_parameters", "megarl_put_parameters_back"
    backend._can = SimpleNamespace(device="npu")
    backend.sleep(0)
    backend.wake(["weights"])
    backend.wake(None)
    assert calls == ["megarl_synchronize", 1, held, ["wake", ["weights"]], back, held, ["wake"], back]
    calls.clear()
    backend._can = SimpleNamespace(device="cuda")
    backend.sleep(0)
    backend.wake(None)
    assert calls == ["megarl_synchronize", 2, ["wake"]]


RELOAD = '''
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from megarl.engines.vllm import ascend as vllm_ascend
from megarl.engines.vllm.worker import load
from tests.engines.test_vllm_ascend_wake import wake_up

HIDDEN, WIDTH = {hidden}, {width}

class Method(QuantizeMethodBase):
    """As AscendUnquantizedFusedMoEMethod: new parameters without loaders, transposed."""
    def create_weights(self, layer): pass
    def apply(self, layer): pass
    def process_weights_after_loading(self, layer):
        for name in ("w13_weight", "w2_weight"):
            turned = getattr(layer, name).data.transpose(1, 2).contiguous()
            setattr(layer, name, torch.nn.Parameter(turned, requires_grad=False))

class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.quant_method = Method()
        self.w13_weight = torch.nn.Parameter(torch.zeros(2, 2 * WIDTH, HIDDEN), requires_grad=False)
        self.w2_weight = torch.nn.Parameter(torch.zeros(2, HIDDEN, WIDTH), requires_grad=False)
        for parameter in self.parameters():
            parameter.weight_loader = lambda param, value: param.data.copy_(value)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = Experts()
    def load_weights(self, weights):
        own, names = dict(self.named_parameters()), set()
        for name, value in weights:
            own[name].weight_loader(own[name], value)
            names.add(name)
        return names

def checkpoint(seed):
    torch.manual_seed(seed)
    return {{"experts.w13_weight": torch.randn(2, 2 * WIDTH, HIDDEN), "experts.w2_weight": torch.randn(2, HIDDEN, WIDTH)}}

model = Model()
record_metadata_for_reloading(model)
model.experts.quant_method.process_weights_after_loading(model.experts)
at = {{name: value.data_ptr() for name, value in model.named_parameters()}}
for seed, sleeps in enumerate((False, True, True)):
    held = vllm_ascend.hold_parameters(model)
    if sleeps:
        wake_up(model, HIDDEN)
        if {mend}:
            vllm_ascend.put_back(held)
    load(model, iter(checkpoint(seed).items()), None)
    for name, value in model.named_parameters():
        wanted = checkpoint(seed)[name].transpose(1, 2)
        stored = torch.as_strided(value.data, wanted.shape, wanted.contiguous().stride())  # as a captured graph reads it
        assert torch.equal(stored, wanted), (seed, name, "other values")
        assert value.data_ptr() == at[name], (seed, name, "other memory")
print("the same")
'''


@pytest.mark.stack
@pytest.mark.slow
@pytest.mark.parametrize("hidden, width", [(4, 3), (6, 3)], ids=["oblong", "square"])
def test_a_layerwise_reload_after_waking_up(hidden: int, width: int) -> None:
    """vLLM's own reload, with experts as vllm-ascend keeps them: right with the mend, wrong or an error without."""
    for mend in (True, False):
        code = RELOAD.format(hidden=hidden, width=width, mend=mend)
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | engine_env("vllm", {}, 1, {}) | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert ("the same" in done.stdout) == mend, done.stderr
        if not mend:
            assert re.search("must match the size|other values", done.stderr), done.stderr
