"""Expert choices of a micro batch, recorded for routing replay (routing_replay.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

UNKNOWN = -1
"""Stands for an expert that was not recorded (padding, or the last token, which an engine never reads): the router then
chooses freely."""


@dataclass
class Routing:
    """Expert choices of one micro batch for this rank's layers and rows.

    Either recorded by the trainer: routers fill `rows` while `recording` is set. Or recorded by an engine for full
    sequences: `tokens`, from which each layer's `rows` are cut on first use.
    """

    recording: bool = False
    tokens: torch.Tensor | None = None  # int16 [T, layers of the model, topk], at token index; may be UNKNOWN
    rows: dict[int, torch.Tensor] = field(default_factory=dict)  # layer number -> int16 [rows of this rank, topk]

    def of_layer(self, number: int, row_tokens: torch.Tensor) -> torch.Tensor:
        """Return experts [rows, topk] of layer `number` (from 1) for rows that hold `row_tokens` [rows] (-1: padding)."""
        if number not in self.rows:
            assert self.tokens is not None, f"layer {number} was not recorded"
            experts = self.tokens[:, number - 1].to(row_tokens.device)
            self.rows[number] = experts[row_tokens].masked_fill(row_tokens[:, None] < 0, UNKNOWN)
        return self.rows[number]
