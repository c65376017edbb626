"""DeviceKind of NVIDIA GPUs. The version set equals the extra in setup.cfg; launch/requirements-cuda.txt pins one version."""

from __future__ import annotations

from megarl.platform import transformer_engine
from megarl.platform.device_kind import DeviceKind
from megarl.platform.version_sets import VersionSet, meets, version_of

WITHOUT_TRANSFORMER_ENGINE = (
    "Transformer Engine is not installed: trainers use megarl's native layers on torch's kernels. Their passes are "
    "expected to take 1.2 to 2 times as long, longest for mixture-of-experts models (estimated, not measured). See "
    "docs/cuda.md for its installation"
)


def installation_notices() -> list[str]:
    """Notices about packages of the CUDA set that are missing or have untested versions, with the cost."""
    notices = []
    if not transformer_engine.is_importable():
        notices.append(WITHOUT_TRANSFORMER_ENGINE)
    elif (version := transformer_engine.version_of_whole()) and (problem := transformer_engine.problem_of(version)):
        notices.append(problem)
    tested = CUDA.sets[0].packages["vllm"]
    version = version_of("vllm")
    if version is not None and not meets(version, tested):
        notices.append(f"vllm {version} is untested: this version of megarl supports {tested}")
    return notices


CUDA = DeviceKind(
    name="cuda",
    plural="GPUs",
    implementation="megarl.platform.cuda:CUDAPlatform",
    collective="NCCL",
    flight_recorder="torch._C._distributed_c10d._dump_nccl_trace_json",  # absent from torch's builds without NCCL
    ddp={"overlap_grad_reduce": True, "overlap_param_gather": True},
    seeds_cost="a Python loop over requests in every decode step, where vLLM uses its Model Runner V1 (V2, its default, has none)",
    ray_resource="GPU",
    deterministic_cumsum=False,  # docstring of torch.use_deterministic_algorithms
    visible="CUDA_VISIBLE_DEVICES",
    files="/dev/nvidia[0-9]*",
    torch_api="cuda",
    present="torch.cuda.is_available()",
    absent="torch.cuda.is_available() is False",
    install="install a CUDA build of torch",
    installation_notices=installation_notices,
    checks="megarl.commands.doctor.cuda_checks",
    interface_variables={"NCCL_SOCKET_IFNAME": False},
    status_command="nvidia-smi",
    status_commands=(
        ("nvidia-smi",),
        ("nvidia-smi", "topo", "-m"),
        ("nvidia-smi", "nvlink", "--status"),
        ("nvidia-smi", "-q"),
    ),
    environment=("CUBLAS_", "CUDA_", "NCCL_", "NVIDIA_", "NVTE_"),
    pass_in="--gpus all",
    sets=(
        VersionSet(
            "CUDA",
            "cuda",
            ("3.12",),
            {
                "torch": ">=2.13,<2.15",
                "transformers": ">=5.16.1,<5.21",
                "vllm": ">=0.32,<0.34",
                "megatron-core": "==0.16.1",
                "mbridge": "==0.15.1",
                "ray": "==2.60.0",
            },
            install="pip install -r launch/requirements-cuda.txt",
            remark="vLLM 0.32 needs torch 2.13 and transformers below 5.20, 0.33 needs torch 2.14",
        ),
    ),
)
