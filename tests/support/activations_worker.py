"""The process of tests/commands/plan/test_activations.py: memory that a trainer on the CPU allocates in each phase, from torch's
allocator.

It computes with real tensors, as one rank of a layout without the other ranks: collectives allocate their buffers and
move nothing. gloo's threads would allocate copies that the allocator reports, and free some of the trainer's memory.

Usage, with the environment of torchrun: python -m tests.support.activations_worker CASES.json OUTPUT_DIRECTORY
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.commands.plan import meta_device
from megarl.platform import select

platform = select("cpu")
platform.prepare()
meta_device.fake_collectives()
platform.holds_values = False  # the models have only a config.json: weights keep their initial values

import torch  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from megarl.commands.plan.count import activations  # noqa: E402
from megarl.commands.plan.count.workload import Workload  # noqa: E402
from megarl.megatron.batch import MicroBatch  # noqa: E402
from megarl.megatron.heads import log_probs  # noqa: E402
from megarl.megatron.moe.recorded_routing import Routing  # noqa: E402
from tests.support.activations_cases import recipe_of  # noqa: E402

torch.set_num_threads(1)
log_probs._BLOCK_ELEMENTS_CPU = (
    log_probs._BLOCK_ELEMENTS
)  # as many logits at a time as on the devices that are planned for


def peak(of: Callable[[], Any]) -> int:
    """Peak bytes that `of` allocates, including kernels' buffers."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        of()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest


def run(case: dict[str, Any], output: Path) -> None:
    from megarl.megatron.trainer import PolicyTrainer

    meta_device.join(case["rank"], case["processes"])
    trainer = PolicyTrainer(recipe_of(case), platform, total_optimizer_steps=1)
    work = Workload(**case["work"])
    activations.assume(trainer, work)
    phases = activations.passes(trainer, work)
    peaks = {}
    for phase, compute in phases.items():
        activations.forget()
        peaks[phase] = peak(compute)
    (output / f"{case['name']}.json").write_text(json.dumps(peaks))


def balanced(trainer: Any, work: Workload) -> list[MicroBatch]:
    """The planner's micro batches with balanced routing: each expert gets the same number of tokens."""
    batches, config = original(trainer, work), trainer.model.config
    if config.num_moe_experts:
        tokens, layers, topk = len(batches[0].tokens), config.num_layers, config.moe_router_topk
        chosen = torch.arange(tokens * topk).view(tokens, 1, topk) % config.num_moe_experts
        for batch in batches:
            batch.routing = Routing(tokens=chosen.expand(-1, layers, -1).to(torch.int16))
    images = batches[0].images
    if images is not None:  # all micro batches share it
        images.pixels = OnHost(images.pixels)  # type: ignore[assignment]
    return batches


class OnHost:
    """Pixels that allocate memory in `to(device)`, although the device is the host."""

    def __init__(self, pixels: torch.Tensor) -> None:
        self.pixels, self.shape = pixels, pixels.shape

    def __len__(self) -> int:
        return len(self.pixels)

    def to(self, device: torch.device) -> torch.Tensor:
        return self.pixels.to(device, copy=True)


original, activations.micro_batches = activations.micro_batches, balanced


def main() -> None:
    logging.disable(logging.WARNING)
    cases, output = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:  # Megatron keeps one layout a process
        pool.starmap(run, [(case, output) for case in cases], chunksize=1)


if __name__ == "__main__":
    main()
