"""Reference results of the four tiny models, computed by transformers in float64; `tests/support/make_goldens.py` writes them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "golden_files"
STEPS = 2
LEARNING_RATE, EPSILON, CLIP_GRAD, BETAS = 1e-2, 1e-2, 1.0, (0.9, 0.999)
"""Settings of the optimizer steps. With a large epsilon, Adam does not amplify rounding errors of the gradient."""


@dataclass(frozen=True)
class Golden:
    """Reference results of one model.

    log_probs, log_probs_after: [T] float64, before and after the optimizer steps, 0 for the first token of a sequence.
    sketches [layers, SKETCHES], squares [layers]: projections and the sum of squares of each layer's output.
    grad_norms: gradient norm of each step before clipping. tensor_norms: norms of the first step's clipped gradients.
    """

    log_probs: np.ndarray
    log_probs_after: np.ndarray
    sketches: np.ndarray
    squares: np.ndarray
    grad_norms: tuple[float, ...]
    tensor_norms: dict[str, float]


def read_golden(family: str) -> Golden:
    from safetensors import safe_open

    with safe_open(FOLDER / f"{family}.safetensors", framework="numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - the file is not a mapping
        names = json.loads(file.metadata()["tensors"])
    tensor_norms = dict(zip(names, arrays.pop("tensor_norms").tolist(), strict=True))
    grad_norms = tuple(arrays.pop("grad_norms").tolist())
    return Golden(**arrays, grad_norms=grad_norms, tensor_norms=tensor_norms)
