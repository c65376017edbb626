"""One trainer process of tests/megatron/test_layouts.py: runs its cases one after the other and writes the results.

Usage, with the environment of torchrun: python -m tests.support.megatron_worker CASES.json OUTPUT_DIRECTORY
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.support import megatron_training as training  # isort: skip -- prepares the platform before Megatron is imported

import torch
import torch.distributed as dist

from tests.support import (
    held_ranks,
    holdings_check,
    megatron_critic,
    megatron_reference,
    megatron_swap,
    mindspeed_record,
)
from tests.support.megatron_checkpoints import assert_same, check_failed_write, check_other_model, check_reshard, save
from tests.support.megatron_models import LENGTHS
from tests.support.megatron_offload import bytes_of, check_offload
from tests.support.megatron_training import build, gradient_of, micro_batches, train, weights_of


def run_case(case: dict[str, Any], output: Path) -> None:
    """Write log-probs, the loaded weights, and metrics and weights of two steps. On one process, also the first step's
    gradient."""
    trainer = build(case)
    if training.platform.uses_native_layers:
        mindspeed_record.check_config(trainer.model.chunks)
    held_ranks.record(trainer, bytes_of(trainer), case, output)
    batches, numbers = micro_batches(trainer, case.get("per_micro", 2))
    rows = trainer.log_probs(batches, temperature=1.0, with_entropy=True)
    squares = trainer.log_probs_and_squares(batches, temperature=1.0)
    trainer.save_hf(output / f"{case['name']}.hf")
    metrics = train(trainer, batches, 1)
    gradient = gradient_of(trainer) if dist.get_world_size() == 1 and not {"lora", "frozen_tower"} & case.keys() else {}
    metrics += train(trainer, batches, 1)
    after = weights_of(trainer)
    holdings_check.check(trainer, after, output / f"{case['name']}.holdings.json")
    where = trainer.coordinates
    assert (rows is None) == (metrics[0] is None) == (not where.is_last_stage)
    if where.reports:
        by_sequence = {}
        for group, (log_probs, entropy), (again, of_squares) in zip(numbers, rows, squares, strict=True):
            rounding = 0.0 if dist.get_world_size() == 1 else 2e-6  # ranks may add in another order
            torch.testing.assert_close(again, log_probs, atol=rounding, rtol=0)
            lengths = [LENGTHS[i] for i in group]
            vectors = (vector.split(lengths) for vector in (log_probs, entropy, of_squares))
            for i, *values in zip(group, *vectors, strict=True):
                by_sequence[i] = tuple(value.clone() for value in values)
        torch.save(by_sequence, output / f"{case['name']}.log_probs.{where.dp_rank}.pt")
        if where.dp_rank == 0:
            torch.save({"after": after, "metrics": metrics, "gradient": gradient}, output / f"{case['name']}.pt")
    if case.get("lora"):
        check_adapters(trainer, batches, rows, case, output)


def check_adapters(trainer: Any, batches: list[Any], start: Any, case: dict[str, Any], output: Path) -> None:
    """Checks for models with adapters only. `start`: the log-probs before training."""
    trained = trainer.log_probs(batches, temperature=1.0)
    trainer.keep_reference()
    reference = trainer.log_probs(batches, temperature=1.0, reference=True)
    for (kept, _), (then, _), (now, _) in zip(reference or [], start or [], trained or [], strict=True):
        assert torch.equal(kept, then), "the reference is not the model without adapters"
        assert not torch.allclose(now, then, atol=1e-4, rtol=0), "training changed nothing"
    on_disk = synced_files()
    trainer.save_adapter(output / f"{case['name']}.adapter")
    if dist.get_rank() == 0:
        partial = output / f".{case['name']}.adapter.partial"
        assert {str(partial / name) for name in ("adapter_config.json", "adapter_model.safetensors")} <= set(on_disk)
        assert not partial.exists()
    check_start_from(trainer, output / f"{case['name']}.adapter", batches, trained)
    if case.get("export"):
        trainer.save_hf(output / f"{case['name']}.merged")
        torch.save(torch.cat([now for now, _ in trained]), output / f"{case['name']}.trained.pt")
    if case.get("resume"):
        directory, saved = output / f"{case['name']}.checkpoint", weights_of(trainer)
        save(trainer, directory)
        went_on, weights = train(trainer, batches, 2), weights_of(trainer)
        resumed = build(case)
        resumed.load(directory)
        assert train(resumed, batches, 2) == went_on
        assert all(torch.equal(weights[name], weight) for name, weight in resumed.export_weights())
        if dist.get_rank() == 0:
            torch.save({"metrics": went_on, "weights": weights}, output / f"{case['name']}.went_on.pt")
        check_weights_only(case, directory, saved)


def check_start_from(trainer: Any, adapter: Path, batches: list[Any], expected: Any) -> None:
    """A PEFT directory gives the adapters back in every layout, and is the reference policy of a run that starts from it.
    `expected`: log-probs with these adapters."""
    from megarl.megatron.lora.peft import load_adapter

    lora = trainer.model.lora
    matrices = [matrix for each in lora.adapters for matrix in each.parameters()]
    saved = [matrix.detach().clone() for matrix in matrices]

    def change() -> None:
        for matrix in matrices:
            matrix.data.add_(0.01)

    change()
    load_adapter(lora, adapter)
    assert all(map(torch.equal, matrices, saved)), "the directory does not give the adapters back"
    lora.settings.path = str(adapter)
    trainer.keep_reference()
    change()
    reference = trainer.log_probs(batches, temperature=1.0, reference=True)
    for (kept, _), (then, _) in zip(reference or [], expected or [], strict=True):
        assert torch.equal(kept, then), "the reference is not the model with the adapters of lora.path"
    load_adapter(lora, adapter)
    lora.settings.path = None
    trainer.keep_reference()


def check_timeout() -> None:
    """The recipe's timeout in seconds applies to Megatron's process groups, although Megatron's option is in minutes."""
    from megatron.core import parallel_state

    for group in (parallel_state.get_tensor_model_parallel_group(), parallel_state.get_data_parallel_group()):
        options = group._get_backend(training.platform.device()).options
        assert options._timeout == timedelta(seconds=training.TIMEOUT), options._timeout


def check_weights_only(case: dict[str, Any], directory: Path, expected: dict[str, torch.Tensor]) -> None:
    """Assert that a trainer for export loads a checkpoint's weights and nothing else."""
    trainer = build(case, weights_only=True)
    assert trainer.load(directory) is None
    weights = weights_of(trainer)
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert weight.dtype == expected[name].dtype and torch.equal(weight, expected[name]), name
    parameters = [parameter for chunk in trainer.model.chunks for parameter in chunk.parameters()]
    assert trainer.optimizer is None
    assert not any(hasattr(parameter, "main_grad") for parameter in parameters), "there is memory for gradients"


def run_resume(case: dict[str, Any], output: Path) -> None:
    """Save and continue; load into a fresh trainer and continue: bit-identical. Also checks that need a live trainer."""
    check_decay(case)
    trainer = build(case)
    check_timeout()
    batches, _ = micro_batches(trainer, 3)
    first = trainer.log_probs(batches, temperature=1.0)
    trainer.keep_reference()
    held_ranks.record(trainer, bytes_of(trainer), case, output)
    train(trainer, batches, 2)
    saved = weights_of(trainer)
    directory = output / f"{case['name']}.checkpoint"
    on_disk = synced_files()
    save(trainer, directory)
    written = {str(path) for path in directory.rglob("*") if f"{dist.get_rank():05d}" in path.name}
    assert len(written) == 3, written
    assert {path.replace(".json", ".partial") for path in written} <= set(on_disk), "lost in a power failure"
    staged = trainer.stage_save(output / f"{case['name']}.beside", copy=True)
    held_ranks.check_saved(trainer, staged)
    noise = torch.rand(3)
    went_on, weights = train(trainer, batches, 2), weights_of(trainer)
    staged.start()  # the checkpoint must not include later training

    current = trainer.log_probs(batches, temperature=1.0)
    reference = trainer.log_probs(batches, temperature=1.0, reference=True)
    again = trainer.log_probs(batches, temperature=1.0)
    if first is not None:
        for kept, start, now, later in zip(reference, first, current, again, strict=True):
            assert torch.equal(kept[0], start[0]), "the reference is not the weights that were kept"
            assert torch.equal(now[0], later[0]) and not torch.equal(now[0], start[0])

    trainer.save_hf(output / f"{case['name']}.hf")
    train(trainer, batches, 1, lambda x: (x.log_probs.sum() * float("nan"), {}))
    skipped = train(trainer, batches, 1, lambda x: (x.log_probs.sum() * float("inf"), {}))[0]
    assert skipped is None or skipped["actor/skipped_updates"] == 1.0
    assert all(torch.equal(weights[name], weight) for name, weight in trainer.export_weights())

    staged.wait()
    check_failed_write(trainer, output / f"{case['name']}.full")
    dist.barrier()
    if dist.get_rank() == 0:
        assert_same(directory, staged.directory)
        torch.save({"metrics": went_on, "weights": weights}, output / f"{case['name']}.went_on.pt")

    resumed = build(case)
    assert resumed.load(staged.directory) is None, "the same layout resumes without a notice"
    check_offload(resumed, training.platform, weights_of(resumed))
    assert torch.equal(noise, torch.rand(3)), "random states were not restored"
    assert train(resumed, batches, 2) == went_on
    for name, weight in resumed.export_weights():
        assert torch.equal(weights[name], weight), name
    if dist.get_rank() == 0:
        torch.save(weights, output / f"{case['name']}.weights.pt")
    check_weights_only(case, directory, saved)


def check_decay(case: dict[str, Any]) -> None:
    """Without gradients, an update subtracts lr x decay from every trained matrix, and nothing from norms and biases."""
    trainer = build({**case, "dtype": "float32", "weight_decay": 0.1})
    batches, _ = micro_batches(trainer, 3)
    before, kept = weights_of(trainer), 1 - 0.1 * trainer.recipe.actor.optimizer.lr
    train(trainer, batches, 1, lambda x: (x.log_probs.sum() * 0.0, {}))
    for name, weight in trainer.export_weights():
        matrix = weight.dim() > 1 and not name.endswith("_bias")  # gpt-oss stacks the biases of experts
        frozen = ".indexer." in name or (case.get("frozen_tower", False) and "visual." in name)
        expected = before[name] * (kept if matrix and not frozen else 1.0)
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def run_upstream(case: dict[str, Any], output: Path) -> None:
    """Check, before any model is built, that mbridge still has the Qwen2.5-VL defects that megarl fixes."""
    from tests.support.vl_model import check_upstream

    assert "megarl.megatron.model.qwen2_5_vl" not in sys.modules, "mends may be in place already"
    check_upstream(case["model"])


def run_samples(case: dict[str, Any], output: Path) -> None:
    """Write log-probs of an engine's samples after some training steps, and the weights after one more step."""
    from megarl.megatron.batch import MicroBatch
    from megarl.megatron.images import Images

    trainer = build(case)
    batches, _ = micro_batches(trainer, case["per_micro"])
    train(trainer, batches, case["steps"])
    samples = pickle.loads((output / f"{case['name']}.samples").read_bytes())  # noqa: S301 - the test's own
    packed = [
        MicroBatch(
            torch.cat([torch.from_numpy(sample.tokens).long() for sample in group]),
            [len(sample.tokens) for sample in group],
            images=Images.of([sample.images for sample in group]),
        )
        for group in (samples[i : i + 3] for i in range(0, len(samples), 3))
    ]
    rows = trainer.log_probs(packed, temperature=1.0)
    parts = [part for batch, (row, _) in zip(packed, rows, strict=True) for part in row.split(batch.lengths)]
    torch.save(parts, output / f"{case['name']}.log_probs.pt")
    train(trainer, batches, 1)
    torch.save(weights_of(trainer), output / f"{case['name']}.next.pt")


def synced_files() -> list[str]:
    """Record the paths of files that are synced to disk from now on."""
    fsync, paths = os.fsync, []

    def record(descriptor: int) -> None:
        paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    os.fsync = record
    return paths


def main() -> None:
    logging.disable(logging.WARNING)
    cases, output = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    dist.init_process_group(training.platform.process_group_backend)
    for case in cases:
        kinds = {
            "layout": run_case,
            "resume": run_resume,
            "upstream": run_upstream,
            "samples": run_samples,
            "critic": megatron_critic.run_case,
            "reshard": check_reshard,
            "other_model": check_other_model,
            "reference": megatron_reference.run_case,
            "swap": megatron_swap.run_case,
            "swap_reshard": megatron_swap.run_reshard,
        }
        kinds[case.get("kind", "layout")](case, output)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
