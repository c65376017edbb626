"""A rank's part of a trainer checkpoint: one tensor file, random states, and a receipt written last.

Files are independent of the layout (see shards.py): any layout reads the files of any other.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel

from megarl.atomic_files import DiskFullError, is_disk_full, sync, write_synced
from megarl.checkpoint.manifest import FileSum, file_sum
from megarl.megatron.checkpoint.shards import reference_to_load, set_updates, shards_to_load, shards_to_save, updates
from megarl.megatron.checkpoint.tensor_files import TensorFiles, write
from megarl.megatron.model.build import Model, seed_everything
from megarl.megatron.optimizer import loss_scale_of
from megarl.megatron.reference import ReferencePolicy

_STATE_FILE = "trainer_state.json"


def tensor_file(rank: int) -> str:
    return f"tensors_{rank:05d}.safetensors"


def random_file(rank: int) -> str:
    return f"random_{rank:05d}.pt"


class Save:
    """This rank's part of a checkpoint, staged for writing. It includes a refreshed `reference`, one with a step above 0.

    Collective. With `copy`, the tensors are copied to host memory here and may change afterwards; otherwise they are
    read while they are written and must not change until `wait` returns.
    """

    def __init__(
        self,
        directory: Path,
        model: Model,
        optimizer: Any,
        *,
        step: int,
        layout: dict[str, int],
        reference: ReferencePolicy | None,
        copy: bool,
    ) -> None:
        self.directory, self.rank = directory, dist.get_rank()
        # Renamed into place after everything else is on disk.
        self.receipt = directory / f"receipt_{self.rank:05d}.json"
        count = torch.tensor(updates(optimizer), device=torch.cuda.current_device())
        dist.all_reduce(count, op=dist.ReduceOp.MAX)  # a rank may hold no moments
        refreshed = reference if reference is not None and reference.step else None
        self._state = {
            "step": step,
            "updates": int(count),
            "layout": layout,
            "reference_step": refreshed.step if refreshed else 0,
        }
        if (scale := loss_scale_of(optimizer)) is not None:
            self._state["loss_scale"] = scale.state()
        shards = list(shards_to_save(model, optimizer, refreshed.tensors() if refreshed else {}))
        self._shards = shards
        if copy:
            self._shards = [replace(shard, tensor=shard.tensor.detach().to("cpu", copy=True)) for shard in shards]
        self._random = _random_states()
        self.bytes = sum(shard.tensor.nbytes for shard in shards)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)

    def start(self) -> None:
        """Write in a background thread; file I/O and checksums release the GIL."""
        self._thread.start()

    def done(self) -> bool:
        """Return whether this rank's part is on disk. Raises the error that stopped the writer."""
        if self._thread.is_alive():
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Block until this rank's part is on disk. Raises the error that stopped the writer."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Block until the writer, if it has started, has ended. Its result is not needed."""
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        began = time.perf_counter()
        try:
            files = self._write()
        except OSError as error:
            (self.directory / tensor_file(self.rank)).unlink(missing_ok=True)  # free space, also for the receipt
            self._error = _failed_write(self.directory, self.bytes, error)
        except BaseException as error:  # noqa: BLE001 -- re-raised by wait()
            self._error = error
        if self._error is not None:
            self._write_receipt({"error": str(self._error)})
            return
        elements = Counter[str]()
        for shard in self._shards:
            elements[shard.name] += shard.tensor.numel()
        tensors = {shard.name: [elements[shard.name], math.prod(shard.full_shape)] for shard in self._shards}
        seconds = time.perf_counter() - began
        self._shards = []
        self._write_receipt({"files": files, "tensors": tensors, "seconds": seconds})

    def _write(self) -> dict[str, FileSum]:
        """Write all files; return their size and checksum by name."""
        self.directory.mkdir(parents=True, exist_ok=True)
        files = {tensor_file(self.rank): write(self.directory / tensor_file(self.rank), self._shards)}
        with (self.directory / random_file(self.rank)).open("wb") as file:
            torch.save(self._random, file)
        sync(self.directory / random_file(self.rank))
        names = [random_file(self.rank)]
        if self.rank == 0:
            write_synced(self.directory / _STATE_FILE, json.dumps(self._state).encode())
            names.append(_STATE_FILE)
        return files | {name: file_sum(self.directory / name) for name in names}

    def _write_receipt(self, receipt: dict[str, Any]) -> None:
        """Write and rename: a poller never sees a partial receipt."""
        partial = self.receipt.with_suffix(".partial")
        try:
            write_synced(partial, json.dumps(receipt).encode())
            partial.rename(self.receipt)
        except OSError as error:
            self._error = self._error or _failed_write(self.directory, self.bytes, error)


def load(directory: Path, model: Model, optimizer: Any, *, layout: dict[str, int], seed: int) -> tuple[int, str | None]:
    """Read what `Save` wrote, in any layout. Collective.

    Returns the optimizer step, and a notice if the run does not continue bit-identically: random states are per rank,
    so in another layout they are re-seeded from `seed` and the step. Raises ValueError if `directory` has no
    checkpoint or the checkpoint of another model.
    """
    saved = _fill(directory, model, optimizer)
    set_updates(optimizer, saved["updates"])
    if (
        scale := loss_scale_of(optimizer)
    ) is not None and "loss_scale" in saved:  # a checkpoint in another dtype has none
        scale.restore(saved["loss_scale"])
    changed = {name: (saved["layout"].get(name), size) for name, size in layout.items()}
    changed = {name: sizes for name, sizes in changed.items() if sizes[0] != sizes[1]}
    if not set(changed) - {"distributed_optimizer"}:
        _set_random_states(torch.load(directory / random_file(dist.get_rank()), weights_only=True))
        return int(saved["step"]), None
    seed_everything((seed + 1_000_003 * (saved["step"] + 1)) % 2**31)
    changes = ", ".join(f"{name} {before} -> {now}" for name, (before, now) in changed.items())
    return int(saved["step"]), (
        f"the checkpoint was written in another layout ({changes}): weights and optimizer are loaded exactly, random "
        f"states are seeded anew from train.seed and the step, and sums over devices round differently from here on"
    )


def load_reference(directory: Path, model: Model, reference: ReferencePolicy) -> None:
    """Read the refreshed reference policy that `Save` wrote, in any layout. Without one, `reference` does not change.

    Collective.
    """
    saved = json.loads((directory / _STATE_FILE).read_text())
    step = int(saved.get("reference_step", 0))  # checkpoints of earlier versions have none
    if not step:
        return
    reference.keep(step)  # with adapters, nothing has been allocated yet
    files = TensorFiles(directory)
    for shard in reference_to_load(model, reference.tensors()):
        files.fill(shard)


def load_weights(directory: Path, model: Model) -> None:
    """Read only the weights that `Save` wrote, in any layout. Raises ValueError as `load` does."""
    _fill(directory, model, None)


def _fill(directory: Path, model: Model, optimizer: Any) -> dict[str, Any]:
    """Fill the model, and the optimizer unless None, from a checkpoint. Returns the saved trainer state."""
    file = directory / _STATE_FILE
    if not file.is_file():
        raise ValueError(f"{directory} holds no trainer checkpoint: {_STATE_FILE} is missing.")
    files = TensorFiles(directory)
    with torch.no_grad():
        for shard in shards_to_load(model, optimizer):
            files.fill(shard)
    return json.loads(file.read_text())


def _failed_write(directory: Path, needed: int, error: OSError) -> Exception:
    """Return the error of a failed write: a `DiskFullError` if the disk or quota is full."""
    free = shutil.disk_usage(next(path for path in (directory, *directory.parents) if path.exists())).free
    text = (
        f"writing to {directory} failed: {error.strerror or error}. This rank's part needs {needed} bytes, and the disk "
        f"has {free} free."
    )
    if not is_disk_full(error):
        return RuntimeError(text)
    return DiskFullError(
        f"{text} Earlier checkpoints are complete. Free some space (train.keep_checkpoints sets how many checkpoints are kept), and "
        "resume with train.resume=auto."
    )


def _random_states() -> dict[str, Any]:
    """Return the state of every random generator as tensors and plain values (loadable with weights_only)."""
    version, internal, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=True)
    return {
        "python": [version, list(internal), gauss],
        "numpy": [numpy_state[0], torch.from_numpy(numpy_state[1].astype(np.int64)), *numpy_state[2:]],
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state().cpu(),
        "megatron": {
            name: state.clone() for name, state in tensor_parallel.get_cuda_rng_tracker().get_states().items()
        },
    }


def _set_random_states(states: dict[str, Any]) -> None:
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    torch.cuda.set_rng_state(states["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["megatron"])
