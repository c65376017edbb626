"""What holders of buckets tell an engine rank, and its answers, in as few keys and requests of the store as they take.

An inbox is a ring of keys, each of which is written again when its note has been read: nothing is asked for or deleted
beside the notes themselves. An answer is one key of each holder and reader, with the last buckets that it took.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megarl.weight_sync.relay import Peer
from megarl.weight_sync.session import SHARDED_SLOTS
from megarl.weight_sync.store import StoreChannel


class Mailbox:
    def __init__(self, channel: StoreChannel, reader: int, holders: int) -> None:
        """Of engine rank `reader`, which so many holders write to. A holder has a note for each of its buckets that are under
        way, so a ring of this size has no note in it that was not read when the next one comes there."""
        self._channel, self._reader, self._size = channel, reader, holders * SHARDED_SLOTS
        self._next = 0  # over all versions
        for place in range(self._size):
            channel.publish(_note(reader, place), None)
        channel.publish(_size(reader), self._size)

    def poll(self) -> dict[str, Any] | None:
        """The next note, if it is there."""
        (found,) = self._channel.latest([_note(self._reader, self._next % self._size)])
        if found is None or found["number"] != self._next:
            return None
        self._next += 1
        return dict(found)

    def take(self, awaited: str) -> dict[str, Any]:
        """The next note, once it is there."""
        notes: list[dict[str, Any]] = []

        def there() -> bool:
            note = self.poll()
            notes.extend([note] if note is not None else [])
            return bool(notes)

        self._channel.wait_until(there, lambda: awaited)
        return notes[0]


class MailboxWriter:
    """Of `readers`, to be written to by one holder."""

    def __init__(self, channel: StoreChannel, readers: Sequence[int], awaited: str) -> None:
        """Waits until each is there."""
        self._channel = channel
        sizes = channel.wait([_size(reader) for reader in readers], awaited)
        self._sizes: dict[int, int] = dict(zip(readers, sizes, strict=True))

    def tell(self, reader: int, note: dict[str, Any]) -> None:
        number = self._channel.next_number(f"notes/{reader}")
        self._channel.publish(_note(reader, number % self._sizes[reader]), {**note, "number": number})


class Answers:
    """Of one engine rank, to all holders: which buckets it took, and their fingerprints."""

    def __init__(self, channel: StoreChannel, reader: int) -> None:
        self._channel, self._reader = channel, reader
        self._last: dict[Peer, list[tuple[int, str]]] = {}

    def tell(self, holder: Peer, count: int, fingerprint: str) -> None:
        """`count`: the number of the bucket among all of `holder`."""
        last = [*self._last.get(holder, []), (count, fingerprint)][-SHARDED_SLOTS:]
        self._last[holder] = last
        self._channel.publish(_answer(holder, self._reader), last)


def await_answers(
    channel: StoreChannel, holder: Peer, count: int, readers: Sequence[int], names: Sequence[str], what: str
) -> list[str]:
    """Fingerprints of the holder's bucket `count`, once each of `readers` (with `names`) took it. `what` says in errors
    which bucket it is."""
    keys = [_answer(holder, reader) for reader in readers]
    found: list[str | None] = [None] * len(keys)

    def answered() -> bool:
        found[:] = [dict(last).get(count) for last in channel.latest(keys)]
        return None not in found

    def silent() -> str:
        missing = [name for name, value in zip(names, found, strict=True) if value is None]
        return f"{', '.join(missing)} to take {what}"

    channel.wait_until(answered, silent)
    return [value for value in found if value is not None]


def expect_answers(channel: StoreChannel, holder: Peer, readers: Sequence[int]) -> None:
    """Before the first bucket: there is no answer yet."""
    for reader in readers:
        channel.publish(_answer(holder, reader), [])


def _note(reader: int, place: int) -> str:
    return f"inbox/{reader}/{place}"


def _size(reader: int) -> str:
    return f"inbox/{reader}"


def _answer(holder: Peer, reader: int) -> str:
    return f"ack/{holder[0]}{holder[1]}/{reader}"
