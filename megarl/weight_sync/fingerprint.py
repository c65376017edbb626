"""Fingerprints of bytes, which prove that a receiver got the bytes that the sender packed.

In host memory: XXH3 (https://github.com/Cyan4973/xxHash), faster than memory reads, so every bucket of every update is
checked. Where buckets stay on devices: sums of words, which the device computes. Both detect transport errors; neither
resists an adversary.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import xxhash

from megarl.weight_sync.session import SUM_WORDS

CHUNK_BYTES = 512 * 1024  # half of a core's private cache


def fingerprint(data: np.ndarray) -> str:
    """Return the fingerprint of `data` (uint8 [n], contiguous) as 16 hexadecimal digits. Releases the GIL."""
    if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
        raise ValueError(f"fingerprint takes contiguous uint8 [n], not {data.dtype} {list(data.shape)}")
    return xxhash.xxh3_64_hexdigest(data.data)


class StreamingFingerprint:
    """Fingerprint of memory that the CPU copies from start to end, hashed in chunks while they are in its cache.

    That costs about half of a separate read (measured: docs/weight_sync.md).
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._data, self._hashed, self._state = memory.numpy(), 0, xxhash.xxh3_64()

    def advance(self, byte: int) -> None:
        """Hash up to `byte`, or wait for a larger chunk. All bytes before it must have their final value."""
        if byte - self._hashed >= CHUNK_BYTES or byte == len(self._data):
            self._state.update(self._data[self._hashed : byte].data)
            self._hashed = byte

    def result(self) -> str:
        """Return the same digits as `fingerprint` of the whole memory."""
        self.advance(len(self._data))
        return self._state.hexdigest()


def word_sums(memory: torch.Tensor) -> torch.Tensor:
    """Return two sums modulo 2**64 over the 32-bit words w of `memory` (uint8 [n], any device): of w[i] and (2 i + 1) w[i].

    int64 [2]. Zeros pad the last word.

    A change of one or two words always changes the sums: an odd factor has an inverse, and two changes with equal first sums
    differ by less than 2**64 in the second. Moved or stale data goes undetected in one case of 2**64.
    """
    whole = len(memory) // 4 * 4
    words, rest = memory[:whole].view(torch.int32), memory[whole:]
    if len(rest):
        padded = torch.zeros(4, dtype=torch.uint8, device=memory.device)
        padded[: len(rest)] = rest
        words = torch.cat([words, padded.view(torch.int32)])
    sums = torch.zeros(2, dtype=torch.int64, device=memory.device)
    for start in range(0, len(words), SUM_WORDS):
        chunk = words[start : start + SUM_WORDS].to(torch.int64)
        indices = torch.arange(start, start + len(chunk), dtype=torch.int64, device=memory.device)
        sums += torch.stack([chunk.sum(), (chunk * (2 * indices + 1)).sum()])
    return sums


class WordSumFingerprint:
    """Fingerprint of memory by `word_sums`, available once its device has computed it."""

    def __init__(self, memory: torch.Tensor, *, filled: bool) -> None:
        """`filled`: `memory` is complete, or queued work on its device completes it. False: complete when `result` is called."""
        self._memory, self._sums = memory, word_sums(memory) if filled else None

    def advance(self, byte: int) -> None:
        """Do nothing: `result` reads the whole memory."""

    def result(self) -> str:
        sums = word_sums(self._memory) if self._sums is None else self._sums
        return "".join(f"{value % 2**64:016x}" for value in sums.tolist())


Fingerprint = StreamingFingerprint | WordSumFingerprint | Future[str]


class Fingerprinter:
    """Computes fingerprints of buckets on the host or on a device."""

    def __init__(self, *, on_device: bool = False) -> None:
        """`on_device`: use sums of words, which every device computes equally, instead of XXH3."""
        self.on_device = on_device
        self._thread = ThreadPoolExecutor(1, "megarl-fingerprint")
        self._host = torch.empty(0, dtype=torch.uint8, device="cpu")  # host copy of device memory
        self._stream: Any = None

    def streaming(self, memory: torch.Tensor) -> StreamingFingerprint | WordSumFingerprint:
        """Return a fingerprint of `memory` (uint8, contiguous, host) that the copying code advances."""
        return WordSumFingerprint(memory, filled=False) if self.on_device else StreamingFingerprint(memory)

    def start(self, memory: torch.Tensor) -> WordSumFingerprint | Future[str]:
        """Start the fingerprint of `memory` (uint8, contiguous, any device) as it is after this thread's queued work.

        A second thread computes it, or this thread's stream. Do not write to `memory` before the result is there.
        """
        if self.on_device:
            return WordSumFingerprint(memory, filled=True)
        if memory.device.type == "cpu":
            return self._thread.submit(fingerprint, memory.numpy())
        written = torch.get_device_module(memory.device).Event()
        written.record()
        return self._thread.submit(self._of_device, memory, written)

    def _of_device(self, memory: torch.Tensor, written: Any) -> str:
        devices = torch.get_device_module(memory.device)
        devices.set_device(memory.device)  # the current device is per thread
        if self._stream is None:  # a separate stream, so that packing goes on meanwhile
            self._stream = devices.Stream()
        if len(memory) > len(self._host):  # pinned memory, for the bus's full speed
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
    """Fingerprint of a version: of its buckets' headers and fingerprints, in order."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=8)

    def add(self, header: str, bucket_fingerprint: str) -> None:
        """Add a bucket. `header`: canonical text of its contents, such as names, types and shapes."""
        self._digest.update(f"{header}\n{bucket_fingerprint}\n".encode())

    def hexdigest(self) -> str:
        return self._digest.hexdigest()
