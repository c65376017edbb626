"""Faults in the processes of a stage, as from a wrong library, link or engine. Each changes a module of megarl."""

from __future__ import annotations

import os
import time
from typing import Any, ClassVar


def late_collective(module: Any) -> None:
    """Rank 1 takes its time before every all_reduce."""

    class Late(module.CollectiveRank):
        def __init__(self, device: str) -> None:
            super().__init__(device)
            import torch.distributed as dist

            original = dist.all_reduce

            def all_reduce(*args: Any, **named: Any) -> Any:
                if self.rank == 1:
                    time.sleep(0.8)
                return original(*args, **named)

            dist.all_reduce = all_reduce

    Late.__name__ = "CollectiveRank"
    module.CollectiveRank = Late


def wrong_gather(module: Any) -> None:
    """Rank 0 receives one wrong number."""

    class Wrong(module.CollectiveRank):
        def __init__(self, device: str) -> None:
            super().__init__(device)
            import torch.distributed as dist

            original = dist.all_gather_into_tensor

            def gather(output: Any, *args: Any, **named: Any) -> Any:
                work = original(output, *args, **named)
                work.wait()
                if self.rank == 0:
                    output[-1] += 1
                return work

            dist.all_gather_into_tensor = gather

    Wrong.__name__ = "CollectiveRank"
    module.CollectiveRank = Wrong


def absent_rank(module: Any) -> None:
    """Rank 1 never enters the collectives of the tensor-parallel group."""

    class Absent(module.CollectiveRank):
        def collectives(self, name: str, elements: int) -> Any:
            if self.rank == 1 and name == "tensor":
                time.sleep(600)
            return super().collectives(name, elements)

    Absent.__name__ = "CollectiveRank"
    module.CollectiveRank = Absent


def leaking_sleep(module: Any) -> None:
    """An engine that can sleep, and keeps 40 MiB of the host's memory with every sleep."""
    import numpy as np

    class Leaking(module.EngineProbe):
        kept: ClassVar[list[Any]] = []

        async def start(self) -> dict[str, Any]:
            return await self.__getattr__("start")() | {"can_sleep": True}

        async def sleep(self) -> None:
            self.kept.append(np.ones(5 << 20))

        async def wake(self, tags: Any = None) -> None:
            return None

    Leaking.__name__ = "EngineProbe"
    module.EngineProbe = Leaking


def other_temperature(module: Any) -> None:
    """The engine reports log-probs of another distribution than it samples from."""

    class Hot(module.EngineProbe):
        async def generate(self, requests: Any) -> Any:
            import dataclasses

            sampled = await super().generate(requests)
            return [dataclasses.replace(sample, log_probs=sample.log_probs * 1.02) for sample in sampled]

    Hot.__name__ = "EngineProbe"
    module.EngineProbe = Hot


def corrupted_bucket(module: Any) -> None:
    """Flip one bit of every bucket on its way into the engine's process; trainers are unchanged."""
    if "RANK" in os.environ:
        return
    original = module.Fingerprinter.streaming

    def flipped(self: Any, memory: Any) -> Any:
        changed = memory.clone()
        changed[len(changed) // 2] ^= 8
        return original(self, changed)

    module.Fingerprinter.streaming = flipped


def unmappable_memory(module: Any) -> None:
    """A container that lets no process map another's device memory."""

    def refused(self: Any, handle: Any) -> Any:
        raise RuntimeError("pidfd_getfd: Operation not permitted")

    module.CPUPlatform.open_shared = refused


def old_weights(module: Any) -> None:
    """Trainers change their weights after sending them, so engines sample from older ones."""

    class Hasty(module.WeightSyncRank):
        def send_weights(self, version: int) -> Any:
            report = super().send_weights(version)
            self.change(10)
            return report

    Hasty.__name__ = "WeightSyncRank"
    module.WeightSyncRank = Hasty
