"""The recipe's section `weight_sync`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Optional

from megarl.recipe.key import key


@dataclass
class WeightSyncConfig:
    """Weight sync, from the trainers to the engines."""

    route: Literal["full", "sharded", "auto"] = key(
        "auto",
        "sharded: every trainer rank sends the slices that engine ranks need, once (vLLM only, without adapters). full: all trainer ranks gather the model, and rank 0 sends all of it once to each host with engines. auto: sharded if recipe, model and engines allow it, else full; a notice at the start gives the choice and the reason.",
    )
    check_every: int = key(
        0,
        "Sharded and adapter-only sync: verify the first update, and each update that follows it by a multiple of this number, against the export, tensor by tensor. 0: only the first.",
        at_least=0,
    )
    adapters: Literal["auto", "only", "merged"] = key(
        "auto",
        "With `lora.rank` above 0. only: engines receive the model's weights once and then only adapters, which they apply unmerged. merged: engines receive full weights with merged adapters at every update. auto: only if the engines support adapters, else merged; a notice at the start gives the choice and the reason.",
    )
    transport: Literal["auto", "shared_memory", "ipc", "collective", "device", "files"] = key(
        "auto",
        "auto: shared memory for engines on the sending trainer's host, gloo for all others. collective: gloo for all engines. ipc: like auto, but sharded slices stay in the trainers' device memory, which engines on the same host map. device: sharded slices go from device memory to device memory over the devices' collective library; requires disaggregated engines. files: full tensors, as safetensors in `weight_sync.directory`, which keeps the last two versions for inspection; slow, and only with full weight sync.",
    )
    directory: Optional[str] = key(
        None,
        "With transport files: directory for the weights, on a file system that trainers and engines share. megarl adds a folder with the run's name. Unset: `weight_sync` in the run's directory.",
    )
    bucket_mb: int = key(
        64,
        "Bucket size in MiB. A larger tensor gets a separate bucket. With sharded sync a rank holds at most four buckets, and larger tensors are split.",
        at_least=1,
    )
    timeout: float = key(
        600.0,
        "Seconds without a response from a peer after which the update, or the connection for it, fails.",
        above=0,
    )
    silence: float = key(
        30.0,
        "Heartbeat timeout in seconds. A rank without a heartbeat for this long during an update counts as stopped, or its machine or network as down; the end of a process is noticed at once. Each rank sends a heartbeat per second from a separate thread. Raise the value if machines swap or are paused. Must be below `weight_sync.timeout`.",
        at_least=3,
    )
