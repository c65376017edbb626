"""AdamW with the state layout that Megatron's distributed optimizer expects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

_AT_A_TIME = 2**26  # elements per fused update: 256 MiB of float32 temporaries


class Adam(torch.optim.Optimizer):
    """AdamW with `step` in the parameter group and `exp_avg`, `exp_avg_sq` per parameter.

    This is the state layout of apex's and Transformer Engine's fused Adam. Megatron's checkpoints of a distributed
    optimizer require it: they cannot hold the per-parameter `step` tensors of torch.optim.AdamW. `adam_w_mode=False`
    adds the decay to the gradient instead (L2 regularisation).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every parameter that has a gradient."""
        assert closure is None, "Megatron computes gradients before the step"
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None and p.numel() > 0]
            if params:
                self._update(group, params)

    def _update(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p].update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        for batch in _batches([(p, p.grad, *self._moments(p)) for p in params], _AT_A_TIME):
            self._update_batch(group, *batch)

    def _moments(self, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]

    def _update_batch(
        self,
        group: dict[str, Any],
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        means: list[torch.Tensor],
        squares: list[torch.Tensor],
    ) -> None:
        beta1, beta2 = group["betas"]
        lr, decay, step = group["lr"], group["weight_decay"], group["step"]
        if decay and self.adam_w_mode:
            torch._foreach_mul_(params, 1 - lr * decay)
        elif decay:
            grads = torch._foreach_add(grads, params, alpha=decay)
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        correction1, correction2 = (1 - beta1**step, 1 - beta2**step) if group["bias_correction"] else (1.0, 1.0)
        denominators = torch._foreach_sqrt(squares)
        torch._foreach_div_(denominators, correction2**0.5)
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_addcdiv_(params, means, denominators, -lr / correction1)


def _batches(rows: Iterable[tuple[Any, ...]], most: int) -> Iterator[tuple[list[torch.Tensor], ...]]:
    """Split rows of equally shaped tensors into flat parts, and yield them as columns of at most `most` elements in all."""
    batch: list[tuple[torch.Tensor, ...]] = []
    used = 0
    for row in rows:
        for parts in zip(*(tensor.view(-1).split(most) for tensor in row), strict=True):
            if batch and used + parts[0].numel() > most:
                yield tuple(map(list, zip(*batch, strict=True)))
                batch, used = [], 0
            batch.append(parts)
            used += parts[0].numel()
    if batch:
        yield tuple(map(list, zip(*batch, strict=True)))
