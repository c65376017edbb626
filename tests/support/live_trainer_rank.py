"""One trainer rank of tests/weight_sync/test_sharded_live.py: executes the test's commands from a store until "end".

Usage, with the environment of torchrun: python -m tests.support.live_trainer_rank CASE.json STORE_PORT
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.megatron_training import build, platform

import numpy as np  # isort: skip
import torch  # isort: skip
from safetensors.torch import save_file  # isort: skip
from megarl.megatron.lora import attach, peft  # isort: skip
import torch.distributed as dist  # isort: skip

if TYPE_CHECKING:
    from megarl.weight_sync.sender import UpdatingRank
    from megarl.weight_sync.session import Session


class Trainer:
    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        self.trainer = build(case, weights_only=case["weights_only"])
        self.rank = dist.get_rank()
        self.sender: Any = None
        self.exporting: UpdatingRank | None = None
        self.adapting: UpdatingRank | None = None

    def rebuild(self, megatron: dict[str, Any], dtype: str) -> None:
        """The same model in another layout."""
        if self.sender is not None:
            self.sender.close()
        self.case |= {"megatron": megatron, "dtype": dtype}
        self.trainer, self.sender = None, None
        self.trainer = build(self.case)

    def open_planned(self, receivers: list[Any], options: dict[str, Any]) -> Any:
        from megarl.megatron.weight_sender import open_sender
        from megarl.recipe.schema import WeightSyncConfig

        if self.sender is not None:
            self.sender.close()
        weight_sync = WeightSyncConfig(**options)
        endpoints = [tuple(receiver) for receiver in receivers]
        self.sender = open_sender(self.trainer.model, weight_sync, endpoints, "127.0.0.1", "cpu")
        assert not isinstance(self.sender, str), self.sender
        return self.sender.session

    def open_export(self, receivers: list[Any], bucket_bytes: int = 1 << 18) -> Any:
        self.exporting, session = self._sender(receivers, None, bucket_bytes)
        return session

    def open_adapters(self, receivers: list[Any]) -> Any:
        self.adapting, session = self._sender(receivers, self.trainer.recipe.lora.alpha)
        self.based = False
        return session

    def _sender(
        self, receivers: list[Any], adapter_alpha: float | None, bucket_bytes: int = 1 << 18
    ) -> tuple[UpdatingRank, Session | None]:
        """Return this rank's part in full updates, and rank 0's session."""
        from megarl.weight_sync.full.sender import FullSender
        from megarl.weight_sync.sender import ExportingRank

        if self.rank != 0:
            return ExportingRank(), None
        pairs = [tuple(receiver) for receiver in receivers]
        sender = FullSender.open(
            "127.0.0.1",
            pairs,
            bucket_bytes=bucket_bytes,
            timeout=60.0,
            heartbeat_timeout=8.0,
            adapter_alpha=adapter_alpha,
        )
        return sender, sender.session

    def set_fingerprints(self, on: bool) -> None:
        from tests.support.without_fingerprints import set_fingerprints

        set_fingerprints(on)

    def change(self, seed: int) -> None:
        """Change all weights by version, equally on all ranks."""
        with torch.no_grad():
            for weight in self.trainer._offloader._weights():
                weight.mul_(1.0 + 0.01 * seed).add_(0.001 * seed)

    def learn(self, seed: int, size: float) -> None:
        """Change all adapters by version; ranks with slices of the same tensor stay consistent."""
        for number, adapter in enumerate(self.trainer.model.lora.adapters):
            cut = {"rows": "B", "columns": "A"}.get(adapter.site.cut)
            for kind, matrices in (("A", adapter.A), ("B", adapter.B)):
                shard = adapter.group.rank() if kind == cut else 0
                for part, matrix in enumerate(matrices.values()):
                    key = [seed, number, ord(kind), shard, part, *map(ord, adapter.site.parts[0].modules[0])]
                    values = np.random.default_rng(key).normal(0, size, matrix.shape)
                    matrix.data.copy_(torch.from_numpy(values))

    def write(self, file: str) -> None:
        """Write the merged weights."""
        tensors = {name: weight.detach().clone().contiguous() for name, weight in self.trainer.export_weights()}
        if self.rank == 0:
            save_file(tensors, file)

    def write_exact(self, file: str) -> None:
        """Write the merged weights of one process in float32, without rounding to the weights' type."""
        tensors = {name: weight.detach().float() for name, weight in self.trainer.export_adapters(with_base=True)}
        scale = self.trainer.recipe.lora.alpha / self.trainer.recipe.lora.rank
        for name in [name for name in tensors if name.endswith(".lora_A.weight")]:
            linear, a = name.removesuffix(".lora_A.weight"), tensors.pop(name)
            tensors[f"{linear}.weight"] = (
                tensors[f"{linear}.weight"] + tensors.pop(f"{linear}.lora_B.weight") @ a * scale
            )
        save_file(tensors, file)

    def mix_up(self) -> None:
        """Simulate a wrong split of a fused linear: swap k's and v's matrices."""
        lora, original = self.trainer.model.lora, attach.matrices

        def mixed(request: Any) -> Any:
            assert request is lora
            swap = {"k_proj": "v_proj", "v_proj": "k_proj"}
            for name, matrix in original(request):
                *place, linear, kind, end = name.split(".")
                yield ".".join([*place, swap.get(linear, linear), kind, end]), matrix

        peft.matrices = mixed

    def break_one(self) -> None:
        """Simulate a wrong plan: the export returns other values than are sent."""
        export = self.trainer.export_weights

        def wrong() -> Any:
            for name, weight in export():
                yield name, weight + 1 if name.endswith("layers.1.input_layernorm.weight") else weight

        self.trainer.export_weights = wrong

    def send_planned(self, version: int) -> Any:
        return self.sender.send(version, self.trainer.export_weights)

    def send_export(self, version: int) -> Any:
        return self.exporting.send(version, self.trainer.export_weights)

    def send_adapters(self, version: int, based: bool | None = None, check: bool = True) -> Any:
        """Send adapters. `based`: simulate a trainer that wrongly assumes that the engine has the base weights."""
        with_base = not (self.based if based is None else based)
        self.based = True
        return self.adapting.send(version, lambda: self.trainer.export_adapters(with_base=with_base, check=check))

    def send_and_die(self, version: int) -> Any:
        """Send an update in which the last rank dies after it packed its first bucket."""
        if self.rank == dist.get_world_size() - 1:
            self.sender._outgoing.send = lambda *_: os._exit(9)
        return self.send_planned(version)


def main() -> None:
    case, port = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    dist.init_process_group(platform.process_group_backend)
    store = dist.TCPStore("127.0.0.1", port, None, False)
    rank = int(os.environ["RANK"])
    trainer = Trainer(case)
    number = 0
    while True:
        while not store.check([f"call/{number}"]):
            time.sleep(0.005)
        method, arguments = pickle.loads(store.get(f"call/{number}"))  # noqa: S301 -- the test's own
        if method == "end":
            break
        try:
            answer = (None, getattr(trainer, method)(*arguments))
        except BaseException as error:  # noqa: BLE001 -- reported to the test
            traceback.print_exc()
            answer = (f"{type(error).__name__}: {error}", None)
        store.set(f"answer/{number}/{rank}", pickle.dumps(answer))
        number += 1
    os._exit(0)


if __name__ == "__main__":
    main()
