"""The fingerprint notices every small change that a broken transport could make."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.exchange.fingerprint import _ROW_WORDS, VersionFingerprint, fingerprint

ROW = 8 * _ROW_WORDS  # bytes


def random_bytes(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


sizes = st.integers(1, 5 * ROW + 123)


@settings(max_examples=60, deadline=None)
@given(size=sizes, seed=st.integers(0, 3), data=st.data())
def test_flipped_bit(size, seed, data):
    memory = random_bytes(size, seed)
    before = fingerprint(memory)
    assert fingerprint(memory.copy()) == before
    memory[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert fingerprint(memory) != before


@settings(max_examples=100, deadline=None)
@given(data=st.data(), sign_only=st.booleans())
def test_two_values_swapped(data, sign_only):
    """Also x and -x, which differ in a word's top bit alone: a weighted sum would miss half of them."""
    words = random_bytes(3 * ROW).view(np.int64)
    first = data.draw(st.integers(0, len(words) - 2))
    second = data.draw(st.integers(first + 1, len(words) - 1))
    words[second] = words[first] ^ np.int64(-(2**63)) if sign_only else words[first] + 1
    before = fingerprint(words.view(np.uint8))
    words[first], words[second] = words[second], words[first]
    assert fingerprint(words.view(np.uint8)) != before


@settings(max_examples=40, deadline=None)
@given(start=st.integers(0, 40), target=st.integers(0, 40), length=st.integers(1, 20))
def test_moved_zero_block(start, target, length):
    """A block of zeros in constant data at another place, whole rows and pieces of 1/8 row alike."""
    if start == target:
        return
    piece = ROW // 8
    one, other = (np.full(64 * piece, 7, np.uint8) for _ in range(2))
    one[start * piece : (start + length) * piece] = 0
    other[target * piece : (target + length) * piece] = 0
    assert fingerprint(one) != fingerprint(other)


def test_rows_in_another_order_and_length():
    memory = random_bytes(20 * ROW).reshape(20, ROW)
    assert fingerprint(memory.ravel()) != fingerprint(np.roll(memory, 1, axis=0).ravel())
    zeros = np.zeros(3 * ROW, np.uint8)
    assert len({fingerprint(zeros[:n]) for n in (0, 1, 8, ROW, ROW + 8, 2 * ROW)}) == 6


def test_two_values_swapped_in_a_row_or_in_a_column():
    """Either kind of sum is blind to one of the two. In any block, not only in the first."""
    words = random_bytes(300 * ROW).view(np.int64).reshape(300, -1)
    before = fingerprint(words.view(np.uint8).ravel())
    for one, other in (((3, 4), (3, 77)), ((3, 4), (290, 4)), ((290, 0), (290, 1)), ((0, 9), (1, 9))):
        words[one], words[other] = words[other], words[one]
        assert fingerprint(words.view(np.uint8).ravel()) != before
        words[one], words[other] = words[other], words[one]
    assert fingerprint(words.view(np.uint8).ravel()) == before


def test_version_counts_headers_and_order():
    def of(*buckets):
        total = VersionFingerprint()
        for tensors, value in buckets:
            total.add(tensors, value)
        return total.hexdigest()

    assert of(("a", "1"), ("b", "2")) == of(("a", "1"), ("b", "2"))
    assert len({of(("a", "1"), ("b", "2")), of(("b", "2"), ("a", "1")), of(("b", "1"), ("a", "2"))}) == 3
