"""Peak memory of each option that trades memory for work, and of the log-prob pass compared with materialized logits.

    python -m benchmarks.memory [--tokens 4096] [--vocabulary 32768]

Each case runs in a separate process. The figure is the growth of memory above the model, its gradients and its optimizer: on a
CPU of the resident set, on a GPU of the allocator. Compare ratios.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.models import write_dense

LOG_PROBS = {"megarl": "log_probs", "materialized logits": "materialized"}
UPDATES: dict[str, dict[str, Any]] = {
    "no option": {},
    "keep_logits: true": {"keep_logits": True},
    "recompute: selective": {"recompute": "selective"},
    "recompute: full": {"recompute": "full"},
}


def run_case(case: str, model: str, tokens: int) -> None:
    """Print the peak of `case` in MiB. Runs in the process of the case."""
    from megarl.platform import select

    platform = select("auto")
    platform.prepare()

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    platform.set_device(0)
    dist.init_process_group(platform.process_group_backend)
    from megarl.megatron.trainer import PolicyTrainer
    from megarl.recipe.schema import Recipe

    recipe = Recipe()
    recipe.model.path, recipe.model.dtype = model, "float32" if platform.name == "cpu" else "bfloat16"
    for name, value in UPDATES.get(case, {}).items():
        setattr(recipe.megatron, name, value)
    trainer = PolicyTrainer(recipe, platform, total_optimizer_steps=10)
    if case == "offload":
        print(*offloaded(trainer, platform))
        return
    batch = micro_batch(tokens, trainer.model.vocab_size, platform.device())
    if case == "log_probs":
        print(growth(lambda: trainer.log_probs([batch], temperature=1.0)))
    elif case == "materialized":
        print(growth(lambda: materialized(trainer, batch)))
    else:
        loss: Callable[[Any], Any] = lambda x: ((x.log_probs + x.entropy).sum(), {})  # noqa: E731
        print(growth(lambda: trainer.train_step([batch], loss, temperature=1.0, with_entropy=True)))
    dist.destroy_process_group()


def micro_batch(tokens: int, vocabulary: int, device: Any) -> Any:
    import torch

    from megarl.megatron.batch import MicroBatch

    ones = torch.ones(tokens, device=device)
    vectors = {"loss_mask": ones, "loss_weights": ones, "token_share": ones}
    ids = torch.randint(0, vocabulary, (tokens,), device=device)
    lengths = [min(256, tokens - start) for start in range(0, tokens, 256)]
    return MicroBatch(ids, lengths, vectors)


def materialized(trainer: Any, batch: Any) -> Any:
    """Compute log-probs from the materialized logits, with `log_softmax` and `gather`."""
    import torch

    from megarl.megatron.heads.output_heads import at_predicted_tokens, output_weight, whole_rows
    from megarl.megatron.pipeline import run_pipeline

    def head(model: Any, hidden: Any, stream: Any) -> tuple[Any, ...]:
        logits = (whole_rows(hidden, model.config) @ output_weight(model).T).float()
        rows = logits.log_softmax(-1).gather(1, stream.labels[:, None]).squeeze(1)
        return (at_predicted_tokens(rows, stream),)

    device = trainer.platform.device()
    with torch.no_grad():
        return run_pipeline(
            trainer.model.chunks,
            trainer.model.config,
            [batch],
            lambda _, rows: (rows.sum(), rows),
            head,
            device=device,
            forward_only=True,
        )


def growth(function: Callable[[], Any]) -> float:
    """Return the peak memory of `function` above the memory before the call, in MiB."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _resident("VmRSS")
    function()
    return _resident("VmHWM") - before


def _resident(field: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def offloaded(trainer: Any, platform: Any) -> tuple[float, float]:
    """Return MiB of weights, gradients and optimizer states on the device before and after `offload_optimizer`."""
    import torch

    from megarl.megatron.optimizer import members

    def held() -> float:
        states = [state for member in members(trainer.optimizer) for state in member.optimizer.state.values()]
        tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        tensors += [p.data for group in trainer.optimizer.param_groups for p in group["params"]]
        for chunk in trainer.model.chunks:
            tensors += [p.data for p in chunk.parameters()]
            tensors += [b.grad_data for b in [*chunk.buffers, *chunk.expert_parallel_buffers]]
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().size() for tensor in tensors}
        return sum(storages.values()) / 2**20

    before = held()
    platform.can_offload = True
    trainer.offload_optimizer()
    return before, held()


def in_own_process(case: str, model: str, tokens: int) -> list[float]:
    environment = {
        **os.environ,
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29541",
        "MALLOC_MMAP_THRESHOLD_": "65536",  # returns freed memory at once
    }
    command = [sys.executable, "-m", "benchmarks.memory", "--case", case, "--model", model, "--tokens", str(tokens)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [float(number) for number in done.stdout.split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the micro batch, in sequences of 256")
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        run_case(options.case, options.model, options.tokens)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_dense(Path(folder), options.vocabulary))
        print("| log-prob pass | peak, MiB | ratio |\n|---|---|---|")
        table({name: in_own_process(case, model, options.tokens)[0] for name, case in LOG_PROBS.items()})
        print("\n| update step | peak, MiB | ratio |\n|---|---|---|")
        table({name: in_own_process(name, model, options.tokens)[0] for name in UPDATES})
        before, after = in_own_process("offload", model, options.tokens)
    print("\n| held by weights, gradients and optimizer | MiB | ratio |\n|---|---|---|")
    table({"while the actor learns": before, "while the engines sample (`offload_optimizer`)": after})


def table(peaks: dict[str, float]) -> None:
    """Print one row per case, with ratios to the first."""
    first = next(iter(peaks.values()))
    for name, peak in peaks.items():
        print(f"| {name} | {peak:.0f} | {peak / first:.2f} |", flush=True)


if __name__ == "__main__":
    main()
