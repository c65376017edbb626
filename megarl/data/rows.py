"""Read rows of .parquet and .jsonl files, with verl's columns."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.atomic_files import make_folder
from megarl.data.columns import ColumnSelection
from megarl.errors import command_name, cut_end

_BATCH = 4096  # rows of a parquet file that are converted to Python objects at a time
_BATCH_OF_IMAGES = 64  # the same for rows with images, which are large
_SAMPLED_GROUPS = 4  # row groups of a parquet file from which a sample is read


@dataclass(frozen=True)
class Row:
    """One row, and its position in the files for error messages."""

    where: str  # "train.parquet, row 17", counted from 0, or "train.jsonl, line 18", counted from 1
    values: dict[str, Any]

    def get(self, column: str, kind: type) -> Any:
        """Return the value of a column; None if the column is missing or empty.

        Raises:
            ValueError: the value is not a `kind`.
        """
        value = self.values.get(column)
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{self.where}: column {column!r} is {cut_end(repr(value), 80)}, not a {kind.__name__}")
        return value

    def need(self, column: str, kind: type) -> Any:
        """Return the value of a column, which must not be empty; otherwise as `get`."""
        value = self.get(column, kind)
        if value is None:
            raise ValueError(f"{self.where}: column {column!r} is empty")
        return value


def iterate_rows(
    file: Path, *layouts: Sequence[str], optional: Sequence[str] = (), names: Mapping[str, str] | None = None
) -> Iterator[Row]:
    """Iterate over the rows of one file, with a few thousand in memory at a time and only the columns in the arguments.

    `layouts`, `optional`, `names`: see `ColumnSelection`.

    Raises:
        ValueError: the file is missing, unreadable, of an unknown format or lacks a required column (the message lists its
            columns).
    """
    check_file(file)
    yield from (_parquet_rows if file.suffix == ".parquet" else _jsonl_rows)(
        file, ColumnSelection(layouts, optional, names)
    )


def rows_with_all_columns(file: Path) -> Iterator[dict[str, Any]]:
    """Iterate over the rows of a parquet file with all its columns. ValueError if it cannot be read."""
    if file.suffix != ".parquet":
        raise ValueError(f"{file} is not a .parquet file")
    check_file(file)
    with _open_parquet(file, ColumnSelection([()])) as (opened, _):
        for batch in opened.iter_batches(batch_size=_BATCH_OF_IMAGES):
            yield from batch.to_pylist()


def column_names(file: Path) -> list[str]:
    """Return the columns of a parquet file, or of the first row of a .jsonl file. ValueError if it has none or cannot be read."""
    check_file(file)
    if file.suffix == ".parquet":
        with _open_parquet(file, ColumnSelection([()])) as (opened, _):
            return list(opened.schema_arrow.names)
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                return [*_jsonl_values(f"{file}, line {number}", line)]
    raise ValueError(f"{file}: the file has no rows")


def sample_rows(
    file: Path,
    count: int,
    *layouts: Sequence[str],
    optional: Sequence[str] = (),
    names: Mapping[str, str] | None = None,
) -> tuple[list[Row], int]:
    """Return at most `count` evenly spread rows of one file, and its total number of rows. Otherwise as `iterate_rows`.

    From a parquet file with many row groups only a few groups are read, so that any file takes seconds. ValueError if the
    file has no rows.
    """
    check_file(file)
    read = _parquet_sample if file.suffix == ".parquet" else _jsonl_sample
    rows, total = read(file, count, ColumnSelection(layouts, optional, names))
    if not total:
        raise ValueError(f"{file}: the file has no rows")
    return rows, total


def wrong_format(file: str | Path) -> str:
    """Return the error message for a file that is neither .parquet nor .jsonl."""
    suffix = Path(file).suffix
    return (
        f"data files are .parquet or .jsonl, not {suffix or 'without a suffix'}. Write its rows to one of these: "
        f"docs/data.md lists the columns, and the few lines of Python that turn a .csv or .json into them"
    )


def unique_uids(rows: Sequence[Row], fallback_source: str) -> list[str]:
    """Return an id for each row that is the same in every run: ``data_source/index``.

    The index is ``extra_info.index``, else the row's position. Rows that would share an id (several files with the same
    numbering) get the suffix ``#2``, ``#3``, ... from the second on.
    """
    names = []
    for position, row in enumerate(rows):
        index = (row.get("extra_info", dict) or {}).get("index")
        names.append(f"{row.get('data_source', str) or fallback_source}/{position if index is None else index}")
    used, seen = set(names), Counter[str]()
    uids = []
    for name in names:
        seen[name] += 1
        uid = name
        while seen[name] > 1 and (uid := f"{name}#{seen[name]}") in used:
            seen[name] += 1
        used.add(uid)
        uids.append(uid)
    return uids


def messages_of(row: Row, column: str) -> list[dict[str, Any]]:
    """Return the messages of a column: a list of ``{role, content}``, or plain text (one user message).

    Raises:
        ValueError: the value is neither, or empty.
    """
    value = row.need(column, object)
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{row.where}: column {column!r} is {cut_end(repr(value), 80)}, not messages or text")
    messages = []
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(
                f"{row.where}: a message in {column!r} is {cut_end(repr(message), 80)}, not {{role, content}}"
            )
        # Parquet adds fields that a message or a part lacks as None. Templates write pictures for parts that have the field "image".
        content = message["content"]
        if isinstance(content, list):
            content = [_without_none(part) if isinstance(part, dict) else part for part in content]
        messages.append({**_without_none(message), "content": content})
    return messages


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def text_of(messages: Sequence[dict[str, Any]]) -> str:
    """Return the text of a conversation for a human reader; several messages are prefixed with their roles."""
    texts = [(message["role"], content_text(message["content"])) for message in messages]
    return texts[0][1] if len(texts) == 1 else "\n\n".join(f"{role}: {text}" for role, text in texts)


def content_text(content: Any) -> str:
    """Return the text of a message's content, which may be a list of parts, without images."""
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


def write_parquet(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows to one parquet file. With one version of pyarrow, the same rows give the same bytes.

    Raises ValueError if its folder cannot be created.
    """
    import pyarrow
    import pyarrow.parquet

    make_folder(path.parent)
    table = pyarrow.Table.from_pylist(list(rows))
    pyarrow.parquet.write_table(table, path, compression="zstd", write_page_checksum=True)


class MissingFile(ValueError):
    """A data file that does not exist: the problem, and what to change."""

    def __init__(self, problem: str, remedy: str):
        self.problem, self.remedy = problem, remedy
        super().__init__(f"{problem}: {remedy}")


class RowsNotCached(ValueError):
    """Rows on the hub, by their `name`, that are not in this machine's cache."""

    def __init__(self, name: str):
        self.name = name
        super().__init__(
            f"{name} is not in this machine's cache of the hub: `train` and `eval` download it (docs/hub.md)"
        )


def check_file(file: Path) -> None:
    """Raise ValueError if the file is missing (MissingFile, RowsNotCached), or neither .parquet nor .jsonl."""
    if file.parts[:1] == ("hf:",):  # a name that stands for its files where they are in the cache
        raise RowsNotCached(f"hf://{Path(*file.parts[1:])}")
    if not file.is_file():
        raise _missing_file(file)
    if file.suffix not in (".parquet", ".jsonl"):
        raise ValueError(f"{file}: {wrong_format(file)}")


@contextmanager
def _open_parquet(file: Path, selection: ColumnSelection) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Open a parquet file; yield it and the arguments of its `iter_batches`: columns and batch size."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file, page_checksum_verification=True) as opened:
            present = opened.schema_arrow.names
            selection.check(file, present)
            sources = {selection.source(column) for column in selection.columns}
            columns = [name for name in present if name in sources]
            with_images = any(
                column in selection.columns and selection.source(column) in columns for column in ("images", "videos")
            )
            yield opened, {"columns": columns, "batch_size": _BATCH_OF_IMAGES if with_images else _BATCH}
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
        raise ValueError(f"{file} is not a readable parquet file: {error}") from error


def _parquet_rows(file: Path, selection: ColumnSelection) -> Iterator[Row]:
    number = 0
    with _open_parquet(file, selection) as (opened, options):
        for batch in opened.iter_batches(**options):
            for values in batch.to_pylist():
                where = f"{file}, row {number}"
                yield Row(where, selection.values(where, values))
                number += 1


def _parquet_sample(file: Path, count: int, selection: ColumnSelection) -> tuple[list[Row], int]:
    rows: list[Row] = []
    with _open_parquet(file, selection) as (opened, options):
        sizes = [opened.metadata.row_group(group).num_rows for group in range(opened.num_row_groups)]
        groups = _spread(len(sizes), _SAMPLED_GROUPS)
        for place, group in enumerate(groups):
            share = count * (place + 1) // len(groups) - count * place // len(groups)
            selected, start, first = {*_spread(sizes[group], share)}, 0, sum(sizes[:group])
            for batch in opened.iter_batches(row_groups=[group], **options):
                for number in sorted(selected & {*range(start, start + len(batch))}):
                    (values,) = batch.slice(number - start, 1).to_pylist()
                    where = f"{file}, row {first + number}"
                    rows.append(Row(where, selection.values(where, values)))
                start += len(batch)
        return rows, sum(sizes)


def _spread(size: int, count: int) -> list[int]:
    """Return at most `count` evenly spaced numbers of range(size): the first, and from two on the last."""
    if count >= size:
        return list(range(size))
    return sorted({round(number * (size - 1) / max(count - 1, 1)) for number in range(count)})


def _jsonl_rows(file: Path, selection: ColumnSelection) -> Iterator[Row]:
    absent, empty = {*selection.named()}, True
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                row = _jsonl_row(f"{file}, line {number}", line, selection)
                absent, empty = absent - row.values.keys(), False
                yield row
    if absent and not empty:  # a row may lack an optional column, but not every row one that the recipe names
        selection.check(file, [selection.source(column) for column in selection.columns - absent])


def _jsonl_sample(file: Path, count: int, selection: ColumnSelection) -> tuple[list[Row], int]:
    with file.open("rb") as lines:
        total = sum(1 for line in lines if line.strip())
    selected, place, rows = {*_spread(total, count)}, 0, []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                if place in selected:
                    rows.append(_jsonl_row(f"{file}, line {number}", line, selection))
                place += 1
    return rows, total


def _jsonl_row(where: str, line: bytes, selection: ColumnSelection) -> Row:
    values = _jsonl_values(where, line)
    selection.check(where, values, named=False)
    return Row(where, selection.values(where, values))


def _jsonl_values(where: str, line: bytes) -> dict[str, Any]:
    """Return the columns of one line. ValueError unless it is a JSON object."""
    try:
        values = json.loads(line)
        if b"\\ud" in line.lower():
            json.dumps(values, ensure_ascii=False).encode()  # raises UnicodeEncodeError for a lone surrogate
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8: {error}") from error
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{where} is nested too deeply") from error
    if not isinstance(values, dict):
        raise ValueError(f"{where} is {cut_end(repr(values), 80)}, not an object of columns")
    return values


def _missing_file(file: Path) -> MissingFile:
    if not file.parent.is_dir():
        remedy = (
            "correct the path, or make the file (the head of a recipe of megarl has the command): `megarl data --help` "
            "lists the data sets that megarl prepares"
        )
        if file.parts[-4:-1] == ("data", "quickstart", "data"):
            remedy = f"run `{command_name()} data quickstart --out data/quickstart` to make it"
        return MissingFile(f"{file}: no such file (nor a directory {file.parent})", remedy)
    names = sorted(path.name for path in file.parent.iterdir() if path.suffix in (".parquet", ".jsonl"))
    has = ", ".join(names) or "no .parquet or .jsonl files"
    return MissingFile(f"{file}: no such file; {file.parent} has {has}", "correct the path")
