"""A 64-bit fingerprint of raw bytes: did the receiver get what the sender packed?

The bytes are read as rows of 64-bit words. Wrapping sums of every row and of every column are
taken, and BLAKE2b digests these sums with the length. A flipped bit or a changed word changes the
sum of its row and of its column, words swapped within a row change two column sums, rows that
moved (a block of zeros included) change row sums. Digesting the sums, where a weighted total of
them would be cheaper still, matters: weights cannot see words that differ only in their top bits,
which a swap of +x and -x is.

It guards transport against errors, not against an adversary.
"""

from __future__ import annotations

import hashlib

import numpy as np

_ROW_WORDS = 1024
_BLOCK_ROWS = 64  # 512 KiB: the columns' sums read it from the cache


def fingerprint(data: np.ndarray) -> str:
    """The fingerprint of `data` (uint8, one-dimensional, contiguous) as 16 hexadecimal digits."""
    if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
        raise ValueError(f"fingerprint wants contiguous uint8 [n], not {data.dtype} {list(data.shape)}")
    row_bytes = 8 * _ROW_WORDS
    whole = len(data) // row_bytes * row_bytes
    rows = data[:whole].view(np.int64).reshape(-1, _ROW_WORDS)
    column_sums, row_sums = np.zeros(_ROW_WORDS, np.int64), np.empty(len(rows), np.int64)
    for start in range(0, len(rows), _BLOCK_ROWS):
        block = rows[start : start + _BLOCK_ROWS]
        np.add.reduce(
            block, axis=1, out=row_sums[start : start + _BLOCK_ROWS]
        )  # first: it reads memory in order, at its full rate
        column_sums += np.add.reduce(block, axis=0)
    digest = hashlib.blake2b(digest_size=8)
    digest.update(len(data).to_bytes(8, "little"))
    digest.update(data[whole:].tobytes())  # less than a row: digested as it stands
    digest.update(column_sums.tobytes())
    digest.update(row_sums.tobytes())
    return digest.hexdigest()


class VersionFingerprint:
    """The fingerprint of a whole version: of its buckets' headers and fingerprints, in order."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=8)

    def add(self, tensors: str, bucket_fingerprint: str) -> None:
        """`tensors` is the canonical text of what the bucket holds: names, types and shapes."""
        self._digest.update(f"{tensors}\n{bucket_fingerprint}\n".encode())

    def hexdigest(self) -> str:
        return self._digest.hexdigest()
