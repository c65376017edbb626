"""Offload and onload of a trainer's states, in a process of tests/support/megatron_worker.py."""

from __future__ import annotations

from typing import Any

import torch


def check_offload(trainer: Any, platform: Any, before: dict[str, torch.Tensor]) -> None:
    """Offload and onload on a CPU, which saves no memory but moves the same tensors as on a device.

    Later training must be bit-identical. `platform`: the worker's; `before`: the trainer's weights, by name.
    """
    held = bytes_of(trainer)
    assert all(held.values()), held
    trainer.offload_optimizer()
    trainer.offload_weights()
    assert bytes_of(trainer) == held, "a CPU has nothing to offload to"
    platform.can_offload = True
    trainer.offload_optimizer()
    views = trainer.model.dtype == torch.float32  # master weights of a float32 model are its weights
    kept = {"weights": held["weights"], "masters": held["masters"] if views else 0}
    assert bytes_of(trainer) == {**kept, "gradients": 0, "moments": 0}
    for name, weight in trainer.export_weights():  # what weight sync does while engines take memory
        assert torch.equal(weight, before[name]), name
    trainer.offload_weights()
    assert not any(bytes_of(trainer).values()), bytes_of(trainer)
    trainer.onload()
    assert bytes_of(trainer) == held
    platform.can_offload = False


def bytes_of(trainer: Any) -> dict[str, int]:
    """Bytes of device memory by kind."""
    from megarl.megatron.optimizer import members

    def count(tensors: Any) -> int:
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        return sum(storage.size() for storage in storages.values())

    states = [state for member in members(trainer.optimizer) for state in member.optimizer.state.values()]
    chunks = trainer.model.chunks
    return {
        "weights": count(parameter.data for chunk in chunks for parameter in chunk.parameters()),
        "gradients": count(b.grad_data for chunk in chunks for b in [*chunk.buffers, *chunk.expert_parallel_buffers]),
        "moments": count(state[name] for state in states for name in ("exp_avg", "exp_avg_sq")),
        "masters": count(p.data for group in trainer.optimizer.param_groups for p in group["params"]),
    }
