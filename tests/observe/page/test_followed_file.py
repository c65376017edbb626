"""Files that grow while they are read: each complete line comes once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megarl.observe.page.followed_file import FollowedFile, line_at, lines_from
from tests.support.bytes_read import BytesRead


def append(path: Path, text: bytes) -> None:
    with path.open("ab") as file:
        file.write(text)


def test_a_half_written_line_comes_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    file = FollowedFile(path)
    assert file.read().lines == [] and not file.has_changed(), "the file is missing"
    append(path, b"one\ntw")
    assert file.has_changed()
    assert file.read().lines == [b"one"]
    append(path, b"o")
    assert file.read().lines == []
    append(path, b"\nthree\n")
    appended = file.read()
    assert appended.lines == [b"two", b"three"] and not appended.replaced
    assert not file.has_changed() and file.read().lines == []


def test_a_replaced_and_a_shortened_file_are_read_from_their_beginning(tmp_path: Path) -> None:
    path, other = tmp_path / "lines", tmp_path / "other"
    path.write_bytes(b"a\nb\n")
    file = FollowedFile(path)
    file.read()
    other.write_bytes(b"a\nB\nc\n")
    os.replace(other, path)
    appended = file.read()
    assert appended.replaced and appended.lines == [b"a", b"B", b"c"]
    os.truncate(path, 2)
    appended = file.read()
    assert appended.replaced and appended.lines == [b"a"]
    path.unlink()
    appended = file.read()
    assert appended.replaced and appended.lines == []
    assert not file.read().replaced, "a missing file is reported once"


@pytest.mark.parametrize("starts_later", [False, True])
def test_a_replaced_file_with_the_same_inode_is_read_from_its_beginning(tmp_path: Path, starts_later: bool) -> None:
    """ext4 gives the inode of a deleted file to the next one, as after two rewrites between two looks."""
    path = tmp_path / "lines"
    path.write_bytes(b"step 1\nstep 2\n")
    file = FollowedFile(path)
    if starts_later:
        file.start_at(7)
    file.read()
    path.write_bytes(b"step 1\nstep two\nstep 3\n")  # in place
    appended = file.read()
    assert appended.replaced and appended.lines == [b"step 1", b"step two", b"step 3"]
    append(path, b"step 4\n" * 100)
    appended = file.read()
    assert not appended.replaced and appended.lines == [b"step 4"] * 100
    append(path, b"end\n")
    appended = file.read()
    assert not appended.replaced and appended.lines == [b"end"]


def test_only_the_new_bytes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes((b"x" * 999 + b"\n") * 10_000)
    file = FollowedFile(path)
    with BytesRead() as first:
        assert len(file.read().lines) == 10_000
    append(path, b"new\n")
    with BytesRead() as second:
        assert file.read().lines == [b"new"]
    assert first.count >= 10_000_000 and second.count < 100_000


def test_lines_have_the_offsets_that_line_at_accepts(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes("ä\n\nlast without newline".encode())
    lines = list(lines_from(path, 0))
    assert lines == [(0, "ä".encode()), (3, b""), (4, b"last without newline")]
    for offset, line in lines:
        assert line_at(path, offset, 100) == line
    assert list(lines_from(path, 3)) == lines[1:]


@pytest.mark.parametrize(
    ("offset", "longest", "words"),
    [
        (1, 9, "no line of lines begins at byte 1"),
        (99, 9, "has 8 bytes"),
        (-1, 9, "has 8 bytes"),
        (4, 2, "more than 2"),
    ],
)
def test_a_wrong_offset_is_refused(tmp_path: Path, offset: int, longest: int, words: str) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\nfour")
    with pytest.raises(ValueError, match=words):
        line_at(path, offset, longest)
