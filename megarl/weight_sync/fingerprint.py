"""Fingerprints of raw bytes: did the receiver get what the sender packed?

In the host's memory XXH3 (https://github.com/Cyan4973/xxHash): faster than memory is read, so that every bucket of every
update can be held to it. Where buckets never leave the devices, sums of words, which a device computes. Both guard
transport against errors, not against an adversary.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import xxhash

from megarl.weight_sync.session import WORDS

PIECE = 512 * 1024  # bytes: half of what a core has for itself


def fingerprint(data: np.ndarray) -> str:
    """The fingerprint of `data` (uint8, one-dimensional, contiguous) as 16 hexadecimal digits. Other threads run meanwhile."""
    if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
        raise ValueError(f"fingerprint wants contiguous uint8 [n], not {data.dtype} {list(data.shape)}")
    return xxhash.xxh3_64_hexdigest(data.data)


class StreamingFingerprint:
    """The fingerprint of memory that the CPU goes through anyway, from its start to its end: taken piece by piece, while a piece
    is in its cache, which costs about half of reading all of it once more (measured: docs/exchange.md)."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._data, self._taken, self._state = memory.numpy(), 0, xxhash.xxh3_64()

    def reached(self, byte: int) -> None:
        """Everything before `byte` has its value, and is in the cache, or about to be needed there."""
        if byte - self._taken >= PIECE or byte == len(self._data):
            self._state.update(self._data[self._taken : byte].data)
            self._taken = byte

    def result(self) -> str:
        """As `fingerprint` of the whole."""
        self.reached(len(self._data))
        return self._state.hexdigest()


def word_sums(memory: torch.Tensor) -> torch.Tensor:
    """Two sums modulo 2**64 over the 32-bit words w of `memory` (uint8 [n], on any device): of w[i], and of (2 i + 1) w[i].
    int64 [2]. The end is filled up with zeros.

    A change of one word, or of two, changes them: an odd factor has an inverse, and two changes that leave the first sum leave
    a difference below 2**64 in the second. Data that is moved or left from before changes them but for one case in 2**64.
    """
    whole = len(memory) // 4 * 4
    words, rest = memory[:whole].view(torch.int32), memory[whole:]
    if len(rest):
        filled = torch.zeros(4, dtype=torch.uint8, device=memory.device)
        filled[: len(rest)] = rest
        words = torch.cat([words, filled.view(torch.int32)])
    sums = torch.zeros(2, dtype=torch.int64, device=memory.device)
    for start in range(0, len(words), WORDS):
        piece = words[start : start + WORDS].to(torch.int64)
        places = torch.arange(start, start + len(piece), dtype=torch.int64, device=memory.device)
        sums += torch.stack([piece.sum(), (piece * (2 * places + 1)).sum()])
    return sums


class WordSumFingerprint:
    """The fingerprint of memory as `word_sums` has it, known when its device has computed it."""

    def __init__(self, memory: torch.Tensor, *, filled: bool) -> None:
        """`filled`: whether what is queued on the device fills `memory`; else all is there when `result` is asked for."""
        self._memory, self._sums = memory, word_sums(memory) if filled else None

    def reached(self, byte: int) -> None:
        """As `StreamingFingerprint.reached`; all is read at the end."""

    def result(self) -> str:
        sums = word_sums(self._memory) if self._sums is None else self._sums
        return "".join(f"{value % 2**64:016x}" for value in sums.tolist())


Fingerprint = StreamingFingerprint | WordSumFingerprint | Future[str]


class Fingerprints:
    """Of buckets, one way or another."""

    def __init__(self, *, on_device: bool = False) -> None:
        """`on_device`: sums of words, which every device computes alike, in place of XXH3."""
        self.on_device = on_device
        self._thread = ThreadPoolExecutor(1, "megarl-fingerprint")
        self._host = torch.empty(0, dtype=torch.uint8, device="cpu")  # what is on a device is read here
        self._stream: Any = None

    def passing(self, memory: torch.Tensor) -> StreamingFingerprint | WordSumFingerprint:
        """Of `memory` (uint8, contiguous, on the host), for who copies all of it to tell of."""
        return WordSumFingerprint(memory, filled=False) if self.on_device else StreamingFingerprint(memory)

    def beside(self, memory: torch.Tensor) -> WordSumFingerprint | Future[str]:
        """Of `memory` (uint8, contiguous, on any device), as this thread's stream will have left it; in a thread of its own,
        or on that stream. Nothing may write there until it is known."""
        if self.on_device:
            return WordSumFingerprint(memory, filled=True)
        if memory.device.type == "cpu":
            return self._thread.submit(fingerprint, memory.numpy())
        written = torch.get_device_module(memory.device).Event()
        written.record()
        return self._thread.submit(self._of_device, memory, written)

    def _of_device(self, memory: torch.Tensor, written: Any) -> str:
        devices = torch.get_device_module(memory.device)
        devices.set_device(memory.device)  # a thread's own affair
        if self._stream is None:  # what is packed next is on the other one
            self._stream = devices.Stream()
        if len(memory) > len(self._host):  # pinned, which is read into at the full speed of the bus
            self._host = torch.empty(len(memory), dtype=torch.uint8, device="cpu", pin_memory=True)
        host = self._host[: len(memory)]
        with devices.stream(self._stream):
            self._stream.wait_event(written)
            host.copy_(memory, non_blocking=True)
        self._stream.synchronize()
        return fingerprint(host.numpy())

    def close(self) -> None:
        self._thread.shutdown()


class VersionFingerprint:
    """The fingerprint of a whole version: of its buckets' headers and fingerprints, in order."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=8)

    def add(self, tensors: str, bucket_fingerprint: str) -> None:
        """`tensors` is the canonical text of what the bucket holds: names, types and shapes."""
        self._digest.update(f"{tensors}\n{bucket_fingerprint}\n".encode())

    def hexdigest(self) -> str:
        return self._digest.hexdigest()
