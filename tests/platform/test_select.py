"""Selection of a platform, and the patches of the CPU platform."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from dataclasses import replace
from typing import get_args

import pytest

from megarl import platform
from megarl.platform.cpu import CPUPlatform
from megarl.platform.cuda import CUDAPlatform
from megarl.platform.cuda_kind import installation_notices
from megarl.platform.device_kind import DeviceKind
from megarl.platform.kinds import KINDS, DeviceName
from megarl.preflight.environment import environment_notices
from megarl.recipe.schema import Recipe


def _here(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """The CPU, and devices of these kinds, are on this machine."""
    monkeypatch.setattr(DeviceKind, "is_here", lambda kind: kind.name in ("cpu", *names))


def test_absent_devices_are_refused_with_the_missing_part(monkeypatch: pytest.MonkeyPatch) -> None:
    _here(monkeypatch)
    with pytest.raises(ValueError, match="torch_npu is not installed"):
        platform.select("npu")
    with pytest.raises(ValueError, match=r"torch\.cuda\.is_available\(\) is False"):
        platform.select("cuda")
    with pytest.raises(ValueError, match=r"'tpu'.*auto, cpu, cuda or npu"):
        platform.select("tpu")
    assert platform.select("auto").name == "cpu"


def test_auto_prefers_npu_then_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    _here(monkeypatch, "npu", "cuda")
    chosen = platform.select()
    assert (chosen.name, chosen.process_group_backend, chosen.kind.ray_resource) == ("npu", "cpu:gloo,npu:hccl", "NPU")
    assert "PYTORCH_NPU_ALLOC_CONF" in chosen.trainer_env(600)
    assert chosen.trainer_env(7200.5)["HCCL_EXEC_TIMEOUT"] == "7201", "collectives time out when the recipe says"
    assert "True" not in chosen.rollout_env()["PYTORCH_NPU_ALLOC_CONF"], "sleep mode refuses expandable segments"
    _here(monkeypatch, "cuda")
    assert platform.select().name == "cuda"


def test_the_recipe_accepts_the_names_of_all_device_kinds() -> None:
    assert set(get_args(DeviceName)) == {"auto", *(kind.name for kind in KINDS)}
    assert {kind.name for kind in KINDS} == {kind.platform().name for kind in KINDS}


def test_cpu_platform_answers_cuda_calls() -> None:
    """In a separate process, because the patches of `prepare` are permanent."""
    code = """
import sys
from megarl.platform import select
assert "torch" not in sys.modules, "the command line imports megarl.platform: no torch at import"
cpu = select("cpu"); cpu.prepare(); cpu.prepare()
import torch
assert torch.zeros(2, device="cuda").device.type == "cpu"
assert torch.zeros(2).to("cuda").cuda().pin_memory().device.type == "cpu"
assert torch.zeros(2).to(torch.float64).dtype == torch.float64
assert torch.zeros(2, device=torch.cuda.current_device()).type() == "torch.cuda.FloatTensor"
with torch.device("meta"):
    assert torch.zeros(2).device.type == "meta"
state = torch.cuda.get_rng_state(); a = torch.rand(3)
torch.cuda.set_rng_state(state); assert torch.equal(a, torch.rand(3))
torch.cuda.current_stream().wait_stream(torch.cuda.Stream()); torch.cuda.Event().record()
assert 0.01 < cpu.peak_memory() < 100 and not cpu.can_offload and cpu.device().type == "cpu" and cpu.uses_native_layers
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_an_environment_without_transformer_engine_has_a_notice_with_the_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"vllm": "0.34.1"}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    missing, vllm = installation_notices()
    assert "1.2 to 2 times as long" in missing and "estimated, not measured" in missing
    assert vllm.startswith("vllm 0.34.1 is untested: this version of megarl supports >=0.32,<0.34")
    versions |= {"vllm": "0.33.0", "transformer-engine": "2.11.0"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert installation_notices() == []
    versions["transformer-engine"] = "2.12.0"
    (engine,) = installation_notices()
    assert engine.startswith("transformer-engine 2.12.0 is untested: megatron-core 0.16.1 requires >=2.9,<2.12")


def test_a_start_on_gpus_has_notices_of_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, lacking = Recipe(), ["Transformer Engine is not installed: ..."]
    monkeypatch.setattr(CUDAPlatform, "kind", replace(CUDAPlatform.kind, installation_notices=lambda: lacking))
    assert environment_notices(recipe, CUDAPlatform())[:1] == lacking
    assert environment_notices(recipe, CPUPlatform()) == []
