"""Faults in layers, optimizer, offload and checkpoint of the tiny models, and the failed checks of the stages' ranks.

Usage: python -m tests.support.planted_kernels MODELS, the folder of the families. Prints a JSON object: fault -> failed checks.
"""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}

from megarl.cluster.process import free_port
from megarl.commands.accept import references
from megarl.commands.accept.context import StageContext
from megarl.commands.accept.kernel_rank import KernelRank
from megarl.commands.accept.parity_rank import Case
from megarl.commands.accept.settings import Settings
from megarl.commands.accept.stages import kernels, model_parity
from megarl.commands.accept.tiny_families import LENGTHS, write_family

os.environ["MASTER_PORT"] = str(free_port())

Fault = Callable[[Any], None]


class Planted(KernelRank):
    """A check rank with a fault in its models. `undo` removes it when the model is gone."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.fault: Fault = lambda _: None

    def _build(self, case: Case) -> Any:
        trainer = super()._build(case)
        self.fault(trainer)
        return trainer


def layer(trainer: Any, number: int = 1) -> Any:
    from megarl.megatron.heads.output_heads import language_model

    return language_model(trainer.model.chunks[0]).decoder.layers[number]


def wrap(module: Any, function: Callable[..., Any]) -> None:
    """`function(original forward, *arguments)` in place of a module's forward."""
    original = module.forward
    module.forward = types.MethodType(lambda self, *args, **kwargs: function(original, *args, **kwargs), module)


def attends_to_neighbours(trainer: Any) -> None:
    core = layer(trainer).self_attention.core_attention
    total = sum(LENGTHS)
    wrap(core, lambda _, q, k, v, *__, **___: references.attention(q, k, v, [total], q.shape[-1] ** -0.5).to(q.dtype))


def attention_scale(trainer: Any) -> None:
    wrap(layer(trainer).self_attention.core_attention, lambda call, q, *rest, **named: call(q * 1.01, *rest, **named))


def key_heads_swapped(trainer: Any) -> None:
    core = layer(trainer).self_attention.core_attention
    wrap(core, lambda call, q, k, v, *rest, **named: call(q, k.flip(1), v.flip(1), *rest, **named))


def not_repeatable(trainer: Any) -> None:
    import torch

    def noisy(call: Any, *args: Any, **named: Any) -> Any:
        output = call(*args, **named)
        return output + 1e-7 * torch.rand_like(output)

    wrap(layer(trainer).self_attention.core_attention, noisy)


def norm_without_weight(trainer: Any) -> None:
    norm = layer(trainer).self_attention.q_layernorm
    wrap(norm, lambda call, x: call(x) / norm.weight)


def norm_backward(trainer: Any) -> None:
    wrap(layer(trainer).self_attention.q_layernorm, lambda call, x: call(x).detach() + 0.5 * (x - x.detach()))


def gate_and_up_swapped(trainer: Any) -> None:
    import torch

    def swapped(call: Any, *args: Any, **named: Any) -> Any:
        output, bias = call(*args, **named)
        return torch.cat(output.chunk(2, -1)[::-1], -1), bias

    wrap(layer(trainer).mlp.linear_fc1, swapped)


def rotary_shifted(trainer: Any) -> None:
    import megatron.core.transformer.attention as attention

    original = attention.apply_rotary_pos_emb
    attention.apply_rotary_pos_emb = lambda x, *args, **named: original(x.roll(1, 0), *args, **named).roll(-1, 0)
    UNDO.append(lambda: setattr(attention, "apply_rotary_pos_emb", original))


def no_bias_correction(trainer: Any) -> None:
    for group in trainer.optimizer.param_groups:
        group["bias_correction"] = False


def experts_shifted(trainer: Any) -> None:
    def shifted(call: Any, x: Any, counts: Any) -> Any:
        return call(x, [*counts[1:], counts[0]])

    wrap(layer(trainer).mlp.experts.linear_fc1, shifted)


def expert_without_gradient(trainer: Any) -> None:
    layer(trainer).mlp.experts.linear_fc2.weight4.register_hook(lambda gradient: gradient * 0)


def unpermute_without_shares(trainer: Any) -> None:
    from megatron.core.transformer.moe import moe_utils

    original = moe_utils.unpermute
    moe_utils.unpermute = lambda *args, **named: original(*args, **{**named, "probs": None})
    UNDO.append(lambda: setattr(moe_utils, "unpermute", original))


def third_layer(trainer: Any) -> None:
    wrap(layer(trainer, 2), lambda call, *args, **named: (call(*args, **named)[0] * 1.001, None))


def one_gradient(trainer: Any) -> None:
    layer(trainer, 2).self_attention.linear_proj.weight.register_hook(lambda gradient: gradient * 1.2)


def learning_rate(trainer: Any) -> None:
    for group in trainer.optimizer.param_groups:
        group["betas"] = (0.5, 0.999)


def offload_loses(trainer: Any) -> None:
    original = trainer._offloader.onload

    def onload() -> None:
        original()
        layer(trainer, 1).self_attention.linear_proj.weight.data.mul_(1.05)

    trainer._offloader.onload = onload


def checkpoint_loses(trainer: Any) -> None:
    original = trainer.load

    def load(folder: Path) -> Any:
        notice = original(folder)
        for state in trainer.optimizer.chained_optimizers[0].optimizer.state.values():
            state["exp_avg"].zero_()
        return notice

    trainer.load = load


UNDO: list[Callable[[], None]] = []
# Of the stage of kernels: family and fault; the words that a failed check must contain are the test's.
KERNELS: dict[str, tuple[str, Fault]] = {
    "none dense": ("dense", lambda _: None),
    "none moe": ("moe", lambda _: None),
    "attends_to_neighbours": ("dense", attends_to_neighbours),
    "attention_scale": ("mla", attention_scale),
    "key_heads_swapped": ("dense", key_heads_swapped),
    "not_repeatable": ("mla", not_repeatable),
    "norm_without_weight": ("dense", norm_without_weight),
    "norm_backward": ("dense", norm_backward),
    "gate_and_up_swapped": ("dense", gate_and_up_swapped),
    "rotary_shifted": ("dense", rotary_shifted),
    "no_bias_correction": ("dense", no_bias_correction),
    "experts_shifted": ("moe", experts_shifted),
    "expert_without_gradient": ("moe", expert_without_gradient),
    "unpermute_without_shares": ("moe", unpermute_without_shares),
}
PARITY: dict[str, Fault] = {
    "none": lambda _: None,
    "third_layer": third_layer,
    "one_gradient": one_gradient,
    "learning_rate": learning_rate,
    "offload_loses": offload_loses,
    "checkpoint_loses": checkpoint_loses,
}


def context(folder: Path) -> StageContext:
    folder.mkdir(exist_ok=True)
    return StageContext(Settings("cpu", 1), folder, folder, 1e9)


def failed(checks: Any) -> list[str]:
    return [check.line() for check in checks if check.verdict == "FAIL"]


def main() -> None:
    models = Path(sys.argv[1])
    answer, sys.stdout = sys.stdout, sys.stderr
    rank, results = Planted(), {}
    for family in ("dense", "moe", "mla"):
        write_family(family, models)
    for name, (family, fault) in KERNELS.items():
        rank.fault, checks = fault, context(models / "checks")
        errors, outcomes = rank.check(family, str(models / family), "float32")
        kernels.record(checks, errors, outcomes, "float32")
        results[name] = failed(checks.checks)
        while UNDO:
            UNDO.pop()()
    for name, fault in PARITY.items():
        rank.fault, checks = fault, context(models / "checks")
        case = Case("dense", str(models / "dense"), "float32", {}, str(models / "checkpoint"))
        model_parity.check_case(checks, case, [rank.run(case)])
        results[f"parity {name}"] = failed(checks.checks)
    print(json.dumps(results), file=answer)


if __name__ == "__main__":
    main()
