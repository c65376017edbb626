"""Compare the actor's update step with a bare Megatron loop on the same model, layout and batch.

    python -m benchmarks.update_step [--rounds 12]

Both alternate in one process on the same weights. The bare loop is Megatron's forward and backward schedule with Megatron's
vocabulary-parallel cross-entropy over materialized logits, `finalize_model_grads` and the optimizer's step. megarl's step is
`PolicyTrainer.train_step` with PPO's clipped objective. Seconds are CPU time (median of the rounds), which other processes
disturb less than wall time. The result is the ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.models import LENGTHS, VOCABULARY, write_dense
from megarl.platform import select

platform = select("auto")
platform.prepare()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from megarl.algorithms.objective import objective  # noqa: E402
from megarl.megatron.batch import MicroBatch  # noqa: E402
from megarl.recipe.schema import Recipe  # noqa: E402


def micro_batches(device: Any) -> list[MicroBatch]:
    """Return two micro batches with lengths as in GSM8K."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for lengths in (LENGTHS[::2], LENGTHS[1::2]):
        tokens = torch.randint(0, VOCABULARY, (sum(lengths),), generator=generator).to(device)
        ones = torch.ones(len(tokens), device=device)
        vectors = {
            "loss_mask": ones,
            "loss_weights": ones / sum(LENGTHS),
            "token_share": ones / sum(LENGTHS),
            "advantages": torch.randn(len(tokens), generator=generator).to(device),
            "old_log_probs": -7.0 * ones,
        }
        batches.append(MicroBatch(tokens, lengths, vectors))
    return batches


def bare_step(trainer: Any, batches: list[MicroBatch]) -> None:
    """Run one step as a plain Megatron training script: cross-entropy of the next token, mean over tokens."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megarl.megatron.heads.output_heads import language_model

    chunk, config = trainer.model.chunks[0], trainer.model.config

    def forward_step(iterator: Any, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        batch = next(iterator)
        offsets = torch.tensor([0, *batch.lengths], device=batch.tokens.device).cumsum(0).to(torch.int32)
        positions = torch.cat([torch.arange(length, device=batch.tokens.device) for length in batch.lengths])
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            max_seqlen_q=max(batch.lengths),
            max_seqlen_kv=max(batch.lengths),
        )
        losses = model(
            input_ids=batch.tokens[None],
            position_ids=positions[None],
            attention_mask=None,
            labels=batch.tokens.roll(-1)[None],
            packed_seq_params=params,
        )

        def mean(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            loss = output.float().sum() / sum(LENGTHS)
            return loss, torch.zeros([], dtype=torch.int), {"loss": loss.detach()}

        return losses, mean

    output_layer = language_model(chunk).output_layer
    hidden_out = output_layer.__dict__.pop("forward")  # restores the model's original output layer during this step
    chunk.train()
    chunk.zero_grad_buffer()
    trainer.optimizer.zero_grad()
    config.finalize_model_grads_func = lambda chunks, _=None, **kwargs: finalize_model_grads(chunks, None, **kwargs)
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=chunk,
        num_microbatches=len(batches),
        seq_length=max(len(batch.tokens) for batch in batches),
        micro_batch_size=1,
        forward_only=False,
    )
    trainer.optimizer.step()
    output_layer.forward = hidden_out


def seconds(function: Callable[[], Any]) -> float:
    start = time.process_time() if platform.name == "cpu" else time.perf_counter()
    function()
    if platform.name != "cpu":
        torch.cuda.synchronize()
    return (time.process_time() if platform.name == "cpu" else time.perf_counter()) - start


def measure(rounds: int, keep_logits: bool, with_entropy: bool) -> tuple[float, float]:
    """Return the median seconds of megarl's step and of the bare loop's step."""
    from megarl.megatron.trainer import PolicyTrainer

    with tempfile.TemporaryDirectory() as folder:
        recipe = Recipe()
        recipe.model.path, recipe.megatron.keep_logits = str(write_dense(Path(folder))), keep_logits
        recipe.model.dtype = "float32" if platform.name == "cpu" else "bfloat16"
        trainer = PolicyTrainer(recipe, platform, total_optimizer_steps=100)
    batches = micro_batches(platform.device())

    def ours() -> None:
        trainer.train_step(
            batches, lambda x: objective(x, recipe.algorithm), temperature=1.0, with_entropy=with_entropy
        )

    times: dict[str, list[float]] = {"ours": [], "bare": []}
    for _ in range(rounds + 1):
        times["ours"].append(seconds(ours))
        times["bare"].append(seconds(lambda: bare_step(trainer, batches)))
    return statistics.median(times["ours"][1:]), statistics.median(times["bare"][1:])  # the first rounds warm up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531"}.items():
        os.environ.setdefault(name, value)
    platform.set_device(0)
    dist.init_process_group(platform.process_group_backend)
    print("| megarl's step | megarl, s | bare, s | ratio |\n|---|---|---|---|")
    for keep_logits, with_entropy in ((False, False), (True, False), (False, True)):
        from megatron.core import parallel_state

        ours, bare = measure(rounds, keep_logits, with_entropy)
        name = f"logits {'kept' if keep_logits else 'recomputed'}, {'with' if with_entropy else 'no'} entropy"
        print(f"| {name} | {ours:.3f} | {bare:.3f} | {ours / bare:.3f} |", flush=True)
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
