"""Rows to tokens: from the cache where they were made before, else in as many processes as it takes, shown as it goes."""

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
"""Renders and tokenises rows: the same number of texts from each. A function of a module, or a partial of one, which a process can import."""

CHUNK = 512  # rows at a time: what the progress bar moves by, and what a process is given
ROWS_PER_PROCESS = 20_000  # a process needs seconds to start; fewer rows are made sooner than that
LEAST_CACHED = 1000  # rows of a file that are worth a file of their own


def encode_files(
    files: Sequence[tuple[Path, Sequence[Row]]],
    encode: Encode,
    per_row: int,
    tokenizer: Tokenizer,
    config: DataConfig,
    notice: Callable[[str], None],
) -> list[list[Encoded]]:
    """The texts of each file's rows, `per_row` of each row in order.

    `notice` is told what did not work and was done another way: a cache that cannot be used, processes that died.

    Raises:
        ValueError: whatever `encode` finds wrong with a row.
    """
    cache = TokenCache(Path(config.cache).expanduser(), notice) if config.cache else None
    kind = _name_of(encode)
    found: list[list[Encoded] | None] = [None] * len(files)
    keys: dict[int, str] = {}
    for number, (file, rows) in enumerate(files):
        if cache is not None and len(rows) >= LEAST_CACHED:
            keys[number] = key_of(file, kind, tokenizer, config)
            found[number] = cache.load(keys[number], len(rows) * per_row)
    missing = [number for number in range(len(files)) if found[number] is None]
    rows = [row for number in missing for row in files[number][1]]
    made = iter(encode_rows(rows, encode, tokenizer, config, notice))
    for number in missing:
        texts = found[number] = [next(made) for _ in range(len(files[number][1]) * per_row)]
        if cache is not None and number in keys:
            cache.store(keys[number], texts)
    return [texts for texts in found if texts is not None]


def _name_of(encode: Encode) -> str:
    """What tells it from others: where it is, and what it was given besides."""
    if isinstance(encode, partial):
        return f"{_name_of(encode.func)}{encode.args!r}{sorted(encode.keywords.items())!r}"
    return f"{encode.__module__}.{encode.__qualname__}"


def encode_rows(
    rows: Sequence[Row], encode: Encode, tokenizer: Tokenizer, config: DataConfig, notice: Callable[[str], None]
) -> list[Encoded]:
    """The texts of `rows`, in order, in `data.workers` processes."""
    chunks = [rows[start : start + CHUNK] for start in range(0, len(rows), CHUNK)]
    workers = min(config.workers or automatic_workers(len(rows)), len(chunks))
    if workers > 1:
        try:
            return _encode_in_processes(chunks, encode, tokenizer, config, workers, len(rows))
        except (BrokenProcessPool, OSError) as error:
            notice(
                f"the {workers} processes that tokenise rows failed ({error}): one process does it. Set data.workers=1"
            )
    encoded: list[Encoded] = []
    # Two threads: tokenizers let go of Python's lock, so that one renders while the other tokenises.
    with _progress(len(rows)) as advance, ThreadPoolExecutor(2) as pool:
        made = pool.map(lambda chunk: encode(chunk, tokenizer, config), chunks)
        for chunk, texts in zip(chunks, made, strict=True):
            encoded += texts
            advance(len(chunk))
    return encoded


def automatic_workers(rows: int) -> int:
    """Processes for so many rows where `data.workers` is unset: none beside this one below twice ROWS_PER_PROCESS."""
    return max(1, min(rows // ROWS_PER_PROCESS, len(os.sched_getaffinity(0))))


def _encode_in_processes(
    chunks: Sequence[Sequence[Row]],
    encode: Encode,
    tokenizer: Tokenizer,
    config: DataConfig,
    workers: int,
    total: int,
) -> list[Encoded]:
    # Not forked: the tokenizer's and numpy's threads do not survive that.
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


_task: tuple[Encode, Tokenizer, DataConfig] | None = None  # of a process that tokenises


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
    """A bar on standard error while it takes, where that is a terminal; it leaves nothing behind."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("tokenising rows"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("rows", total=total)
        yield lambda rows: bar.update(task, advance=rows)
