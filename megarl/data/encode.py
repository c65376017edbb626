"""Tokenize rows: load them from the cache, else encode them in several processes, with a progress bar."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from megarl.data.cache import Encoded, TokenCache, key_of
from megarl.data.rows import Row
from megarl.data.tokenizer import Tokenizer
from megarl.recipe.schema import DataConfig

Encode = Callable[[Sequence[Row], Tokenizer, DataConfig], list[Encoded]]
"""Renders and tokenizes rows into the same number of texts each. A module-level function or a partial of one, so that
another process can import it."""

CHUNK = 512  # rows per task of a process, and per step of the progress bar
ROWS_PER_PROCESS = 20_000  # a process takes seconds to start, which fewer rows would not repay
LEAST_CACHED = 1000  # files with fewer rows are not cached


def encode_files(
    files: Sequence[tuple[Path, Sequence[Row]]],
    encode: Encode,
    per_row: int,
    tokenizer: Tokenizer,
    config: DataConfig,
    notice: Callable[[str], None],
) -> list[list[Encoded]]:
    """Return the texts of each file's rows, `per_row` per row in order.

    `notice` receives a message for every fallback: a cache that cannot be used, processes that died.

    Raises:
        ValueError: `encode` rejects a row.
    """
    cache = TokenCache(Path(config.cache).expanduser(), notice) if config.cache else None
    kind = _identity(encode)
    texts_of_files: list[list[Encoded] | None] = [None] * len(files)
    keys: dict[int, str] = {}
    for number, (file, rows) in enumerate(files):
        if cache is not None and len(rows) >= LEAST_CACHED:
            keys[number] = key_of(file, kind, tokenizer, config)
            texts_of_files[number] = cache.load(keys[number], len(rows) * per_row)
    missing = [number for number in range(len(files)) if texts_of_files[number] is None]
    rows = [row for number in missing for row in files[number][1]]
    encoded = iter(encode_rows(rows, encode, tokenizer, config, notice))
    for number in missing:
        texts = texts_of_files[number] = [next(encoded) for _ in range(len(files[number][1]) * per_row)]
        if cache is not None and number in keys:
            cache.store(keys[number], texts)
    return [texts for texts in texts_of_files if texts is not None]


def _identity(encode: Encode) -> str:
    """Return the import path of `encode` with its bound arguments."""
    if isinstance(encode, partial):
        return f"{_identity(encode.func)}{encode.args!r}{sorted(encode.keywords.items())!r}"
    return f"{encode.__module__}.{encode.__qualname__}"


def encode_rows(
    rows: Sequence[Row], encode: Encode, tokenizer: Tokenizer, config: DataConfig, notice: Callable[[str], None]
) -> list[Encoded]:
    """Return the texts of `rows` in order, encoded by `data.workers` processes."""
    chunks = [rows[start : start + CHUNK] for start in range(0, len(rows), CHUNK)]
    workers = min(config.workers or automatic_workers(len(rows)), len(chunks))
    if workers > 1:
        try:
            return _encode_in_processes(chunks, encode, tokenizer, config, workers, len(rows))
        except (BrokenProcessPool, OSError) as error:
            notice(
                f"the {workers} processes that tokenize rows failed ({error}): this process tokenizes them alone. "
                "Set data.workers=1 to start no processes"
            )
    encoded: list[Encoded] = []
    # Two threads: tokenizers release the GIL, so one thread renders while the other tokenizes.
    with _progress(len(rows)) as advance, ThreadPoolExecutor(2) as pool:
        texts_of_chunks = pool.map(lambda chunk: encode(chunk, tokenizer, config), chunks)
        for chunk, texts in zip(chunks, texts_of_chunks, strict=True):
            encoded += texts
            advance(len(chunk))
    return encoded


def automatic_workers(rows: int) -> int:
    """Return the number of processes for `rows` rows if `data.workers` is unset; 1 means this process."""
    return max(1, min(rows // ROWS_PER_PROCESS, len(os.sched_getaffinity(0))))


def _encode_in_processes(
    chunks: Sequence[Sequence[Row]],
    encode: Encode,
    tokenizer: Tokenizer,
    config: DataConfig,
    workers: int,
    total: int,
) -> list[Encoded]:
    # Not fork: threads of the tokenizer and of numpy do not survive a fork.
    context = multiprocessing.get_context("spawn")
    encoded: list[Encoded] = []
    arguments = (encode, tokenizer, config)
    with (
        _progress(total) as advance,
        ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=arguments) as pool,
    ):
        for chunk, texts in zip(chunks, pool.map(_encode_chunk, chunks), strict=True):
            encoded += texts
            advance(len(chunk))
    return encoded


_task: tuple[Encode, Tokenizer, DataConfig] | None = None  # set in a tokenizing process


def _begin(encode: Encode, tokenizer: Tokenizer, config: DataConfig) -> None:
    global _task
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each process has one core
    _task = encode, tokenizer, config


def _encode_chunk(rows: Sequence[Row]) -> list[Encoded]:
    assert _task is not None
    encode, tokenizer, config = _task
    return encode(rows, tokenizer, config)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """Show a transient progress bar on standard error if it is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("tokenizing rows"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("rows", total=total)
        yield lambda rows: bar.update(task, advance=rows)
