"""Compare the adapters that engines receive with the merged exported weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from megarl.megatron.lora.attach import Lora
from megarl.weight_sync.session import abbreviate_names

Named = tuple[str, torch.Tensor]


def verify_merge(lora: Lora, export: Callable[[list[Any]], Iterator[Named]], matrices: dict[str, torch.Tensor]) -> None:
    """Check that base weights + `matrices` equal the merged weights. Collective.

    `export` yields the weights of chunks under their Hugging Face names. Rank 0 holds all `matrices` (PEFT's names) and
    raises RuntimeError with the names of the weights that differ.
    """
    scale = lora.settings.alpha / lora.settings.rank
    wrong = mismatched_weights(export(lora.base()), export(lora.merged()), matrices, scale)
    if wrong and torch.distributed.get_rank() == 0:
        raise RuntimeError(f"adapters of {abbreviate_names(wrong)} differ from the merged exported weights")


def mismatched_weights(
    base: Iterable[Named], merged: Iterable[Named], matrices: dict[str, torch.Tensor], scale: float
) -> list[str]:
    """Return names of weights for which `merged` is not `base` + `scale` B A, and of adapters without a weight.

    `matrices`: by PEFT's names. Consumes both exports in step.
    """
    wrong, left = [], dict.fromkeys(name.rsplit(".lora_", 1)[0] for name in matrices)
    for (name, weight), (other, expected) in zip(base, merged, strict=True):
        assert name == other, "both are exports of one model"
        linear = name.removesuffix(".weight")
        if linear not in left:
            same = torch.equal(weight, expected)
        else:
            del left[linear]
            a, b = (matrices[f"{linear}.lora_{kind}.weight"].to(weight.device).float() for kind in "AB")
            same = _close(weight, a, b, scale, expected)
        if not same:
            wrong.append(name)
    return wrong + list(left)


def _close(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, expected: torch.Tensor) -> bool:
    """Return whether weight + scale B A equals `expected` up to rounding.

    Tensor-parallel ranks multiply parts in another order: sums of `rank` products may differ by float32 rounding, and
    then round to either neighbour in the weights' type.
    """
    rounding = 2 * a.shape[0] * torch.finfo(torch.float32).eps * scale * (b.abs() @ a.abs())
    bound = rounding + torch.finfo(weight.dtype).eps * expected.float().abs()
    sums = (weight.float() + b @ a * scale).to(weight.dtype)
    return bool(((sums.float() - expected.float()).abs() <= bound).all())
