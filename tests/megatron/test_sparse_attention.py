"""Keys that the indexer of sparse attention selects."""

from __future__ import annotations

import pytest
import torch

from megarl.megatron.model.sparse_attention import IndexStreams, selected_keys


def streams(queries: int, keys: int, heads: int = 11, size: int = 8) -> IndexStreams:
    generator = torch.Generator().manual_seed(5)
    shapes = (2, queries, heads, size), (2, queries, heads), (2, keys, size)
    return IndexStreams(*(torch.randn(shape, generator=generator) for shape in shapes))


@pytest.mark.parametrize(("queries", "length"), [(9, 9), (4, 9)], ids=["all", "last"])
def test_the_largest_scores_are_selected(queries: int, length: int) -> None:
    """Scores of each pair alone: the sum over heads of weight * relu(q k / sqrt(size))."""
    index = streams(queries, length)
    mask = selected_keys(index, 3)
    for sequence in range(2):
        for query in range(queries):
            last = length - queries + query
            scores = [
                sum(
                    index.weight[sequence, query, head]
                    * torch.relu(index.query[sequence, query, head] @ index.key[sequence, key] * 8**-0.5)
                    for head in range(11)
                )
                for key in range(last + 1)
            ]
            best = sorted(range(last + 1), key=lambda key: -float(scores[key]))[:3]
            assert mask[sequence, query].nonzero().flatten().tolist() == sorted(best)


def test_few_keys_are_all_selected() -> None:
    expected = torch.ones(5, 5, dtype=torch.bool).tril().expand(2, -1, -1)
    assert torch.equal(selected_keys(streams(5, 5), 5), expected)


def test_a_query_sees_no_later_key() -> None:
    """The first queries see fewer keys than are selected: the mask has all of these and no others."""
    mask = selected_keys(streams(9, 9), 4)
    assert mask.sum(-1).tolist() == [[1, 2, 3, 4, 4, 4, 4, 4, 4]] * 2
    assert not mask.triu(1).any()
