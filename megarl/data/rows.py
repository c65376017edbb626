"""Rows of .parquet and .jsonl files, in the columns that verl's users already have."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Layouts = Sequence[Sequence[str]]

_BATCH = 4096  # rows of a parquet file that are Python objects at a time, where the reader does not keep them
_SAMPLED_GROUPS = 4  # row groups of a parquet file that a sample is read of
_BATCH_OF_IMAGES = 64  # the same of rows with images, which are large


@dataclass(frozen=True)
class Row:
    """One row, and the place in the files that errors name."""

    where: str  # "train.parquet, row 17"
    values: dict[str, Any]

    def get(self, column: str, kind: type) -> Any:
        """The value of a column, held to its type; None where the column is missing or empty.

        Raises:
            ValueError: the value has another type.
        """
        value = self.values.get(column)
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{self.where}: column {column!r} is {_short(value)}, not a {kind.__name__}")
        return value

    def need(self, column: str, kind: type) -> Any:
        """Like `get`, but an empty value is refused."""
        value = self.get(column, kind)
        if value is None:
            raise ValueError(f"{self.where}: column {column!r} is empty")
        return value


def read_rows(files: Sequence[str | Path], *layouts: Sequence[str], optional: Sequence[str] = ()) -> list[Row]:
    """The rows of all `files` in order, with only the columns named.

    Each of `layouts` is a set of columns that a file may have; one of them must be there in full.

    Raises:
        ValueError: no files were named, one is missing, unreadable, empty or of an unknown kind, or
            lacks a required column (the message lists those it has).
    """
    if not files:
        raise ValueError("no data files were named: set data.train_files (or data.eval_files)")
    rows: list[Row] = []
    for file in map(Path, files):
        found = list(iterate_rows(file, *layouts, optional=optional))
        if not found:
            raise ValueError(f"{file}: the file has no rows")
        rows += found
    return rows


def iterate_rows(file: Path, *layouts: Sequence[str], optional: Sequence[str] = ()) -> Iterator[Row]:
    """The rows of one file, of which a few thousand are in memory at a time. Otherwise as `read_rows`."""
    _check_file(file)
    yield from (_parquet_rows if file.suffix == ".parquet" else _jsonl_rows)(file, layouts, optional)


def sample_rows(file: Path, count: int, *layouts: Sequence[str], optional: Sequence[str] = ()) -> tuple[list[Row], int]:
    """At most `count` rows of one file, spread over it, and how many it has. Otherwise as `read_rows`.

    Of a parquet file with several row groups a few of these are read, so that it takes seconds of any file."""
    _check_file(file)
    read = _parquet_sample if file.suffix == ".parquet" else _jsonl_sample
    rows, total = read(file, count, layouts, optional)
    if not total:
        raise ValueError(f"{file}: the file has no rows")
    return rows, total


def wrong_format(file: str | Path) -> str:
    """What is wrong with a file whose name ends neither in .parquet nor in .jsonl, and what to do."""
    suffix = Path(file).suffix
    return (
        f"data files are .parquet or .jsonl, not {suffix or 'without a suffix'}. Write its rows to one of these: "
        f"docs/data.md lists the columns, and the few lines of Python that turn a .csv or .json into them"
    )


def unique_uids(rows: Sequence[Row], fallback_source: str) -> list[str]:
    """A name for each row that is the same in every run: ``data_source/index``.

    The index is ``extra_info.index``, else the row's position. Where two rows would share a name
    (several files with one numbering), the later ones get ``#2``, ``#3``, ...
    """
    names = []
    for position, row in enumerate(rows):
        index = (row.get("extra_info", dict) or {}).get("index")
        names.append(f"{row.get('data_source', str) or fallback_source}/{position if index is None else index}")
    taken, seen = set(names), Counter[str]()
    uids = []
    for name in names:
        seen[name] += 1
        uid = name
        while seen[name] > 1 and (uid := f"{name}#{seen[name]}") in taken:
            seen[name] += 1
        taken.add(uid)
        uids.append(uid)
    return uids


def messages_of(row: Row, column: str) -> list[dict[str, Any]]:
    """The messages of a column: a list of ``{role, content}``, or plain text (one user message).

    Raises:
        ValueError: it is neither, or it is empty.
    """
    value = row.need(column, object)
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{row.where}: column {column!r} is {_short(value)}, not messages or text")
    messages = []
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(f"{row.where}: a message in {column!r} is {_short(message)}, not {{role, content}}")
        # Parquet gives every message the fields of all others, as None.
        messages.append({name: part for name, part in message.items() if part is not None or name == "content"})
    return messages


def text_of(messages: Sequence[dict[str, Any]]) -> str:
    """What `messages` say, for one who reads the conversation: the text of a single one, else each under its role."""
    said = [(message["role"], _content_text(message["content"])) for message in messages]
    return said[0][1] if len(said) == 1 else "\n\n".join(f"{role}: {text}" for role, text in said)


def _content_text(content: Any) -> str:
    """A message's content, of which parts that are no text (images) are left out."""
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


def write_parquet(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows to one parquet file; the same rows give the same bytes."""
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path, compression="zstd")


def _check_file(file: Path) -> None:
    if not file.is_file():
        raise ValueError(f"{file}: no such file{_neighbours(file)}")
    if file.suffix not in (".parquet", ".jsonl"):
        raise ValueError(f"{file}: {wrong_format(file)}")


@contextmanager
def _parquet(file: Path, layouts: Layouts, optional: Sequence[str]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The opened file, and what its batches are asked for with: columns, and rows at a time."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            there = opened.schema_arrow.names
            _check_columns(file, layouts, there)
            wanted = [name for name in there if name in _columns(layouts, optional)]
            yield opened, {"columns": wanted, "batch_size": _BATCH_OF_IMAGES if "images" in wanted else _BATCH}
    except pyarrow.ArrowException as error:
        raise ValueError(f"{file} is not a readable parquet file: {error}") from error


def _parquet_rows(file: Path, layouts: Layouts, optional: Sequence[str]) -> Iterator[Row]:
    number = 0
    with _parquet(file, layouts, optional) as (opened, asked):
        for batch in opened.iter_batches(**asked):
            for values in batch.to_pylist():
                yield Row(f"{file}, row {number}", values)
                number += 1


def _parquet_sample(file: Path, count: int, layouts: Layouts, optional: Sequence[str]) -> tuple[list[Row], int]:
    rows: list[Row] = []
    with _parquet(file, layouts, optional) as (opened, asked):
        sizes = [opened.metadata.row_group(group).num_rows for group in range(opened.num_row_groups)]
        groups = _spread(len(sizes), _SAMPLED_GROUPS)
        for place, group in enumerate(groups):
            share = count * (place + 1) // len(groups) - count * place // len(groups)
            wanted, start = {*_spread(sizes[group], share)}, 0
            for batch in opened.iter_batches(row_groups=[group], **asked):
                for number in sorted(wanted & {*range(start, start + len(batch))}):
                    (values,) = batch.slice(number - start, 1).to_pylist()
                    rows.append(Row(f"{file}, row {sum(sizes[:group]) + number}", values))
                start += len(batch)
        return rows, sum(sizes)


def _spread(size: int, count: int) -> list[int]:
    """At most `count` of `size` numbers from 0, evenly apart, the first and the last among them."""
    if count >= size:
        return list(range(size))
    return sorted({round(number * (size - 1) / max(count - 1, 1)) for number in range(count)})


def _jsonl_rows(file: Path, layouts: Layouts, optional: Sequence[str]) -> Iterator[Row]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _jsonl_row(f"{file}, line {number}", line, layouts, optional)


def _jsonl_sample(file: Path, count: int, layouts: Layouts, optional: Sequence[str]) -> tuple[list[Row], int]:
    with file.open("rb") as lines:
        total = sum(1 for line in lines if line.strip())
    wanted, place, rows = {*_spread(total, count)}, 0, []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                if place in wanted:
                    rows.append(_jsonl_row(f"{file}, line {number}", line, layouts, optional))
                place += 1
    return rows, total


def _jsonl_row(where: str, line: bytes, layouts: Layouts, optional: Sequence[str]) -> Row:
    try:
        values = json.loads(line)
    except ValueError as error:  # UnicodeDecodeError among them
        raise ValueError(f"{where} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{where} is {_short(values)}, not an object of columns")
    _check_columns(where, layouts, values)
    return Row(where, {name: values[name] for name in _columns(layouts, optional) & values.keys()})


def _columns(layouts: Layouts, optional: Sequence[str]) -> set[str]:
    return {*optional, *(name for layout in layouts for name in layout)}


def _check_columns(where: str | Path, layouts: Layouts, there: Iterable[str]) -> None:
    there = list(there)
    missing = [[name for name in layout if name not in there] for layout in layouts]
    if all(missing):
        lacks = ", or ".join(" and ".join(map(repr, names)) for names in missing)
        raise ValueError(f"{where}: no column {lacks}; there are {', '.join(there) or 'none'}")


def _neighbours(file: Path) -> str:
    if not file.parent.is_dir():
        return f" (nor a directory {file.parent})"
    there = sorted(path.name for path in file.parent.iterdir() if path.suffix in (".parquet", ".jsonl"))
    return f"; {file.parent} has {', '.join(there) or 'no .parquet or .jsonl files'}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
