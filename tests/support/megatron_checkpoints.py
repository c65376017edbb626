"""Checkpoints in the trainer processes of tests/megatron/test_layouts.py: written in one layout, read in others."""

from __future__ import annotations

import json
import re
import resource
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from tests.support import held_ranks


def save(trainer: Any, directory: Path) -> None:
    part = trainer.stage_save(directory, copy=False)
    part.start()
    part.wait()
    dist.barrier()


def assembled(directory: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint, assembled from its parts; each element must be stored exactly once."""
    whole: dict[str, torch.Tensor] = {}
    seen: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as reader:
            shapes = {name: json.loads(shape) for name, shape in reader.metadata().items()}
            for key in reader.keys():  # noqa: SIM118 -- not a mapping
                name, offset = key.split("@")
                box = reader.get_tensor(key)
                tensor = whole.setdefault(name, torch.zeros(shapes[name], dtype=box.dtype))
                begin = [int(number) for number in offset.split(",")]
                where = tuple(slice(b, b + n) for b, n in zip(begin, box.shape, strict=True))
                tensor[where] = box
                seen.setdefault(name, torch.zeros(shapes[name], dtype=torch.uint8))[where] += 1
    for name, count in seen.items():
        assert bool((count == 1).all()), f"{name}: written {count.min()} to {count.max()} times"
    return whole


def assert_same(directory: Path, other: Path, vocabulary: int | None = None) -> None:
    """Assert that two checkpoints are bit-identical.

    vocabulary: size without padding; the padding past it may differ in length. None: shapes must be equal.
    """
    left, right = assembled(directory), assembled(other)
    assert left.keys() == right.keys(), left.keys() ^ right.keys()
    assert any(name.startswith("exp_avg_sq.") for name in left) and any(name.startswith("weight.") for name in left)
    for name, tensor in left.items():
        common = tuple(slice(min(sizes)) for sizes in zip(tensor.shape, right[name].shape, strict=True))
        assert tensor.dtype == right[name].dtype and torch.equal(tensor[common], right[name][common]), name
        if tensor.shape != right[name].shape:
            assert "word_embeddings" in name or "output_layer" in name, name
            assert vocabulary is not None and common[0].stop >= vocabulary, (name, tensor.shape, right[name].shape)


def check_failed_write(trainer: Any, directory: Path) -> None:
    """A failed write gives a message with its cause and remedy, and leaves no large file."""
    part = trainer.stage_save(directory, copy=False)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        part.start()
        part._thread.join()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    try:
        part.done()
    except RuntimeError as error:
        for words in (str(directory), "File too large", f"needs {part.bytes} bytes", "free"):
            assert words in str(error), (words, error)
        assert json.loads(part.receipt.read_text()) == {"error": str(error)}
    else:
        raise AssertionError("a failed write was reported as done")
    assert not list(directory.glob(f"*{dist.get_rank():05d}.safetensors"))
    dist.barrier()


def check_reshard(case: dict[str, Any], output: Path) -> None:
    """Load another layout's checkpoint: all states are bit-identical, and training continues with the same numbers."""
    from tests.support import megatron_training as training
    from tests.support.megatron_offload import bytes_of

    source, target = output / f"{case['from']}.checkpoint", output / f"{case['name']}.checkpoint"
    trainer = training.build(case)
    held_ranks.record(trainer, bytes_of(trainer), case, output)
    torch.rand(3)  # the noise below must follow from the states that `load` sets, not from those after `build`
    notice = trainer.load(source)
    if case.get("same_ranks"):  # each rank has its random state back
        assert notice is None, notice
    else:
        assert notice is not None and "another layout" in notice, notice
    noise = torch.rand(3)
    save(trainer, target)
    if dist.get_rank() == 0:
        assert_same(source, target, trainer.model.vocab_size)
    dist.barrier()
    again = training.build(case)
    again.load(source)
    assert torch.equal(noise, torch.rand(3)), "random states do not follow from seed and step"
    if case.get("dtype") == "bfloat16":
        return  # a weight's last bit depends on how sums over ranks round
    batches, _ = training.micro_batches(again, case["per_micro"])
    metrics, weights = training.train(again, batches, 2), training.weights_of(again)
    went_on = torch.load(output / f"{case['root']}.went_on.pt", weights_only=True)
    for of_step, expected in zip(metrics, went_on["metrics"], strict=True):
        for name in expected if of_step else ():
            assert abs(of_step[name] - expected[name]) <= 2e-6 * max(1.0, abs(expected[name])), (name, of_step)
    for name, weight in went_on["weights"].items():
        torch.testing.assert_close(weights[name], weight, atol=2e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def check_other_model(case: dict[str, Any], output: Path) -> None:
    """Another model's checkpoint is refused, naming a tensor."""
    from tests.support import megatron_training as training

    trainer = training.build(case)
    try:
        trainer.load(output / f"{case['from']}.checkpoint")
    except ValueError as error:
        assert "written by another model" in str(error), error
        assert re.search(r"\b(weight|master|exp_avg|exp_avg_sq)\.\w+", str(error)), error
    else:
        raise AssertionError("another model's checkpoint was loaded")
