"""A 64-bit fingerprint of raw bytes: did the receiver get what the sender packed?

XXH3 (https://github.com/Cyan4973/xxHash): faster than memory is read, so that every bucket of every update can be held
to it. It guards transport against errors, not against an adversary.
"""

from __future__ import annotations

import hashlib

import numpy as np
import xxhash


def fingerprint(data: np.ndarray) -> str:
    """The fingerprint of `data` (uint8, one-dimensional, contiguous) as 16 hexadecimal digits. Other threads run meanwhile."""
    if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
        raise ValueError(f"fingerprint wants contiguous uint8 [n], not {data.dtype} {list(data.shape)}")
    return xxhash.xxh3_64_hexdigest(data.data)


class VersionFingerprint:
    """The fingerprint of a whole version: of its buckets' headers and fingerprints, in order."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=8)

    def add(self, tensors: str, bucket_fingerprint: str) -> None:
        """`tensors` is the canonical text of what the bucket holds: names, types and shapes."""
        self._digest.update(f"{tensors}\n{bucket_fingerprint}\n".encode())

    def hexdigest(self) -> str:
        return self._digest.hexdigest()
