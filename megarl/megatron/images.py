"""Images and videos in a micro batch: the location of their tokens, and the position ids of all tokens.

A vision tower reads images as patches and returns one row per square of ``merge`` x ``merge`` patches; each row replaces
the embedding of one placeholder token. Images are located by index, so a placeholder token that the policy sampled is text.

Position ids have three axes (time, row, column): text advances on all three, an image has constant time and its grid's rows
and columns, and text after it continues after its largest position (M-RoPE, Qwen2-VL, arXiv 2409.12191). A video of Qwen2.5-VL is an
image of several time steps; their times are seconds x `tokens_per_second`, rounded down (arXiv 2502.13923). Each time step of a video
of Qwen3-VL is a separate image: its timestamp is text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from megarl.types import SampleImages


@dataclass(frozen=True)
class ImageLayout:
    """Image geometry of a model's vision tower."""

    merge: int  # patches per side of the square that becomes one token
    patch: int  # pixels per side of a patch
    patch_values: int  # values per patch: channels x frames x height x width
    tokens_per_second: float | None = None  # time positions per second of a video; None: every image has one time step


@dataclass
class Images:
    """Images of a micro batch, in token order.

    Example: the second sequence has one image of 4 x 6 patches; its 6 tokens start at index 2:
    ``Images(pixels=tensor [24, 1176], grids=tensor([[1, 4, 6]]), sequences=[1], starts=[2])``.
    """

    pixels: torch.Tensor  # float32 [patches of all images, values per patch]
    grids: torch.Tensor  # int64 [images, 3]: time steps, rows and columns of patches
    sequences: list[int]  # [images]: index of the image's sequence
    starts: list[int]  # [images]: index, within its sequence, of the image's first token
    seconds: list[float] | None = None  # [images]: from time step to time step; None: every image has one step

    def __post_init__(self) -> None:
        assert len(self.grids) == len(self.sequences) == len(self.starts), (self.grids, self.sequences, self.starts)
        order = list(zip(self.sequences, self.starts, strict=True))
        assert order == sorted(order), f"images are not in the order of their tokens: {order}"

    @classmethod
    def of(cls, samples: Sequence[SampleImages | None]) -> Images | None:
        """Join the images of a micro batch's sequences; None if there are none."""
        present = [(i, images) for i, images in enumerate(samples) if images is not None]
        if not present:
            return None
        return cls(
            torch.from_numpy(np.concatenate([images.pixels for _, images in present])),
            torch.from_numpy(np.concatenate([images.grids for _, images in present])),
            [i for i, images in present for _ in images.starts],
            [int(start) for _, images in present for start in images.starts],
            _joined_seconds([images for _, images in present]),
        )


def _joined_seconds(samples: Sequence[SampleImages]) -> list[float] | None:
    if all(images.seconds is None for images in samples):
        return None
    seconds: list[float] = np.concatenate([images.seconds_or_zeros for images in samples]).tolist()
    return seconds


@dataclass(frozen=True)
class StreamImages:
    """Images for one context-parallel rank, and the stream indices that receive the vision tower's rows."""

    pixels: torch.Tensor  # float32 [patches, values per patch]
    grids: torch.Tensor  # int64 [images, 3]
    rows: torch.Tensor  # int64 [k]: the tower's rows that replace tokens of this rank
    places: torch.Tensor  # int64 [k]: their indices in this rank's part of the stream


def check_images(images: Images, tokens: torch.Tensor, lengths: list[int], layout: ImageLayout | None) -> None:
    """Check that images, patches and placeholder tokens match. Raises ValueError.

    `layout`: of the model; None for a text-only model.
    """
    if layout is None:
        raise ValueError("The batch has images, and the model has no vision tower that reads them.")
    if images.pixels.shape[1:] != (layout.patch_values,):
        raise ValueError(
            f"Patches hold {list(images.pixels.shape[1:])} numbers, the model's have {layout.patch_values}: the images "
            "were prepared for another model."
        )
    if len(images.pixels) != int(images.grids.prod(1).sum()):
        raise ValueError(f"{len(images.pixels)} patches do not make images of {images.grids.tolist()} patches.")
    if images.seconds is None and int(images.grids[:, 0].max()) > 1:
        raise ValueError(f"Videos of {images.grids.tolist()} patches have no seconds between their time steps.")
    offsets = torch.tensor([0, *lengths]).cumsum(0).tolist()
    free = [0] * len(lengths)  # end of the last image of each sequence
    for sequence, start, (steps, rows, columns) in zip(
        images.sequences, images.starts, images.grids.tolist(), strict=True
    ):
        if steps > 1 and layout.tokens_per_second is None:
            raise ValueError(
                f"A video of {steps} x {rows} x {columns} patches: in this model every time step is a separate image."
            )
        if rows % layout.merge or columns % layout.merge:
            raise ValueError(
                f"An image of {steps} x {rows} x {columns} patches: rows and columns must be multiples of {layout.merge}."
            )
        count = steps * rows * columns // layout.merge**2
        here = tokens[offsets[sequence] : offsets[sequence + 1]][start : start + count]
        if start < free[sequence] or len(here) != count or len(here.unique()) != 1:
            raise ValueError(
                f"An image of {steps} x {rows} x {columns} patches takes {count} placeholder tokens from index {start} on; its "
                f"sequence of {lengths[sequence]} tokens has {here.tolist()} there, images before it end at "
                f"{free[sequence]}."
            )
        free[sequence] = start + count


def positions_of(
    length: int, starts: list[int], grids: list[list[int]], merge: int, intervals: Sequence[float]
) -> torch.Tensor:
    """Return position ids [3, length] (time, row, column) of a sequence with images at `starts`.

    `intervals`: time positions from step to step of each image, in double precision as vLLM computes them.
    """
    parts, token, position = [], 0, 0
    for start, (steps, rows, columns), interval in zip(starts, grids, intervals, strict=True):
        parts.append((position + torch.arange(start - token)).expand(3, -1))
        position += start - token
        high, wide = rows // merge, columns // merge
        times = (torch.arange(steps, dtype=torch.float64) * interval).long()
        axes = torch.meshgrid(times, torch.arange(high), torch.arange(wide), indexing="ij")
        parts.append(position + torch.stack(axes).flatten(1))
        token = start + steps * high * wide
        position += max(int(times[-1]) + 1, high, wide)
    parts.append((position + torch.arange(length - token)).expand(3, -1))
    return torch.cat(parts, 1)


def batch_positions(images: Images | None, lengths: list[int], layout: ImageLayout) -> torch.Tensor:
    """Return position ids [3, tokens] of a micro batch; every sequence counts from 0."""
    if images is None:
        return torch.cat([positions_of(length, [], [], layout.merge, []) for length in lengths], 1)
    grids, per_second = images.grids.tolist(), layout.tokens_per_second or 0.0
    intervals = [seconds * per_second for seconds in images.seconds or [0.0] * len(grids)]
    by_sequence: list[list[int]] = [[] for _ in lengths]
    for i, sequence in enumerate(images.sequences):
        by_sequence[sequence].append(i)
    return torch.cat(
        [
            positions_of(
                length,
                [images.starts[i] for i in mine],
                [grids[i] for i in mine],
                layout.merge,
                [intervals[i] for i in mine],
            )
            for length, mine in zip(lengths, by_sequence, strict=True)
        ],
        1,
    )


def batch_places(images: Images, lengths: list[int], layout: ImageLayout) -> torch.Tensor:
    """Return the micro-batch index of the token that each row of the vision tower replaces, int64 [rows]."""
    offsets = torch.tensor([0, *lengths]).cumsum(0).tolist()
    counts = images.grids.prod(1) // layout.merge**2  # tokens of each image
    ends = torch.tensor([0, *counts.tolist()]).cumsum(0).tolist()
    return torch.cat(
        [
            offsets[sequence] + start + torch.arange(end - begin)
            for sequence, start, (begin, end) in zip(images.sequences, images.starts, pairwise(ends), strict=True)
        ]
    )


def patch_places(rows: int, columns: int, merge: int) -> torch.Tensor:
    """Return row and column of each patch of an image, int64 [patches, 2], in the stream's order: square by square."""
    grid = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), -1)
    squares = grid.view(rows // merge, merge, columns // merge, merge, 2)
    return squares.transpose(1, 2).reshape(-1, 2)


def patch_angles(places: torch.Tensor, size: int) -> torch.Tensor:
    """Return rotary angles [patches, size] of a tower's heads of `size`: a quarter by row, a quarter by column, and both again."""
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, size // 2, 2, dtype=torch.float32) / (size // 2))
    return (places.unsqueeze(-1) * frequencies).flatten(1).repeat(1, 2)


def interpolation(places: torch.Tensor, limits: torch.Tensor, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices and weights [patches, 4] of the learned positions around each patch.

    The learned positions are a square of `side` x `side`, with the image's corner patches in its corners. `places`: int64
    [patches, 2], row and column of each patch; `limits`: the same shape, rows and columns of its image.
    """
    exact = places * ((side - 1) / (limits - 1).clamp(min=1).float())
    low = exact.long().clamp(max=side - 1)
    high, part = (low + 1).clamp(max=side - 1), exact - low
    rows, columns = (torch.stack([low[:, axis], high[:, axis]], 1) for axis in (0, 1))
    of_rows, of_columns = (torch.stack([1 - part[:, axis], part[:, axis]], 1) for axis in (0, 1))
    indices = rows.unsqueeze(2) * side + columns.unsqueeze(1)
    return indices.flatten(1), (of_rows.unsqueeze(2) * of_columns.unsqueeze(1)).flatten(1)
