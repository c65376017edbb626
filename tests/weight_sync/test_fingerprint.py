"""The fingerprint notices every small change that a broken transport could make."""

import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.weight_sync.fingerprint import CHUNK_BYTES, StreamingFingerprint, VersionFingerprint, fingerprint

BLOCK = 1024  # bytes: a block of XXH3, longer than its short-input forms


def random_bytes(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 5 * BLOCK + 123), seed=st.integers(0, 3), data=st.data())
def test_flipped_bit(size, seed, data):
    memory = random_bytes(size, seed)
    before = fingerprint(memory)
    assert fingerprint(memory.copy()) == before and len(before) == 16
    memory[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert fingerprint(memory) != before


@settings(max_examples=100, deadline=None)
@given(data=st.data(), sign_only=st.booleans())
def test_two_values_swapped(data, sign_only):
    """Includes x and -x, which differ only in a word's top bit: weighted sums would miss half of these swaps."""
    words = random_bytes(3 * BLOCK).view(np.int64)
    first = data.draw(st.integers(0, len(words) - 2))
    second = data.draw(st.integers(first + 1, len(words) - 1))
    words[second] = words[first] ^ np.int64(-(2**63)) if sign_only else words[first] + 1
    before = fingerprint(words.view(np.uint8))
    words[first], words[second] = words[second], words[first]
    assert fingerprint(words.view(np.uint8)) != before


def test_moved_blocks_and_other_lengths_change_the_fingerprint():
    memory = random_bytes(20 * BLOCK).reshape(20, BLOCK)
    assert fingerprint(memory.ravel()) != fingerprint(np.roll(memory, 1, axis=0).ravel())
    zeros = np.zeros(3 * BLOCK, np.uint8)
    assert len({fingerprint(zeros[:n]) for n in (0, 1, 8, BLOCK, BLOCK + 8, 2 * BLOCK)}) == 6


def test_only_contiguous_bytes_are_accepted():
    for data in (np.zeros(8, np.float32), np.zeros((2, 4), np.uint8), np.zeros(8, np.uint8)[::2]):
        with pytest.raises(ValueError, match="contiguous uint8"):
            fingerprint(data)


def test_fingerprinting_releases_the_gil():
    """Fingerprinting releases the GIL, so that it overlaps with copying."""
    data, turns = np.zeros(1 << 30, np.uint8), []
    thread = threading.Thread(target=lambda: turns.append(fingerprint(data)))
    thread.start()
    counted = 0
    while thread.is_alive():
        time.sleep(0.001)
        counted += 1
    assert counted > 3 and turns


def test_version_fingerprint_depends_on_headers_and_order():
    def of(*buckets):
        total = VersionFingerprint()
        for tensors, value in buckets:
            total.add(tensors, value)
        return total.hexdigest()

    assert of(("a", "1"), ("b", "2")) == of(("a", "1"), ("b", "2"))
    assert len({of(("a", "1"), ("b", "2")), of(("b", "2"), ("a", "1")), of(("b", "1"), ("a", "2"))}) == 3


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 3 * CHUNK_BYTES), data=st.data())
def test_streaming_and_direct_fingerprints_are_equal(size, data):
    """A streaming fingerprint equals the direct one for any pieces, also without a last `advance` to the end."""
    memory = random_bytes(size)
    ends = sorted(data.draw(st.lists(st.integers(0, size), max_size=8)))
    passing = StreamingFingerprint(torch.from_numpy(memory))
    for end in ends:
        passing.advance(end)
    assert passing.result() == fingerprint(memory)


def test_streaming_reads_memory_at_each_advance():
    """Memory after the last `advance` is not read until a later `advance` covers it."""
    memory = torch.zeros(4 * CHUNK_BYTES, dtype=torch.uint8)
    passing = StreamingFingerprint(memory)
    memory[: 2 * CHUNK_BYTES] = 1
    passing.advance(2 * CHUNK_BYTES)
    memory[2 * CHUNK_BYTES :] = 2
    expected = fingerprint(memory.numpy())
    memory[:CHUNK_BYTES] = 7
    assert passing.result() == expected
