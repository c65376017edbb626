"""Checkpoints: Megatron's distributed format for weights and optimizer, a file a rank for random states."""

from __future__ import annotations

import contextlib
import json
import queue
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel

from megarl.durable import sync
from megarl.megatron.model import Model

_STATE_FILE = "trainer_state.json"


def save(directory: Path, model: Model, optimizer: Any, *, step: int, layout: dict[str, int]) -> None:
    """Write weights, optimizer, optimizer step and random states under `directory`. All ranks together.

    `layout` names the sizes that the processes are laid out in; `load` compares them.
    """
    _write_within_process()
    rank = torch.distributed.get_rank()
    if rank == 0:
        (directory / "state").mkdir(parents=True, exist_ok=True)
        (directory / "random").mkdir(exist_ok=True)
    torch.distributed.barrier()
    dist_checkpointing.save(_sharded_state(model, optimizer, loading=False), str(directory / "state"))
    with _durable(directory / "random" / f"rank_{rank:05d}.pt") as file:
        torch.save(_random_states(), file)
    torch.distributed.barrier()
    if rank == 0:
        with _durable(directory / _STATE_FILE) as file:
            file.write(json.dumps({"step": step, "layout": layout}).encode())
        for path in (*directory.rglob("*"), directory):  # folders, and files that Megatron only writes
            sync(path)
    torch.distributed.barrier()


def load(directory: Path, model: Model, optimizer: Any, *, layout: dict[str, int]) -> int:
    """Read what `save` wrote; returns the optimizer step. All ranks together.

    Raises ValueError where there is no checkpoint, and where it was written in another layout: random
    states belong to ranks, so a run only goes on as it was in the layout it was in.
    """
    file = directory / _STATE_FILE
    if not file.is_file():
        raise ValueError(f"{directory} holds no trainer checkpoint: {_STATE_FILE} is missing.")
    saved = json.loads(file.read_text())
    if saved["layout"] != layout:
        changed = {k: (saved["layout"].get(k), v) for k, v in layout.items() if saved["layout"].get(k) != v}
        said = ", ".join(f"{name}: {old} then, {new} now" for name, (old, new) in changed.items())
        raise ValueError(
            f"The checkpoint {directory} was written in another layout ({said}). Resume with the layout it was written "
            "in, or start a new run from exported weights."
        )
    state = dist_checkpointing.load(_sharded_state(model, optimizer, loading=True), str(directory / "state"))
    with torch.no_grad():
        for i, chunk in enumerate(model.chunks):
            chunk.module.load_state_dict(state[f"model{i}"], strict=True)
        optimizer.load_state_dict(state["optimizer"])
    path = directory / "random" / f"rank_{torch.distributed.get_rank():05d}.pt"
    _set_random_states(torch.load(path, weights_only=True))
    return int(saved["step"])


@contextlib.contextmanager
def _durable(path: Path) -> Iterator[BinaryIO]:
    """A file to write that is on the disk at the end: a power loss after the save leaves it whole."""
    with path.open("wb") as file:
        yield file
    sync(path)


def _sharded_state(model: Model, optimizer: Any, *, loading: bool) -> dict[str, Any]:
    metadata = {
        # Megatron's default format is refused by its own strategy for torch's distributed checkpoints.
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    state = {f"model{i}": chunk.module.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(model.chunks)}
    weights = {"model": state["model0"]} if len(model.chunks) == 1 else dict(state)
    state["optimizer"] = optimizer.sharded_state_dict(weights, is_loading=loading, metadata=metadata)
    return state


def _random_states() -> dict[str, Any]:
    """Every generator's state, as tensors and plain values, so that reading it executes nothing."""
    version, internal, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=True)
    return {
        "python": [version, list(internal), gauss],
        "numpy": [numpy_state[0], torch.from_numpy(numpy_state[1].astype(np.int64)), *numpy_state[2:]],
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state().cpu(),
        "megatron": dict(tensor_parallel.get_cuda_rng_tracker().get_states()),
    }


def _set_random_states(states: dict[str, Any]) -> None:
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    torch.cuda.set_rng_state(states["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["megatron"])


def _write_within_process() -> None:
    """Let Megatron's writer use threads of this process.

    It forks writers and spawns a manager for their results, made for saving beside training. We wait for
    the file anyway; a spawned manager would import the main module again, and a fork of a process with
    running threads (collectives, Ray) may hang.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    writer = filesystem_async.FileSystemWriterAsync
    if writer.write_preloaded_data_multiproc is _write_buckets:
        return
    results: queue.Queue[Any] = queue.Queue()
    filesystem_async._get_write_results_queue = lambda: results
    writer.write_preloaded_data_multiproc = staticmethod(_write_buckets)


def _write_buckets(transforms: Any, use_msc: bool, rank: int, buckets: list[Any], results: queue.Queue[Any]) -> None:
    """Write each bucket to its file; puts {bucket number: what was written} or the first exception."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    written: queue.Queue[Any] = queue.Queue()

    def write(number: int) -> None:
        pending: queue.Queue[int] = queue.Queue()
        pending.put(number)
        FileSystemWriterAsync.write_preloaded_data(
            transforms, number, buckets[number], written, pending, use_fsync=True, use_msc=use_msc
        )

    with ThreadPoolExecutor(max(1, len(buckets))) as pool:
        list(pool.map(write, range(len(buckets))))
    outcome: dict[int, Any] = dict(written.get() for _ in buckets)
    failures = [result for result in outcome.values() if isinstance(result, Exception)]
    results.put(failures[0] if failures else outcome)
