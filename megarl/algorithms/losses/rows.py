"""Losses of tokens that read many numbers of each token, computed for some tokens at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

RowLoss = Callable[["Tensor", "Tensor"], "Tensor"]  # (variable [R, K], constant [R, K]) -> losses [R]

ROWS = 4096  # tokens at a time: few enough that their temporaries are small, many enough that calls are rare


def by_rows(variable: Tensor, constant: Tensor, loss: RowLoss) -> Tensor:
    """Return `loss` of `variable` and `constant`, both [T, K], computed for `ROWS` tokens at a time: [T].

    The loss of a token may read only its row. The gradient with respect to `variable` is computed in the forward pass, so that
    between the passes one tensor [T, K] is kept instead of every intermediate one. `constant` gets no gradient.
    """
    import torch

    class RowLosses(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, rows: Tensor) -> Tensor:
            losses = rows.new_empty(len(rows), dtype=torch.promote_types(rows.dtype, constant.dtype))
            slopes = torch.empty_like(rows) if context.needs_input_grad[0] else None
            for start in range(0, len(rows), ROWS):
                part = slice(start, start + ROWS)
                with torch.set_grad_enabled(slopes is not None):
                    some = rows[part].detach().requires_grad_(slopes is not None)
                    values = loss(some, constant[part])
                    if slopes is not None:
                        (slopes[part],) = torch.autograd.grad(values.sum(), some)
                losses[part] = values.detach()
            if slopes is not None:
                context.save_for_backward(slopes)
            return losses

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> Tensor:
            (slopes,) = context.saved_tensors
            return (slopes * gradient[:, None]).to(slopes.dtype)

    return RowLosses.apply(variable)
