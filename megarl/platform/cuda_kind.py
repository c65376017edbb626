"""NVIDIA GPUs, as `DeviceKind` has them. The set of versions is the extra of setup.cfg."""

from __future__ import annotations

from megarl.checks.versions import VersionSet
from megarl.platform.device_kind import DeviceKind

CUDA = DeviceKind(
    name="cuda",
    plural="GPUs",
    implementation="megarl.platform.cuda:CUDAPlatform",
    collective="NCCL",
    ddp={"overlap_grad_reduce": True, "overlap_param_gather": True},
    ray_resource="GPU",
    visible="CUDA_VISIBLE_DEVICES",
    files="/dev/nvidia[0-9]*",
    torch_api="cuda",
    present="torch.cuda.is_available()",
    absent="torch.cuda.is_available() is False",
    install="install a CUDA build of torch",
    checks="megarl.platform.cuda_checks",
    interface_variables={"NCCL_SOCKET_IFNAME": False},
    status_command="nvidia-smi",
    status_commands=(("nvidia-smi",), ("nvidia-smi", "topo", "-m")),
    environment=("CUBLAS_", "CUDA_", "NCCL_", "NVIDIA_", "NVTE_"),
    pass_in="--gpus all",
    sets=(
        VersionSet(
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
        ),
    ),
)
