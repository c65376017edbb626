"""Table of docs/numerics.md about transformers, with the cases of tests/megatron/test_layouts.py and test_vl.py."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.support.megatron_layouts import LAYOUTS, OPTIONS, PARITY, VL
from tests.support.megatron_models import MODELS, write_model
from tests.support.megatron_runs import checkpoint_tensors, launch, log_probs_of, of_transformers
from tests.support.vl_model import VL_MODELS, vl_of_transformers, write_vl_model

PARITY_PAGE = """## The trainer's log-probs and transformers'

Tiny random models in float32, {layouts} layouts: the largest |difference| of any token's log-prob from what transformers
computes for that sequence alone. A dash: the layout does not cut this model, or other rows cover it. Further settings (recomputation, no distributed optimizer, no sequence parallel, uneven stages):
{options} cases, largest {option:.1e}. Largest of all {count} cases: log-prob {log_prob:.1e}, entropy {entropy:.1e}.
In {exact} of {count} cases the exported tensors are the original tensors, bit for bit.
qwen2_tied and vl_tied: tied embeddings; qwen3_moe_raw: routing weights that are not normalized; deepseek_v3: MLA, a shared
expert, leading dense layers, groups of experts, expert bias, YaRN and a layer for multi-token prediction; moonlight: the
same architecture with other options; vl: Qwen2.5-VL, qwen3_vl: Qwen3-VL, sequences with and without images.
Tests: `tests/megatron/test_layouts.py`, `tests/megatron/test_vl.py` (limit: 2e-5).

`python -m benchmarks.numerics parity{command}`

"""


@dataclass(frozen=True)
class Difference:
    log_prob: float  # max |trainer's - transformers'| over all tokens
    entropy: float
    exact: bool  # the exported tensors equal the original tensors


def parity(short: bool) -> str:
    """Return the section; `short`: only the cases that are not slow."""
    layouts, options, vl = ([case for case in cases if not (short and case["slow"])] for cases in (PARITY, OPTIONS, VL))
    every = [*layouts, *options, *vl]
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        for model in MODELS:
            write_model(model, directory / "models")
        for model in VL_MODELS:
            write_vl_model(directory / "models" / model, model)
        for processes in sorted({case["processes"] for case in every}):
            selected = [case for case in every if case["processes"] == processes]
            launch(processes, selected, directory, timeout=2 * 3600)
        results = {case["name"]: difference(case, directory) for case in every}
    plain = {case["name"] for case in [*layouts, *vl]} & {f"{m}-{x}" for m in [*MODELS, *VL_MODELS] for x in LAYOUTS}
    introduction = PARITY_PAGE.format(
        layouts=len({case["name"].split("-")[1] for case in every}),
        options=len(results) - len(plain),
        option=max(value.log_prob for name, value in results.items() if name not in plain),
        count=len(results),
        log_prob=max(value.log_prob for value in results.values()),
        entropy=max(value.entropy for value in results.values()),
        exact=sum(value.exact for value in results.values()),
        command=" --quick" if short else "",
    )
    return introduction + table(results)


def difference(case: dict[str, Any], directory: Path) -> Difference:
    path = directory / "models" / case["model"]
    expected = vl_of_transformers(path) if case["model"] in VL_MODELS else of_transformers(path)
    rows = log_probs_of(directory, case["name"])
    assert sorted(rows) == list(range(len(expected))), "a sequence is missing"
    original, exported = checkpoint_tensors(path), checkpoint_tensors(directory / f"{case['name']}.hf")
    largest = [
        max((rows[i][part] - reference[part]).abs().max().item() for i, reference in enumerate(expected))
        for part in (0, 1)
    ]
    return Difference(
        largest[0],
        largest[1],
        exact=exported.keys() == original.keys()
        and all(torch.equal(exported[name], weight) for name, weight in original.items()),
    )


def table(results: dict[str, Difference]) -> str:
    models = [*MODELS, *VL_MODELS]
    lines = ["| layout | " + " | ".join(models) + " |", "|---" * (len(models) + 1) + "|"]
    for layout in LAYOUTS:
        of_models = [results.get(f"{model}-{layout}") for model in models]
        if any(of_models):
            cells = [f"{value.log_prob:.1e}" if value else "-" for value in of_models]
            lines.append(" | ".join([f"| {layout}", *cells]) + " |")
    return "\n".join(lines) + "\n"
