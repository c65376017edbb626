"""Word-sum fingerprints, which devices compute: their sensitivity, and the device that computes them."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megarl.weight_sync import fingerprint
from megarl.weight_sync.fingerprint import Fingerprinter, WordSumFingerprint, word_sums
from megarl.weight_sync.sharded.copy import StreamCopier
from megarl.weight_sync.sharded.plan import COPY_COLUMNS


def plain(data: bytes) -> list[int]:
    words = [int.from_bytes(data[at : at + 4].ljust(4, b"\0"), "little", signed=True) for at in range(0, len(data), 4)]
    sums = sum(words), sum((2 * place + 1) * word for place, word in enumerate(words))
    return [(value + 2**63) % 2**64 - 2**63 for value in sums]


@pytest.mark.parametrize("size", [1, 2, 4, 6, 63, 4096, 40_002])
def test_word_sums_equal_the_slow_reference(monkeypatch, size):
    data = random.Random(size).randbytes(size)
    memory = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    assert word_sums(memory).tolist() == plain(data)
    monkeypatch.setattr(fingerprint, "SUM_WORDS", 7)
    assert word_sums(memory).tolist() == plain(data), "in pieces"


def test_a_flipped_bit_and_swapped_words_change_the_sums():
    chance = random.Random(1)
    memory = torch.frombuffer(bytearray(chance.randbytes(4096)), dtype=torch.uint8)
    before = WordSumFingerprint(memory, filled=True).result()
    assert len(before) == 32
    for _ in range(200):
        byte, bit = chance.randrange(4096), 1 << chance.randrange(8)
        memory[byte] ^= bit
        assert WordSumFingerprint(memory, filled=True).result() != before
        memory[byte] ^= bit
    words = memory.view(torch.int32)
    for _ in range(200):
        first, second = chance.sample(range(1024), 2)
        words[second] = words[first] ^ torch.tensor(
            -(2**31), dtype=torch.int32
        )  # x and -x, which plain sums may not distinguish
        unswapped = WordSumFingerprint(memory, filled=True).result()
        words[[first, second]] = words[[second, first]]
        assert WordSumFingerprint(memory, filled=True).result() != unswapped


def test_sums_of_unfilled_memory_are_computed_at_the_end():
    fingerprinter = Fingerprinter(on_device=True)
    memory = torch.zeros(64, dtype=torch.uint8)
    passing, started = fingerprinter.streaming(memory), fingerprinter.start(memory)
    memory[:] = 3
    passing.advance(64)
    assert passing.result() == WordSumFingerprint(memory, filled=True).result() != started.result()
    fingerprinter.close()


@pytest.mark.parametrize("on_device", [True, False])
def test_sums_of_network_buckets_are_computed_on_the_device(monkeypatch, on_device):
    """On a host, word sums are a hundred times slower than XXH3."""
    copies = np.array([[0] * COPY_COLUMNS.index("bucket") + [0, 0, 0, 0, 4, 2, 2]])
    stream = SimpleNamespace(dtype="float32", bucket_elements=[4], copies=copies)
    read: list[str] = []
    fingerprints = Fingerprinter(on_device=on_device)
    monkeypatch.setattr(fingerprints, "start", lambda memory: read.append(memory.device.type))
    parameter = torch.zeros(8, device="meta")
    StreamCopier(stream).unpack(0, torch.zeros(16, dtype=torch.uint8), [parameter].__getitem__, fingerprints)  # type: ignore[arg-type]
    assert read == ["meta" if on_device else "cpu"]
    fingerprints.close()
