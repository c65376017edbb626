"""A trainer's part of a checkpoint: a file of tensors a rank, random states, and a receipt that says it is done.

Files are independent of the layout (see `pieces`), so any layout reads what any other has written.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import shutil
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel

from megarl.atomic_files import sync, write_durably
from megarl.checkpoint.manifest import FileSum, file_sum
from megarl.megatron.checkpoint_shards import pieces_to_load, pieces_to_save, set_updates, updates
from megarl.megatron.model import Model, seed_everything
from megarl.megatron.tensor_files import Piece, TensorFiles, write

_STATE_FILE = "trainer_state.json"


def tensor_file(rank: int) -> str:
    return f"tensors_{rank:05d}.safetensors"


def random_file(rank: int) -> str:
    return f"random_{rank:05d}.pt"


def receipt_file(rank: int) -> str:
    return f"receipt_{rank:05d}.json"


class Save:
    """This rank's part of a checkpoint, on its way to the disk.

    Made by all ranks together. With `copy`, the tensors are copied to the host's memory here and may change
    afterwards; otherwise they are read while they are written, and must stay as they are until `wait`.
    """

    def __init__(
        self, directory: Path, model: Model, optimizer: Any, *, step: int, layout: dict[str, int], copy: bool
    ) -> None:
        self.directory, self.rank = directory, dist.get_rank()
        self.receipt = directory / receipt_file(self.rank)  # appears, whole, when everything else is on the disk
        count = torch.tensor(updates(optimizer), device=torch.cuda.current_device())
        dist.all_reduce(count, op=dist.ReduceOp.MAX)  # a rank may hold no moments at all
        self._state = {"step": step, "updates": int(count), "layout": layout}
        pieces = list(pieces_to_save(model, optimizer))
        self._pieces = [_copied(piece) for piece in pieces] if copy else pieces
        self._random = _random_states()
        self.bytes = sum(piece.tensor.nbytes for piece in pieces)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)

    def start(self) -> None:
        """Write, in a thread: file system and checksums both work beside Python."""
        self._thread.start()

    def done(self) -> bool:
        """Whether everything of this rank is on the disk. Raises what writing failed of."""
        if self._thread.is_alive():
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Return once everything of this rank is on the disk. Raises what writing failed of."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        began = time.perf_counter()
        try:
            files = self._write()
        except OSError as error:
            (self.directory / tensor_file(self.rank)).unlink(missing_ok=True)  # room for others, and for the receipt
            self._error = _failed_write(self.directory, self.bytes, error)
        except BaseException as error:  # noqa: BLE001 -- raised to whoever asks
            self._error = error
        if self._error is not None:
            self._write_receipt({"error": str(self._error)})
            return
        elements = Counter[str]()
        for piece in self._pieces:
            elements[piece.name] += piece.tensor.numel()
        tensors = {piece.name: [elements[piece.name], math.prod(piece.whole)] for piece in self._pieces}
        seconds = time.perf_counter() - began
        self._pieces = []
        self._write_receipt({"files": files, "tensors": tensors, "seconds": seconds})

    def _write(self) -> dict[str, FileSum]:
        """Sums of the files, by name."""
        self.directory.mkdir(parents=True, exist_ok=True)
        files = {tensor_file(self.rank): write(self.directory / tensor_file(self.rank), self._pieces)}
        with (self.directory / random_file(self.rank)).open("wb") as file:
            torch.save(self._random, file)
        sync(self.directory / random_file(self.rank))
        own = [random_file(self.rank)]
        if self.rank == 0:
            write_durably(self.directory / _STATE_FILE, json.dumps(self._state).encode())
            own.append(_STATE_FILE)
        return files | {name: file_sum(self.directory / name) for name in own}

    def _write_receipt(self, receipt: dict[str, Any]) -> None:
        """Whole at once: whoever waits for it may look at any moment."""
        partial = self.receipt.with_suffix(".partial")
        try:
            write_durably(partial, json.dumps(receipt).encode())
            partial.rename(self.receipt)
        except OSError as error:
            self._error = self._error or _failed_write(self.directory, self.bytes, error)


def load(directory: Path, model: Model, optimizer: Any, *, layout: dict[str, int], seed: int) -> tuple[int, str | None]:
    """Read what `Save` wrote, in whatever layout. All ranks together.

    Returns the optimizer step, and a notice where the run does not go on to the last bit: random states belong
    to ranks, so in another layout they are seeded anew, from `seed` and the step. Raises ValueError where there
    is no checkpoint, or that of another model.
    """
    saved = _fill(directory, model, optimizer)
    set_updates(optimizer, saved["updates"])
    changed = {name: (saved["layout"].get(name), size) for name, size in layout.items()}
    changed = {name: sizes for name, sizes in changed.items() if sizes[0] != sizes[1]}
    if not set(changed) - {"distributed_optimizer"}:
        _set_random_states(torch.load(directory / random_file(dist.get_rank()), weights_only=True))
        return int(saved["step"]), None
    seed_everything((seed + 1_000_003 * (saved["step"] + 1)) % 2**31)
    said = ", ".join(f"{name} {before} -> {now}" for name, (before, now) in changed.items())
    return int(saved["step"]), (
        f"the checkpoint was written in another layout ({said}): weights and optimizer are taken over exactly, random "
        f"states are seeded anew from train.seed and the step, and sums over devices round differently from here on"
    )


def load_weights(directory: Path, model: Model) -> None:
    """Read the weights alone of what `Save` wrote, in whatever layout. Raises ValueError as `load` does."""
    _fill(directory, model, None)


def _fill(directory: Path, model: Model, optimizer: Any) -> dict[str, Any]:
    """Fill model and optimizer (None: there is none) with a checkpoint's tensors; returns its state."""
    file = directory / _STATE_FILE
    if not file.is_file():
        raise ValueError(f"{directory} holds no trainer checkpoint: {_STATE_FILE} is missing.")
    files = TensorFiles(directory)
    with torch.no_grad():
        for piece in pieces_to_load(model, optimizer):
            files.fill(piece)
    return json.loads(file.read_text())


def _copied(piece: Piece) -> Piece:
    return dataclasses.replace(piece, tensor=piece.tensor.detach().to("cpu", copy=True))


def _failed_write(directory: Path, needed: int, error: OSError) -> RuntimeError:
    free = shutil.disk_usage(next(path for path in (directory, *directory.parents) if path.exists())).free
    return RuntimeError(
        f"writing to {directory} failed: {error.strerror or error}. This rank's part needs {needed} bytes, and the disk "
        f"has {free} free."
    )


def _random_states() -> dict[str, Any]:
    """Every generator's state, as tensors and plain values, so that reading it executes nothing."""
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
