"""Checkpoints of an optimizer with its states on the host between steps, in trainer processes of the layout tests.

`case["swap"]`: "mindspeed" enables MindSpeed's swap (`tests.support.mindspeed_ranks`); "stand-in" uses `swap_out` on Megatron's
optimizer, with the states in the places and under the names recorded from MindSpeed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support import megatron_training as training
from tests.support.megatron_checkpoints import assert_same, save
from tests.support.megatron_offload import bytes_of


def run_case(case: dict[str, Any], output: Path) -> None:
    """Runs resumed from a checkpoint in fresh trainers, with and without the swap, are bit-identical; also with weights and
    gradients offloaded between steps."""
    trainer = build(case)
    batches, _ = training.micro_batches(trainer, 3)
    directory = output / f"{case['name']}.checkpoint"
    save(trainer, directory.with_suffix(".before"))  # before the first step, as save_at_end of a run without one
    training.train(trainer, batches, 2)
    assert bytes_of(trainer)["moments"] == 0, "nothing was swapped out: this test would prove nothing"
    save(trainer, directory)
    staged = trainer.stage_save(output / f"{case['name']}.beside", copy=True)
    went_on, weights = training.train(trainer, batches, 2), training.weights_of(trainer)
    staged.start()  # the checkpoint must not include later steps
    staged.wait()
    dist.barrier()
    if dist.get_rank() == 0:
        assert_same(directory, staged.directory)
        torch.save({"metrics": went_on, "weights": weights}, output / f"{case['name']}.went_on.pt")

    resumed = build(case)
    assert resumed.load(directory) is None, "the same layout resumes without a notice"
    offload(resumed)
    check(resumed, batches, went_on, weights)
    plain = build(case, swap=False)
    plain.load(directory)
    assert bytes_of(plain)["moments"] > 0
    save(plain, directory.with_suffix(".plain"))
    check(plain, batches, went_on, weights)
    dist.barrier()
    if dist.get_rank() == 0:
        assert_same(directory, directory.with_suffix(".plain"))
    back = build(case)
    back.load(directory.with_suffix(".plain"))
    check(back, batches, went_on, weights)


def run_reshard(case: dict[str, Any], output: Path) -> None:
    """Load another layout's checkpoint and save it again: bit-identical. Training continues with the same numbers."""
    source, target = output / f"{case['from']}.checkpoint", output / f"{case['name']}.checkpoint"
    trainer = build(case)
    notice = trainer.load(source)
    assert notice is not None and "another layout" in notice, notice
    save(trainer, target)
    if dist.get_rank() == 0:
        assert_same(source, target, trainer.model.vocab_size)
    dist.barrier()
    if case.get("dtype") == "bfloat16":
        return  # a weight's last bit depends on how sums over ranks round
    batches, _ = training.micro_batches(trainer, case["per_micro"])
    metrics, weights = training.train(trainer, batches, 2), training.weights_of(trainer)
    went_on = torch.load(output / f"{case['root']}.went_on.pt", weights_only=True)
    for of_step, expected in zip(metrics, went_on["metrics"], strict=True):
        for name in expected if of_step else ():
            assert abs(of_step[name] - expected[name]) <= 2e-6 * max(1.0, abs(expected[name])), (name, of_step)
    for name, weight in went_on["weights"].items():
        torch.testing.assert_close(weights[name], weight, atol=2e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def build(case: dict[str, Any], swap: bool = True) -> Any:
    if case["swap"] == "mindspeed":
        extra = {"swap_optimizer": swap}  # False must be written: MindSpeed keeps the last value in a process
        return training.build({**case, "megatron": {**case.get("megatron", {}), "extra": extra}})
    trainer = training.build(case)
    if swap:
        swap_out(trainer.optimizer)
    return trainer


def check(trainer: Any, batches: Any, went_on: Any, weights: dict[str, torch.Tensor]) -> None:
    """Assert that two more steps equal the uninterrupted run's."""
    assert training.train(trainer, batches, 2) == went_on
    for name, weight in trainer.export_weights():
        assert torch.equal(weights[name], weight), name


def offload(trainer: Any) -> None:
    training.platform.can_offload = True
    trainer.offload_optimizer()
    trainer.offload_weights()
    assert not any(bytes_of(trainer).values()), bytes_of(trainer)
    trainer.onload()
    training.platform.can_offload = False


def swap_out(optimizer: Any) -> None:
    """Keep states on the host between steps, as MindSpeed's swap_optimizer does.

    Storages of moments and of separate master weights are empty; step counts are tensors, and a step rejects an int.
    """
    from megarl.megatron.optimizer import members
    from megarl.platform import swapped_states

    for member in members(optimizer):
        inner = member.optimizer
        hosts = {
            main: {name: tensor.clone() for name, tensor in _states(inner, main, member).items()}
            for group in inner.param_groups
            for main in group["params"]
        }
        setattr(member, swapped_states.HOST_TENSORS, hosts)
        setattr(member, swapped_states.TO_HOST, torch.cuda.Stream())
        setattr(inner, swapped_states.SWAPS, True)
        inner.step = _swapping(inner, inner.step, member, hosts)
        member._copy_main_params_to_model_params = lambda: None  # the step does it, while masters have their memory
        _empty(inner, member, hosts)


def _states(inner: Any, main: torch.Tensor, member: Any) -> dict[str, torch.Tensor]:
    states = {name: inner.state[main][name] for name in ("exp_avg", "exp_avg_sq")}
    masters = [p for group in member.shard_fp32_from_float16_groups for p in group]
    return states | ({"param": main.data} if any(main is p for p in masters) else {})


def _swapping(inner: Any, step: Any, member: Any, hosts: dict[Any, dict[str, torch.Tensor]]) -> Any:
    update_weights = member._copy_main_params_to_model_params

    def swapping_step() -> None:
        for main, copies in hosts.items():
            for name, tensor in _states(inner, main, member).items():
                tensor.untyped_storage().resize_(copies[name].nbytes)
                tensor.copy_(copies[name])
        for group in inner.param_groups:
            assert isinstance(group.get("step", torch.tensor(0)), torch.Tensor), "MindSpeed's step reads is_cpu of it"
            group["step"] = int(group.get("step", 0))
        step()
        update_weights()
        for group in inner.param_groups:
            group["step"] = torch.tensor(group["step"])
        for main, copies in hosts.items():
            for name, tensor in _states(inner, main, member).items():
                copies[name].copy_(tensor)
        _empty(inner, member, hosts)

    return swapping_step


def _empty(inner: Any, member: Any, hosts: dict[Any, Any]) -> None:
    for main in hosts:
        for tensor in _states(inner, main, member).values():
            tensor.untyped_storage().resize_(0)
