"""Stored responses: bounded in count, bytes and time, with turns that several share counted once."""

import pytest

from mallee.actors.config import ResponsesSettings
from mallee.actors.http.responses.store import Record, ResponseStore, Turn, UnknownResponse
from mallee.actors.text.conversation import Conversation, Message
from mallee.protocol.ids import COMMON, Scope


def record(name: str, turn: Turn | None = None, scope: Scope = COMMON) -> Record:
    return Record(name, scope, {}, [], Conversation(()), turn)


def test_the_least_recently_used_is_forgotten_first() -> None:
    store = ResponseStore(ResponsesSettings(max_count=2), lambda: 0.0)
    for name in "ab":
        store.keep(record(name))
    store.get("a", COMMON)
    store.keep(record("c"))
    store.check()
    with pytest.raises(UnknownResponse):
        store.get("b", COMMON)
    assert store.get("a", COMMON).id == "a"


def test_bytes_are_bounded_and_shared_turns_count_once() -> None:
    store = ResponseStore(ResponsesSettings(max_mib=1), lambda: 0.0)
    first = Turn(None, (Message("user", "x" * 400_000),))
    store.keep(record("a", first))
    for name in "bcd":
        store.keep(record(name, Turn(first, (Message("user", name),))))
    store.check()
    assert len(store) == 4
    store.keep(record("e", Turn(None, (Message("user", "y" * 700_000),))))
    store.check()
    assert store.nbytes <= 1 << 20
    assert len(store) == 1  # the long text was all of theirs


def test_an_unused_response_is_forgotten_in_time() -> None:
    now = 0.0
    store = ResponseStore(ResponsesSettings(ttl_s=10), lambda: now)
    store.keep(record("a"))
    now = 9.0
    store.get("a", COMMON)
    now = 18.0
    store.get("a", COMMON)
    now = 29.0
    with pytest.raises(UnknownResponse):
        store.get("a", COMMON)
    store.check()
    assert store.nbytes == 0


def test_one_that_runs_stays_and_changes_its_turn() -> None:
    store = ResponseStore(ResponsesSettings(max_count=1), lambda: 0.0)
    running = record("a")
    running.is_running = True
    store.keep(running)
    store.keep(record("b"))
    running.turn = Turn(None, (Message("user", "hi"),))
    store.check()
    running.is_running = False
    store.keep(running)
    store.check()
    store.forget(running)
    store.check()
    assert store.nbytes == 0


def test_another_scope_finds_nothing() -> None:
    store = ResponseStore(ResponsesSettings(), lambda: 0.0)
    store.keep(record("a", scope=Scope("one")))
    with pytest.raises(UnknownResponse) as wrong:
        store.get("a", Scope("two"))
    store.forget(store.get("a", Scope("one")))
    with pytest.raises(UnknownResponse) as gone:
        store.get("a", Scope("one"))
    assert str(wrong.value) == str(gone.value)
