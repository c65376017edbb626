"""One trainer rank of test_planned_live.py: does what the test says, over a store, until it says "end".

Usage, with the environment of torchrun: python -m tests.planned_trainer CASE.json STORE_PORT
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tests.megatron_worker import build, platform

import torch  # isort: skip
import torch.distributed as dist  # isort: skip


class Trainer:
    def __init__(self, case: dict[str, Any]) -> None:
        self.trainer = build(case)
        self.rank = dist.get_rank()
        self.planned: Any = None
        self.exporting: Any = None

    def open_planned(self, receivers: list[Any], options: dict[str, Any]) -> Any:
        from megarl.config.schema import ExchangeConfig
        from megarl.megatron.planned_weights import open_sender

        if self.planned is not None:
            self.planned.close()
        exchange = ExchangeConfig(**options)
        self.planned = open_sender(self.trainer.model, exchange, [tuple(one) for one in receivers], "127.0.0.1")
        assert not isinstance(self.planned, str), self.planned
        return self.planned.session

    def open_export(self, receivers: list[Any]) -> Any:
        from megarl.exchange.sender import WeightSender

        if self.rank == 0:
            pairs = [tuple(one) for one in receivers]
            self.exporting = WeightSender.open("127.0.0.1", pairs, bucket_bytes=1 << 18, timeout=60.0)
        return self.exporting and self.exporting.session

    def change(self, seed: int) -> None:
        """Weights that no two versions have in common, and that all ranks change alike."""
        with torch.no_grad():
            for weight in self.trainer._weights():
                weight.mul_(1.0 + 0.01 * seed).add_(0.001 * seed)

    def break_one(self) -> None:
        """What a wrong plan would look like: the export sees other values than are sent."""
        export = self.trainer.export_weights

        def wrong() -> Any:
            for name, weight in export():
                yield name, weight + 1 if name.endswith("layers.1.input_layernorm.weight") else weight

        self.trainer.export_weights = wrong

    def send_planned(self, version: int) -> Any:
        return self.planned.send(version, self.trainer.export_weights)

    def send_export(self, version: int) -> Any:
        weights = self.trainer.export_weights()
        if self.exporting is not None:
            return self.exporting.send(version, weights)
        for _ in weights:
            pass
        return None

    def send_and_die(self, version: int) -> Any:
        """The last rank dies when it has packed its first bucket."""
        if self.rank == dist.get_world_size() - 1:
            self.planned._outbox.send = lambda *_: os._exit(9)
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
        except BaseException as error:  # noqa: BLE001 -- told to the test
            traceback.print_exc()
            answer = (f"{type(error).__name__}: {error}", None)
        store.set(f"answer/{number}/{rank}", pickle.dumps(answer))
        number += 1
    os._exit(0)


if __name__ == "__main__":
    main()
