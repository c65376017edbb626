"""Images among packed tokens: positions, places and rejected inputs, against transformers and by hand."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from megarl.megatron.batch import MicroBatch, pack
from megarl.megatron.images import (
    ImageLayout,
    Images,
    batch_positions,
    interpolation,
    patch_angles,
    patch_places,
    positions_of,
)
from megarl.types import SampleImages

LAYOUT = ImageLayout(merge=2, patch=1, patch_values=3)
IMAGE = 9


def test_positions_worked_by_hand() -> None:
    """Two words, an image of 2 x 3 tokens, two words: the last two continue after the longer side."""
    assert positions_of(10, [2], [[1, 4, 6]], 2, [0.0]).tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]


def test_positions_of_a_video_worked_by_hand() -> None:
    """A word, a video of 3 steps of 1 x 2 tokens, a word. 1.5 positions from step to step: times 0, 1 and 3; the word follows time 3."""
    assert positions_of(8, [1], [[3, 2, 4]], 2, [1.5]).tolist() == [
        [0, 1, 1, 2, 2, 4, 4, 5],
        [0, 1, 1, 1, 1, 1, 1, 5],
        [0, 1, 2, 1, 2, 1, 2, 5],
    ]


def bare_model(family: str) -> Any:
    """Return transformers' model without weights, for its `get_rope_index`."""
    from transformers import Qwen2_5_VLModel, Qwen3VLModel

    from tests.support.vl_model import VL_MODELS

    kind = {"vl": Qwen2_5_VLModel, "qwen3_vl": Qwen3VLModel}[family]
    model = kind.__new__(kind)
    torch.nn.Module.__init__(model)
    model.config = VL_MODELS[family]()
    return model


@pytest.mark.parametrize("family", ["vl", "qwen3_vl"])
def test_positions_equal_transformers(family: str) -> None:
    from tests.support.vl_model import IMAGE

    model = bare_model(family)
    drawn = random.Random(5)
    for _ in range(30):
        tokens, starts, grids = [5] * drawn.randint(0, 3), [], []
        for _ in range(drawn.randint(1, 4)):
            grids.append([1, 2 * drawn.randint(1, 5), 2 * drawn.randint(1, 5)])
            starts.append(len(tokens))
            tokens += [IMAGE] * (grids[-1][1] * grids[-1][2] // 4) + [5] * drawn.randint(1, 6)
        ids = torch.tensor([tokens])
        expected, _ = model.get_rope_index(
            ids, (ids == IMAGE).int(), torch.tensor(grids), None, attention_mask=torch.ones_like(ids)
        )
        assert torch.equal(positions_of(len(tokens), starts, grids, 2, [0.0] * len(grids)), expected[:, 0])


RATES = (0.5, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 24, 25, 30, 60)  # frames per second


@pytest.mark.parametrize("fps", RATES)
def test_positions_of_videos_equal_transformers(fps: float) -> None:
    """Qwen2.5-VL, images between two videos. transformers 5.19 continues after the longer side even if times are larger: the last text
    is compared without its offset."""
    from tests.support.vl_model import IMAGE, VIDEO

    tokens = [5, *[VIDEO] * 40 * 6, 5, *[IMAGE] * 4, 5, *[VIDEO] * 3, 5, 5]
    starts, grids = [1, 242, 247], [[40, 4, 6], [1, 4, 4], [3, 2, 2]]
    ids, seconds = torch.tensor([tokens]), torch.tensor([2 / fps, 3.3])
    expected, _ = bare_model("vl").get_rope_index(
        ids,
        (ids == IMAGE) + 2 * (ids == VIDEO).int(),
        torch.tensor(grids[1:2]),
        torch.tensor([grids[0], grids[2]]),
        second_per_grid_ts=seconds,
        attention_mask=torch.ones_like(ids),
    )
    images = Images(torch.zeros(0), torch.tensor(grids), [0, 0, 0], starts, [2 / fps, 0.0, 3.3])
    layout = ImageLayout(merge=2, patch=1, patch_values=3, tokens_per_second=2)
    positions = batch_positions(images, [len(tokens)], layout)
    assert torch.equal(positions[:, :241], expected[:, 0, :241])
    assert positions[:, 241].tolist() == [max(3, int(39 * 4 / fps) + 1) + 1] * 3, "after the largest position"
    for begin, end in ((241, 250), (250, 252)):
        ours, theirs = positions[:, begin:end], expected[:, 0, begin:end]
        assert torch.equal(ours - ours[:, :1], theirs - theirs[:, :1])


def test_a_time_step_of_a_video_has_the_positions_of_an_image() -> None:
    """Qwen3-VL: there is text before every time step, and no time positions."""
    from tests.support.vl_model import VIDEO

    tokens = [5, 5, *[VIDEO] * 6, 5, 5, *[VIDEO] * 6, 5]
    ids, grids = torch.tensor([tokens]), [[1, 4, 6], [1, 4, 6]]
    expected, _ = bare_model("qwen3_vl").get_rope_index(
        ids, 2 * (ids == VIDEO).int(), None, torch.tensor([[2, 4, 6]]), attention_mask=torch.ones_like(ids)
    )
    assert torch.equal(positions_of(len(tokens), [2, 10], grids, 2, [0.0, 0.0]), expected[:, 0])


def test_learned_positions_worked_by_hand() -> None:
    """Two rows and four columns over 3 x 3 learned positions, which the corners share; squares of 2 x 2 patches come in order."""
    places = patch_places(2, 4, merge=2)
    assert places.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    indices, weights = interpolation(places, torch.tensor([[2, 4]] * 8), side=3)
    positions = torch.arange(9.0)  # 3 x row + column
    expected = [0, 2 / 3, 6, 6 + 2 / 3, 4 / 3, 2, 6 + 4 / 3, 8]
    torch.testing.assert_close((positions[indices] * weights).sum(1), torch.tensor(expected))


@pytest.mark.parametrize("side", [6, 48])
def test_learned_positions_and_angles_equal_transformers(side: int) -> None:
    """Images with more and with fewer patches than learned positions, and an image of one row of squares."""
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionRotaryEmbedding
    from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

    from tests.support.vl_model import qwen3_config

    grids = torch.tensor([[1, 4, 6], [1, 2, 60], [1, 50, 8], [1, 48, 96]])
    table = torch.randn(side**2, 8, generator=torch.Generator().manual_seed(1))
    places = [patch_places(rows, columns, merge=2) for _, rows, columns in grids.tolist()]
    limits = grids[:, 1:].repeat_interleave(grids.prod(1), 0)
    indices, weights = interpolation(torch.cat(places), limits, side)
    theirs, their_weights = get_vision_interpolation_indices_and_weights(
        grids, side, align_corners=True, spatial_merge_size=2
    )
    expected = (table[theirs] * their_weights.unsqueeze(-1)).sum(1)
    torch.testing.assert_close((table[indices] * weights.unsqueeze(-1)).sum(1), expected, atol=1e-4, rtol=0)
    cos, sin = Qwen3VLVisionRotaryEmbedding(qwen3_config().vision_config)(table, get_vision_position_ids(grids, 2))
    angles = patch_angles(torch.cat(places), 32)
    torch.testing.assert_close(angles.cos(), cos)
    torch.testing.assert_close(angles.sin(), sin)


def batch() -> MicroBatch:
    """One text sequence, and one with images of 2 x 1 and 1 x 1 tokens. Its last image token was sampled, so it is text."""
    tokens = torch.tensor([1, IMAGE, 2, 3, IMAGE, IMAGE, 4, IMAGE, 5, IMAGE])
    pixels = torch.arange(12 * 3, dtype=torch.float32).view(12, 3)
    images = Images(pixels, torch.tensor([[1, 4, 2], [1, 2, 2]]), sequences=[1, 1], starts=[1, 4])
    return MicroBatch(tokens, [3, 7], images=images)


def test_positions_start_at_zero_and_sampled_placeholders_are_text() -> None:
    samples = batch()
    assert batch_positions(samples.images, samples.lengths, LAYOUT)[1].tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_rank_places_the_image_rows_of_its_tokens(ranks: int) -> None:
    """Together, the ranks place every row once, at its placeholder and with the placeholder's position."""
    seen = []
    for rank in range(ranks):
        stream = pack(
            batch(),
            context_parallel=ranks,
            context_rank=rank,
            sequence_parallel=2,
            device=torch.device("cpu"),
            image_layout=LAYOUT,
        )
        assert stream.positions.shape == (3, stream.share) and stream.images is not None
        for row, place in zip(stream.images.rows.tolist(), stream.images.places.tolist(), strict=True):
            assert stream.tokens[place] == IMAGE
            seen.append((row, stream.positions[:, place].tolist()))
    assert sorted(seen) == [(0, [1, 1, 1]), (1, [1, 2, 1]), (2, [4, 4, 4])]


def test_micro_batches_gather_their_samples_images() -> None:
    sample_images = SampleImages(np.ones((4, 3), np.float32), np.array([[1, 2, 2]]), np.array([7]))
    two = SampleImages(np.zeros((8, 3), np.float32), np.array([[1, 2, 2], [1, 2, 2]]), np.array([1, 3]))
    images = Images.of([None, sample_images, None, two])
    assert images is not None and (images.sequences, images.starts) == ([1, 3, 3], [7, 1, 3])
    assert images.pixels[:, 0].tolist() == [1.0] * 4 + [0.0] * 8 and images.grids.tolist() == [[1, 2, 2]] * 3
    assert Images.of([None, None]) is None and images.seconds is None
    video = SampleImages(np.ones((12, 3), np.float32), np.array([[3, 2, 2]]), np.array([1]), np.array([0.5]))
    images = Images.of([two, video])
    assert images is not None and images.seconds == [0.0, 0.0, 0.5] and images.grids[:, 0].tolist() == [1, 1, 3]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pixels": torch.zeros(12, 4)}, "prepared for another model"),
        ({"pixels": torch.zeros(11, 3)}, "11 patches"),
        ({"grids": torch.tensor([[2, 2, 2], [1, 2, 2]])}, "no seconds between their time steps"),
        (
            {"grids": torch.tensor([[2, 2, 2], [1, 2, 2]]), "seconds": [1.0, 0.0]},
            "A video of 2 x 2 x 2 patches: in this model every time step is a separate image",
        ),
        ({"grids": torch.tensor([[1, 8, 1], [1, 2, 2]])}, "multiples of 2"),
        ({"starts": [1, 5]}, r"takes 1 placeholder tokens from index 5 on; its sequence of 5 tokens has \[\]"),
        ({"starts": [0, 4]}, r"has \[3, 9\] there"),
        ({"starts": [1, 2]}, "images before it end at 3"),
    ],
)
def test_images_that_do_not_match_their_tokens_are_refused(change: dict[str, Any], words: str) -> None:
    samples = batch()
    assert samples.images is not None
    fields = {**vars(samples.images), **change}
    if change.get("starts") == [1, 5]:
        samples.lengths, samples.tokens = [3, 5], samples.tokens[:8]
    broken = MicroBatch(samples.tokens, samples.lengths, images=Images(**fields))
    with pytest.raises(ValueError, match=words):
        pack_plainly(broken, LAYOUT)


def test_images_for_a_model_without_vision_tower_are_refused() -> None:
    with pytest.raises(ValueError, match="no vision tower"):
        pack_plainly(batch(), None)


def pack_plainly(micro_batch: MicroBatch, layout: ImageLayout | None) -> None:
    cpu = torch.device("cpu")
    pack(micro_batch, context_parallel=1, context_rank=0, sequence_parallel=1, device=cpu, image_layout=layout)
