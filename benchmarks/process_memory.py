"""Memory of a trainer process beyond its weights, by part.

    python -m benchmarks.process_memory

A trainer without Ray, with a random Qwen3 of 0.2 million parameters, in a process of its own. `python -m benchmarks.rollout_process`
prints the same table for a rollout process. Anonymous memory is the process's own in any case. Private memory (USS) is what the end
of the process would free: also the pages of libraries that no other process has mapped. Resident memory (RSS) counts all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

Mark = tuple[str, float, float, float]
"""Name; anonymous, private and resident MiB."""


class Marks:
    """Memory of this process at points of its life."""

    def __init__(self) -> None:
        self.marks: list[Mark] = []
        self.add("interpreter and the benchmark")

    def add(self, name: str) -> None:
        """Note the memory of everything up to `name`."""
        lines = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
        sizes = {parts[0].rstrip(":"): int(parts[1]) / 1024 for parts in lines}
        private = sizes["Private_Clean"] + sizes["Private_Dirty"]
        self.marks.append((name, sizes["Anonymous"], private, sizes["Rss"]))


def table(marks: Sequence[Mark]) -> None:
    """Print the growth at each mark, and the shares of the whole."""
    whole = marks[-1][2]
    print(
        "| share of private | part | private MiB | anonymous MiB | so far: private, resident MiB |\n|---|---|---|---|---|"
    )
    before = ("", 0.0, 0.0, 0.0)
    for mark in marks:
        name, anonymous, private, resident = mark
        more = private - before[2]
        print(
            f"| {more / whole:.0%} | {name} | {more:.0f} | {anonymous - before[1]:.0f} | {private:.0f}, {resident:.0f} |"
        )
        before = mark


def run_trainer(model: str) -> list[Mark]:
    """Load a trainer and train one step; returns the marks. Runs in the trainer's process."""
    marks = Marks()
    from megarl.platform import select

    platform = select("cpu")
    platform.prepare()
    import torch

    marks.add("torch")
    import torch.distributed as dist

    torch.set_num_threads(1)
    from megarl.megatron.trainer import PolicyTrainer
    from megarl.recipe.schema import Recipe

    marks.add("Megatron, mbridge and their imports")
    platform.set_device(0)
    dist.init_process_group(platform.process_group_backend)
    recipe = Recipe()
    recipe.model.path, recipe.model.dtype = model, "float32"
    trainer = PolicyTrainer(recipe, platform, total_optimizer_steps=10)
    marks.add("model, gradients, optimizer, process groups")
    from benchmarks.memory import micro_batch

    batch = micro_batch(4096, trainer.model.vocab_size, platform.device())
    trainer.train_step([batch], lambda x: (x.log_probs.sum(), {}), temperature=1.0, with_entropy=False)
    marks.add("first step of 4,096 tokens: activations and what malloc keeps")
    dist.destroy_process_group()
    return marks.marks


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside is not None:
        print(json.dumps(run_trainer(options.inside)))
        return
    from benchmarks.trl.job import make_model

    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), "0.2M", moe=False, seed=0)
        environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29543"}
        environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "benchmarks.process_memory", "--inside", model]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    print(f"load {os.getloadavg()[0]:.1f}\n")
    table(json.loads(done.stdout.strip().splitlines()[-1]))


if __name__ == "__main__":
    main()
