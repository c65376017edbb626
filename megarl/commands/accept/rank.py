"""One rank process of a stage: the device and the process group of a trainer, without its model."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch

from megarl import platform as platforms
from megarl.cluster.key_value_store import join_ranks
from megarl.commands.accept.ranks import COLLECTIVE_SECONDS


class Rank:
    """A process that starts like `megarl.trainer.worker.Worker`: it prepares the platform before importing Megatron."""

    def __init__(self, device: str, deterministic: bool = False) -> None:
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.platform = platforms.select(device)
        self.platform.prepare()
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        torch.use_deterministic_algorithms(deterministic)
        self.platform.set_device(int(os.environ["LOCAL_RANK"]))
        join_ranks(self.platform.process_group_backend, timedelta(seconds=COLLECTIVE_SECONDS))

    def describe(self) -> dict[str, Any]:
        """Return host, process and device of this rank."""
        return {"host": socket.gethostname(), "pid": os.getpid(), "device": self.platform.device_name()}


def forget_model() -> None:
    """Reset Megatron's layout and its environment variables for attention, so that another model can be built."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)
