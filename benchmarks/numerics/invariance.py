"""Table of docs/numerics.md about splits of a batch, with the cases of tests/megatron/test_loss_invariance.py."""

from __future__ import annotations

import os
import platform
import tempfile
from dataclasses import fields
from importlib import metadata
from pathlib import Path

from tests.support.invariance import (
    AUX,
    PROMPTS,
    RESPONSES,
    Case,
    Difference,
    Layout,
    difference,
    full,
    quick,
    run,
    some_on_four,
    splits_of,
)

PACKAGES = ("torch", "megatron-core", "mbridge", "transformers")

INVARIANCE = """## The loss does not depend on the split

One batch of {samples} samples of {shortest} to {longest} tokens (prompts excluded, one sample truncated and left out of
the loss) goes through a run's step: plan, trainer processes, `ppo_clip` with entropy bonus and KL, one optimizer
step in float32, tiny models. Each case is compared with the same batch in one process and one micro batch. `whole`: one micro
batch per rank; `packed 400` and `padded 400`: micro batches of at most 400 tokens; `packed 1`: one sequence per micro batch.
Router losses: balance loss {balance}, z-loss {z}. Rows with another algorithm test sequence ratios (`gspo`), token selection
over the mini batch (`kl_cov`, `clip_cov`), normalized correction weights with a mask (`corrected`), and whitened returns-to-go
with the KL in the reward (`reinforce_plus_plus`).

Loss, gradient norm and metric: |a - b| / |b|. The metric column shows the metric of the step that differs most, including
the train/rollout gap and the routers' metrics. It leaves out `rollout/mismatch_chi2_sequence`, a product over whole sequences
with a limit of 1e-4. Gradient: ||a - b|| / ||b|| over all elements, under Hugging Face names.
Worst tensor: max |a - b| / max |b| of one gradient tensor, the largest of all tensors. It is mostly a norm's weight: a sum of
thousands of terms that nearly cancel, with the rounding errors of the terms.
Tests: `tests/megatron/test_loss_invariance.py` (limits: 1e-6, and 1e-5 for the worst tensor).

Made by `python -m benchmarks.numerics invariance{option}` on {machine}; {packages}.
Largest of {count} cases: loss {loss:.1e}, metric {metric:.1e}, gradient norm {grad_norm:.1e}, gradient {gradient:.1e},
worst tensor {tensor:.1e}.

"""


def invariance(short: bool) -> str:
    """Return the section with all splits; `short`: each kind of split once."""
    layouts = [*quick(), *some_on_four()] if short else full()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder)
        run(layouts, output, timeout=6 * 3600)
        results = [(case, difference(case, output)) for case in splits_of(layouts)]
    rows = [
        "| model | processes | layout | micro batches | aggregation | loss | metric | gradient norm | gradient | worst tensor |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    rows += [_row(case, result) for case, result in results]
    return _introduction(results, " --quick" if short else "") + "\n".join(rows) + "\n"


def _introduction(results: list[tuple[Case, Difference]], option: str) -> str:
    lengths = [prompt + response for prompt, group in zip(PROMPTS, RESPONSES, strict=True) for response in group]
    numbers = [field.name for field in fields(Difference) if not field.name.endswith("_name")]
    return INVARIANCE.format(
        samples=len(lengths),
        shortest=min(lengths),
        longest=max(lengths),
        balance=AUX["moe_aux_loss_coef"],
        z=AUX["moe_z_loss_coef"],
        option=option,
        machine=_machine(),
        packages=", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES),
        count=len(results),
        **{name: max(getattr(result, name) for _, result in results) for name in numbers},
    )


def _row(case: Case, result: Difference) -> str:
    split = case.split
    form = "packed" if split.packing else "padded"
    size = "whole" if split.max_tokens >= 10_000 else f"{form} {split.max_tokens}"
    numbers = [result.loss, result.metric, result.grad_norm, result.gradient, result.tensor]
    aggregation = split.aggregation if split.algorithm == "ppo_clip" else f"{split.aggregation}, {split.algorithm}"
    cells = [case.layout.model, str(case.layout.processes), _settings(case.layout), size, aggregation]
    return "| " + " | ".join([*cells, *(f"{number:.1e}" if number else "0" for number in numbers)]) + " |"


def _settings(layout: Layout) -> str:
    short = {"tensor_parallel": "TP", "context_parallel": "CP", "pipeline_parallel": "PP", "expert_parallel": "EP"}
    short["virtual_pipeline"] = "VPP"
    sizes = [f"{short[key]} {value}" for key, value in layout.megatron.items() if key in short]
    cut = [layout.megatron.get(f"{name}_parallel", 1) for name in ("tensor", "context", "pipeline")]
    replicas = layout.processes // (cut[0] * cut[1] * cut[2])
    data = [f"DP {replicas}"] if replicas > 1 else []
    recompute = {"recompute": "recompute all", "extra": "recompute experts"}
    rest = [label for key, label in recompute.items() if key in layout.megatron]
    losses = ["router losses"] if set(AUX) <= set(layout.megatron) else []
    return ", ".join([*data, *sizes, *rest, *losses]) or "-"


def _machine() -> str:
    return f"CPU ({platform.machine()}), {os.cpu_count()} cores"
