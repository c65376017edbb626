"""Cache of tokenized rows on disk, keyed by a digest of everything that determines them.

An entry is one file: a SHA-256 checksum, then a safetensors file, which holds only data and cannot run code. An entry is
renamed into place once it is complete and on disk, so that concurrent writers do not conflict and a killed writer leaves
no partial entry. Reading verifies the checksum.
"""

from __future__ import annotations

import contextlib
import hashlib
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from megarl.atomic_files import write_synced
from megarl.data.tokenizer import Tokenizer
from megarl.recipe.schema import DataConfig

_PACKAGES = ("transformers", "tokenizers", "sentencepiece", "jinja2", "safetensors")
_DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Encoded:
    """One rendered and tokenized text.

    Attributes:
        tokens: int32 [L].
        loss_mask: bool [L]; all False for a prompt.
        text: for logs: the rendered prompt, or the assistant's messages of a demonstration.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    text: str


class TokenCache:
    """Cache entries in one folder. `notice` receives a sentence for each failure; training continues without the cache."""

    def __init__(self, directory: Path, notice: Callable[[str], None]) -> None:
        self.directory, self.notice = directory, notice

    def load(self, key: str, count: int) -> list[Encoded] | None:
        """Return the `count` texts of an entry; None if it is missing, unreadable or damaged (the latter two with a notice)."""
        path = self._path(key)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self.notice(f"tokenized rows could not be read from {path} ({error.strerror}): they are tokenized again")
            return None
        if hashlib.sha256(data[_DIGEST:]).digest() != data[:_DIGEST]:
            self.notice(f"the tokenized rows in {path} were damaged: they are tokenized again")
            return None
        encoded = _unpack(data[_DIGEST:])
        assert len(encoded) == count, f"{path} has {len(encoded)} texts, not {count}"
        return encoded

    def store(self, key: str, encoded: Sequence[Encoded]) -> None:
        """Write an entry atomically; a failure is a notice."""
        path, data = self._path(key), _pack(encoded)
        partial = path.with_name(f".{uuid.uuid4().hex}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_synced(partial, hashlib.sha256(data).digest() + data)
            partial.rename(path)
        except OSError as error:
            self.notice(f"tokenized rows could not be kept in {self.directory} ({error.strerror}): set data.cache")
            with contextlib.suppress(OSError):
                partial.unlink()

    def _path(self, key: str) -> Path:
        return self.directory / "tokens" / key[:2] / f"{key}.bin"


def key_of(file: Path, kind: str, tokenizer: Tokenizer, config: DataConfig) -> str:
    """Return the hex SHA-256 of everything that determines the encoded rows of `file`: its bytes, `kind` (the encoding
    function), the tokenizer's files, the template's settings, this package's code, and the date if the template writes it."""
    digest = hashlib.sha256()
    for part in (
        kind,
        _file_digest(file),
        tokenizer_digest(tokenizer),
        repr((config.chat_template, sorted(config.chat_template_args.items()), config.prompt_suffix)),
        repr(sorted(config.columns.items())),
        tokenizer.today() if config.applies_template else "",
        _code_digest(),
    ):
        digest.update(f"{len(part)}:{part}".encode())
    return digest.hexdigest()


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Return the hex SHA-256 of a tokenizer's files and of its stop, end and bos ids."""
    digest = hashlib.sha256(repr((tokenizer.stop_ids, sorted(tokenizer.end_ids), tokenizer.bos_ids)).encode())
    for path in sorted(tokenizer.directory.rglob("*")):
        if path.suffix in (".json", ".jinja", ".txt", ".model", ".tiktoken") and path.is_file():
            digest.update(f"{path.relative_to(tokenizer.directory)}:{_file_digest(path)}".encode())
    return digest.hexdigest()


def _file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@lru_cache(maxsize=1)
def _code_digest() -> str:
    """Digest of the modules of `megarl.data`, and of the versions of the packages that they use."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            digest.update(f"{package}={version(package)}".encode())
    return digest.hexdigest()


def _pack(encoded: Sequence[Encoded]) -> bytes:
    from safetensors.numpy import save

    texts = [row.text.encode("utf-8", "surrogatepass") for row in encoded]
    empty = np.zeros(0, dtype=np.int32)
    return save(
        {
            "lengths": np.array([len(row.tokens) for row in encoded], dtype=np.int64),
            "tokens": np.concatenate([empty, *(row.tokens for row in encoded)]),
            "loss_mask": np.concatenate([empty.astype(bool), *(row.loss_mask for row in encoded)]),
            "text_lengths": np.array([len(text) for text in texts], dtype=np.int64),
            "texts": np.frombuffer(b"".join(texts), dtype=np.uint8),
        }
    )


def _unpack(data: bytes) -> list[Encoded]:
    from safetensors.numpy import load

    arrays: dict[str, Any] = load(data)
    ends, text_ends = np.cumsum(arrays["lengths"]), np.cumsum(arrays["text_lengths"])
    texts = arrays["texts"].tobytes()
    encoded, start, text_start = [], 0, 0
    for end, text_end in zip(ends.tolist(), text_ends.tolist(), strict=True):
        text = texts[text_start:text_end].decode("utf-8", "surrogatepass")
        encoded.append(Encoded(arrays["tokens"][start:end], arrays["loss_mask"][start:end], text))
        start, text_start = end, text_end
    return encoded
