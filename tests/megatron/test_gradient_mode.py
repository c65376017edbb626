"""Exports leave the caller's gradient mode as it is: an update after two exports that overlap still has gradients."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megarl.megatron.export import without_gradients


def doubled() -> Iterator[torch.Tensor]:
    """Disable gradients while suspended, like mbridge's export."""
    with torch.no_grad():
        for value in (1.0, 2.0):
            yield torch.full((1,), value, requires_grad=False) * torch.ones(1, requires_grad=True)


def test_two_exports_that_overlap_leave_gradients_enabled() -> None:
    """The check of the first update with adapters reads merged weights while the base weights are exported."""
    first, second = without_gradients(doubled()), without_gradients(doubled())
    items = [next(first), next(second)]
    assert torch.is_grad_enabled(), "between two items"
    items += [*first, *second]
    assert torch.is_grad_enabled(), "after both"
    assert [item.item() for item in items] == [1.0, 1.0, 2.0, 2.0]
    assert not any(item.requires_grad for item in items)
