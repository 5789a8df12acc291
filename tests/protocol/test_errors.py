"""The error tree: drawn as it is, and carried over wires and pickles with its types."""

import pickle
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from mallee.protocol import errors
from mallee.protocol.errors import (
    CapsulesFull,
    CodecError,
    ContextLengthExceeded,
    InternalError,
    InvalidParameter,
    KVMemoryExceeded,
    MalleeError,
    NoWorker,
    PoolExhausted,
    QueueFull,
    StorageFull,
    TierFull,
    UnknownCapsule,
    UnknownModel,
    UnsupportedModel,
    WorkerLost,
    from_wire,
)

EXAMPLES = [
    InvalidParameter("n", "x" * 200, "give 1 to 128"),
    ContextLengthExceeded(4000, 100, 4096),
    UnknownModel("a", ["b"]),
    UnknownCapsule("c"),
    NoWorker("none is alive"),
    KVMemoryExceeded(11, 10, 16),
    WorkerLost("w0", "transport closed"),
    PoolExhausted(9, 1, 8),
    QueueFull(10, 10),
    UnsupportedModel("no such layer", layer="x"),
    CodecError("bad", nbytes=3),
]


def drawn() -> Iterator[tuple[str, str | None, int | None]]:
    """(name, parent, status) of each line of the tree in the module's docstring."""
    parents: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^    ((?:\|  |   )*)(?:[|`]- )?(\w+Error|[A-Z]\w+)(?: .*)?$", line)
        if not found or line.strip() == "Errors":
            continue
        prefix = re.match(r"^[ |`-]*", line)
        assert prefix is not None
        depth = (len(prefix.group()) - 4) // 3
        name = found.group(2)
        status = re.search(r"\((\d{3})\)$", line)
        yield name, parents[depth - 1] if depth else None, int(status[1]) if status else None
        parents[depth:] = [name]


def all_types(root: type[MalleeError] = MalleeError) -> Iterator[type[MalleeError]]:
    yield root
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from all_types(child)


def test_the_drawn_tree_is_the_tree_of_classes() -> None:
    have = {(cls.__name__, cls.__bases__[0].__name__) for cls in all_types()}
    assert {(name, parent or "Exception") for name, parent, _ in drawn()} == have


def test_the_drawn_status_is_the_status_of_the_class_and_of_those_below() -> None:
    shown = {name: status for name, _, status in drawn()}
    for cls in all_types():
        lineage = [shown.get(base.__name__) for base in cls.__mro__]
        want = next((status for status in lineage if status is not None), 500)
        assert cls.status == want, cls


def test_codes_are_unique_except_for_the_root() -> None:
    codes = [cls.code for cls in all_types() if cls is not MalleeError]
    assert len(set(codes)) == len(codes), sorted(codes)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_survives_wire_and_pickle_with_type_text_and_fields(error: MalleeError) -> None:
    raw = msgspec.msgpack.encode(error.to_wire())
    code, message, fields = msgspec.msgpack.decode(raw)
    for copy in (from_wire((code, message, fields)), pickle.loads(pickle.dumps(error))):
        assert type(copy) is type(error)
        assert str(copy) == str(error) == error.message
        assert copy.fields == error.fields
        assert copy.status == error.status


def test_an_unknown_code_becomes_an_internal_error_with_the_text() -> None:
    error = from_wire(("from_the_future", "what happened", {"n": 1}))
    assert type(error) is InternalError
    assert (str(error), error.fields) == ("what happened", {"n": 1})


def test_messages_hold_the_numbers_and_the_remedy() -> None:
    assert "4000 + max_tokens 100 = 4100 > 4096" in str(ContextLengthExceeded(4000, 100, 4096))
    assert "9 KV blocks needed, 1 of 8 free" in str(PoolExhausted(9, 1, 8))
    long = InvalidParameter("n", "x" * 200, "give 1")
    assert len(str(long)) < 120
    assert str(long).endswith(": give 1")


@pytest.mark.parametrize("code", [CapsulesFull, TierFull, StorageFull, PoolExhausted])
def test_more_than_there_can_ever_be_is_refused_for_good(code: Any) -> None:
    """Also behind a process boundary: whoever waits for room would wait for ever."""
    name = () if code in (CapsulesFull, PoolExhausted) else ("host",)
    now, never = code(*name, 4, 3, 8), code(*name, 9, 0, 8)
    if code is CapsulesFull:
        assert "shorter" in never.client_message
        assert "shorter" not in now.client_message
    for error, status in ((now, 503), (never, 400)):
        assert error.status == from_wire(error.to_wire()).status == status
    assert StorageFull("the disk", 9).status == 503  # a full disk's room is not known
