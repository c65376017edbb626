"""The process of tests/megatron/test_device_reads.py: finds code that reads device values while a trainer computes.

The device is torch's "meta", which has no values, so that every read is detected at its call.

Usage: python -m tests.support.device_reads_worker CASES.json; prints {name of the case: [file:function, ...]}.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.commands.plan.meta_device import META, MetaPlatform, join

platform = MetaPlatform()
platform.prepare()

import torch  # noqa: E402

from megarl.commands.plan.count import activations, assumptions  # noqa: E402
from megarl.commands.plan.count.live_tensors import MemoryCounter  # noqa: E402
from megarl.commands.plan.count.workload import Workload  # noqa: E402
from megarl.megatron.trainer import PolicyTrainer  # noqa: E402
from tests.support.activations_cases import recipe_of  # noqa: E402

READS = ("tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")
READS: Reads
_ROOTS = ("/megarl/megatron/", "/megatron/core/", "/mbridge/")


class Reads:
    """Records the code that reads device tensors between `begin` and `end`."""

    def __init__(self) -> None:
        self.places: set[str] = set()
        self.on = False
        for name in READS:
            setattr(torch.Tensor, name, self._recording(getattr(torch.Tensor, name)))
        to = torch.Tensor.to

        def sent(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            result = to(tensor, *args, **kwargs)
            self._record(tensor, tensor.device == META and result.device.type == "cpu")
            return result

        torch.Tensor.to = sent  # type: ignore[assignment]

    def _recording(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self._record(tensor, tensor.device == META)
            return function(tensor, *args, **kwargs)

        return read

    def _record(self, tensor: torch.Tensor, read: bool) -> None:
        if self.on and read:
            frames = [f for f in traceback.extract_stack() if any(root in f.filename for root in _ROOTS)]
            self.places.add(f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else "elsewhere")


def run(case: dict[str, Any]) -> list[str]:
    reads = READS  # the patched methods record into it, also in a forked process
    join(case["rank"], case["processes"])
    with platform.device():
        trainer = PolicyTrainer(recipe_of(case), platform, 1)
    work = Workload(**case["work"])
    activations.assume(trainer, work)
    compute = activations.passes(trainer, work)
    ways = assumptions.stand_ins(trainer.model.config)
    reads.places, reads.on = set(), True
    with MemoryCounter(META, ways, backwards=None, width=None):
        compute["forward"]()
        compute["update"]()
    reads.on = False
    return sorted(reads.places)


if __name__ == "__main__":
    cases, READS = json.loads(Path(sys.argv[1]).read_text()), Reads()
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:  # a process for each: it joins once
        results = pool.map(run, cases, chunksize=1)
    print(json.dumps(dict(zip([case["name"] for case in cases], results, strict=True))))
