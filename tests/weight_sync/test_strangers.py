"""A process of the network that reaches a session's store can neither end the session nor pass values to it."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.weight_sync.sender import start_session
from megarl.weight_sync.session import Session, WeightSyncError
from megarl.weight_sync.store import StoreChannel


@pytest.fixture
def opened() -> tuple[Session, Any]:
    options: dict[str, Any] = {"transport": "auto", "timeout": 5.0, "sharded": True, "bucket_bytes": 1}
    return start_session("127.0.0.1", ["a"], [("e0/0", "a")], heartbeat_timeout=5.0, **options)


def test_a_stranger_cannot_abort_a_session_or_prevent_an_abort(opened: tuple[Session, Any]) -> None:
    session, store = opened
    channel, stranger = StoreChannel(session, store), session.open_store()
    stranger.set(session.key("abort"), "PREFIX is known from list_keys")
    channel.raise_if_aborted()
    session.abort("engine0 died")
    session.abort("engine1 died later")
    with pytest.raises(WeightSyncError, match="weight sync was aborted: engine0 died"):
        channel.raise_if_aborted()


def test_a_strangers_value_is_an_error(opened: tuple[Session, Any]) -> None:
    session, store = opened
    channel, stranger = StoreChannel(session, store), session.open_store()
    channel.publish("own", {"a": 1})
    assert channel.wait(["own"], "a value") == [{"a": 1}]
    stranger.set(session.key("own"), '{"a": 2}')
    with pytest.raises(WeightSyncError, match=r"'own'.* is not from a process of this run"):
        channel.read(["own"])
    signed = session.sign("other", b"{}")
    stranger.set(session.key("own"), signed)
    with pytest.raises(WeightSyncError, match="is not from a process of this run"):
        channel.read_bytes("own")


def test_the_secret_is_neither_shown_nor_in_the_store(opened: tuple[Session, Any]) -> None:
    session, store = opened
    channel = StoreChannel(session, store)
    channel.publish("own", "value")
    channel.abort("reason")
    values = b"".join(bytes(store.get(session.key(name))) for name in ("own", "abort"))
    assert len(session.secret) == 64 and session.secret.encode() not in values and session.secret not in repr(session)
    assert Session.from_json(session.to_json()) == session, "engines receive it"
