"""Mailboxes: notices of buckets from holders to an engine rank, and its acknowledgements, through the store.

A mailbox is a ring of keys. A key is written again once its notice has been read, so no notice needs a request to delete or
confirm it. An engine rank acknowledges to each holder with one key, which has the last buckets that it read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megarl.weight_sync.relay import Peer
from megarl.weight_sync.store import StoreChannel


class Mailbox:
    """The mailbox of engine rank `reader`."""

    def __init__(self, channel: StoreChannel, reader: int, holders: int) -> None:
        """`holders`: number of peers that write to it.

        Each holder has at most one unread notice per slot, so a ring of `holders * Session.slots` keys never overwrites an
        unread notice.
        """
        self._channel, self._reader, self._size = channel, reader, holders * channel.session.slots
        self._next = 0  # counts over all versions
        for index in range(self._size):
            channel.publish(_notice_key(reader, index), None)
        channel.publish(_size_key(reader), self._size)

    def poll(self) -> dict[str, Any] | None:
        """Return the next notice, or None if it has not arrived."""
        (notice,) = self._channel.read([_notice_key(self._reader, self._next % self._size)])
        if notice is None or notice["number"] != self._next:
            return None
        self._next += 1
        return dict(notice)

    def wait(self, awaited: str) -> dict[str, Any]:
        """Wait for the next notice. `awaited` describes it in error messages."""
        notices: list[dict[str, Any]] = []

        def arrived() -> bool:
            notice = self.poll()
            notices.extend([notice] if notice is not None else [])
            return bool(notices)

        self._channel.wait_until(arrived, lambda: awaited)
        return notices[0]


class MailboxWriter:
    """One holder's access to the mailboxes of `readers`."""

    def __init__(self, channel: StoreChannel, readers: Sequence[int], awaited: str) -> None:
        """Wait until all mailboxes exist. `awaited` describes them in error messages."""
        self._channel = channel
        sizes = channel.wait([_size_key(reader) for reader in readers], awaited)
        self._sizes: dict[int, int] = dict(zip(readers, sizes, strict=True))

    def post(self, reader: int, notice: dict[str, Any]) -> None:
        number = self._channel.next_number(f"notices/{reader}")
        self._channel.publish(_notice_key(reader, number % self._sizes[reader]), {**notice, "number": number})


class AckWriter:
    """Publishes which buckets of each holder an engine rank has read, with their fingerprints."""

    def __init__(self, channel: StoreChannel, reader: int) -> None:
        self._channel, self._reader = channel, reader
        self._last: dict[Peer, list[tuple[int, str]]] = {}

    def publish(self, holder: Peer, count: int, fingerprint: str) -> None:
        """Acknowledge bucket `count` of `holder`, counted over all versions."""
        last = [*self._last.get(holder, []), (count, fingerprint)][-self._channel.session.slots :]
        self._last[holder] = last
        self._channel.publish(_ack_key(holder, self._reader), last)


def wait_for_acks(
    channel: StoreChannel, holder: Peer, count: int, readers: Sequence[int], names: Sequence[str], bucket: str
) -> list[str]:
    """Wait until all `readers` (called `names`) have acknowledged bucket `count`, and return their fingerprints.

    `bucket` describes it in error messages.
    """
    keys = [_ack_key(holder, reader) for reader in readers]
    values: list[str | None] = [None] * len(keys)

    def acknowledged() -> bool:
        values[:] = [dict(last).get(count) for last in channel.read(keys)]
        return None not in values

    def awaited() -> str:
        missing = [name for name, value in zip(names, values, strict=True) if value is None]
        return f"{', '.join(missing)} to read {bucket}"

    channel.wait_until(acknowledged, awaited)
    return [value for value in values if value is not None]


def create_ack_keys(channel: StoreChannel, holder: Peer, readers: Sequence[int]) -> None:
    """Create the keys that `wait_for_acks` reads, without any acknowledgement."""
    for reader in readers:
        channel.publish(_ack_key(holder, reader), [])


def _notice_key(reader: int, index: int) -> str:
    return f"mailbox/{reader}/{index}"


def _size_key(reader: int) -> str:
    return f"mailbox/{reader}"


def _ack_key(holder: Peer, reader: int) -> str:
    return f"ack/{holder[0]}{holder[1]}/{reader}"
