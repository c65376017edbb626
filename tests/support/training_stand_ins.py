"""Stand-ins for the trainers, the source of samples and the saver of a training loop."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megarl.checkpoint.folder import checkpoint_name
from megarl.platform.load import MachineLoad
from megarl.rollout.source import Batch
from megarl.types import Group, InlineData, Sample, SampleTokens, Shard, fetch


class Workers:
    """Stand-in trainers: the gradient norm of step s is ``norms[s - 1]``, then 1. A list has the norms of a step's updates.

    After `skip_spikes` they skip norms above 100.
    """

    size, kept = 1, False
    highest = math.inf

    def __init__(
        self, role: str, norms: Sequence[float | list[float]], calls: list[tuple[Any, ...]] | None = None
    ) -> None:
        self.role, self.norms = role, iter(norms)
        self.calls = calls if calls is not None else []  # method names and arguments

    def _note(self, method: str, arguments: tuple[Any, ...]) -> None:
        plain = [
            None if isinstance(argument, Shard) else argument for argument in arguments
        ]  # a Shard would keep the batch alive
        self.calls.append((f"{self.role}.{method}", *plain))

    def call(self, method: str, *args: Any) -> list[Any]:
        if method == "describe":
            return [{"dp_rank": 0, "dp_size": 1, "reports": True}]
        if method == "machine_load":
            return [MachineLoad("stand-in", {"cpu": 0.5})]
        self._note(method, args)
        if method == "compute_kl":
            return [{0: 2.0, 1: 0.0}]
        if method == "take_recorded_tokens":
            return [{}, {0: {"entropy": np.arange(5.0)}}]
        if method == "compute_reference_log_probs":
            return [0]
        if method == "skip_spikes":
            self.highest = 100.0
        if method not in ("update_actor", "update_critic"):
            return [None]
        norms = next(self.norms, 1.0)
        kl = {"actor/kl": 1 / 3} if self.role == "actor" else {}
        of_step = [
            {
                f"{self.role}/grad_norm": norm,
                f"{self.role}/lr": 0.1,
                f"{self.role}/skipped_updates": float(not math.isfinite(norm) or norm > self.highest),
                **kl,
                "perf/max_memory_allocated_gb": 1.0,
            }
            for norm in (norms if isinstance(norms, list) else [norms])
        ]
        return [None, of_step]

    def scatter(self, method: str, per_rank: list[tuple[Any, ...]]) -> list[Any]:
        self._note(method, per_rank[0])
        if method == "load_shard":
            self.texts = [vectors.text for vectors in fetch(per_rank[0][0].samples)]
        return [None]

    def scatter_with_data(self, method: str, per_rank: list[Any], parts: int) -> list[Any]:
        self._note(method, per_rank[0])
        return [(None, [InlineData([])] * parts)]


class Source:
    """Batches of one group, none in the steps of ``without``. Remembers their vectors weakly."""

    def __init__(self, without: tuple[int, ...] = ()) -> None:
        self.without, self.taken, self.alive = without, 0, lambda: None

    def take(self, count: int) -> Batch:
        self.taken += 1
        if self.taken in self.without:
            return Batch([])
        data = InlineData([SampleTokens(None, None, None)] * 2)  # type: ignore[arg-type]
        self.alive = weakref.ref(data)
        samples = [Sample(self.taken, i, data, 2, 3, 3, reward=i) for i in range(2)]
        return Batch([Group(self.taken, "row", "test", samples)])

    def admit(self, version: int) -> None:
        assert self.alive() is None, "the last batch is still held when the next is sampled"

    def drain(self) -> None:
        gc.collect()
        assert self.alive() is None, "the batch is still held when weights are synced, and it is evaluated"

    def state(self, *, interrupted: bool = False) -> dict[str, Any]:
        return {"interrupted": interrupted}

    def close(self) -> None: ...


class Saver:
    """Stand-in saver: writes empty folders and keeps two."""

    pending = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, step: int, state: dict[str, Any]) -> dict[str, float]:
        self.state = state
        (self.folder / checkpoint_name(step)).mkdir(parents=True)
        for old in sorted(self.folder.iterdir())[:-2]:
            old.rmdir()
        return {}

    def poll(self, *, wait: bool = False) -> dict[str, float]:
        return {}

    def rescue(self, *, wait: bool) -> None: ...
