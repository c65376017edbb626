"""Adapters as engines are sent them, held to the merged weights that mbridge exports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from megarl.megatron.lora.attach import Lora
from megarl.weight_sync.session import abbreviate_names

Named = tuple[str, torch.Tensor]


def hold_to_merged(
    lora: Lora, exported: Callable[[list[Any]], Iterator[Named]], matrices: dict[str, torch.Tensor]
) -> None:
    """RuntimeError on rank 0, which has all `matrices`, where these and the base weights do not make the merged ones.
    `exported`: weights of chunks, under their Hugging Face names. Collective."""
    scale = lora.settings.alpha / lora.settings.rank
    wrong = differing(exported(lora.base()), exported(lora.merged()), matrices, scale)
    if wrong and torch.distributed.get_rank() == 0:
        raise RuntimeError(
            f"adapters of {abbreviate_names(wrong)} are not what merged weights contain, as mbridge exports them"
        )


def differing(
    base: Iterable[Named], merged: Iterable[Named], matrices: dict[str, torch.Tensor], scale: float
) -> list[str]:
    """Names of weights that are not `base` + `scale` B A in `merged`; of adapters that are no weight's. `matrices`: by PEFT's
    names. Takes all of both exports, in step."""
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
    """Tensor-parallel ranks multiply parts, in another order: sums of `rank` products may differ by their rounding in
    float32, and be rounded to the weights' type to the one side or the other."""
    rounding = 2 * a.shape[0] * torch.finfo(torch.float32).eps * scale * (b.abs() @ a.abs())
    bound = rounding + torch.finfo(weight.dtype).eps * expected.float().abs()
    made = (weight.float() + b @ a * scale).to(weight.dtype)
    return bool(((made.float() - expected.float()).abs() <= bound).all())
