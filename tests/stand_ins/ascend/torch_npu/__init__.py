"""The part of torch_npu that megarl calls, with torch_npu's parameters (tests/platform/test_npu.py compares with its source),
and a list of calls. Importing it defines `torch.npu`, as importing torch_npu does."""

import sys
from types import SimpleNamespace

import torch

called: list[str] = ["import torch_npu"]


def set_device(device):
    called.append(f"set_device({device})")


def current_device():
    return 0


def get_device_name(device_name=None):
    return "Ascend910B1"


def empty_cache():
    called.append("empty_cache()")


def max_memory_allocated(device=None):
    return 3 * 2**30


npu = SimpleNamespace(
    set_device=set_device,
    current_device=current_device,
    get_device_name=get_device_name,
    empty_cache=empty_cache,
    max_memory_allocated=max_memory_allocated,
)
torch.npu = npu
called.extend(f"imported before: {name}" for name in ("mindspeed", "megatron.core") if name in sys.modules)
