"""The ends of branches in a stream: each has exactly one, however it ends."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from mallee.actors.gateway.service import Delta
from mallee.protocol.errors import PoolExhausted, WorkerLost

PATH, CHAT = "/v1/completions", "/v1/chat/completions"
FORK = "/v1/capsules/req_x.0/fork"
MESSAGES = [{"role": "user", "content": "hi"}]
ASKED: list[tuple[str, dict[str, Any]]] = [
    (PATH, {"prompt": "abc", "n": 3}),
    (PATH, {"prompt": ["abc", "de", "f"]}),
    (CHAT, {"messages": MESSAGES, "n": 3}),
    (FORK, {"n": 3}),
]
every_stream = pytest.mark.parametrize(("path", "body"), ASKED)
Failed = Callable[..., Delta]


def ends(events: list[Any]) -> dict[int, str]:
    """The reasons of all branches; no branch has two, and nothing of one comes after its end."""
    found: dict[int, str] = {}
    for event in events:
        if event == "[DONE]":
            continue
        if "error" in event:
            assert event is events[-1]
            for index in event["mallee"]["unfinished"]:
                assert index not in found
                found[index] = event["error"]["code"]
            continue
        for choice in event["choices"]:
            assert choice["index"] not in found
            if choice["finish_reason"] is not None:
                found[choice["index"]] = choice["finish_reason"]
                assert choice["mallee"].keys() >= {"capsule", "completion_tokens", "cached_tokens"}
            else:
                assert "mallee" not in choice
    return found


@every_stream
def test_branches_end_by_stop_and_by_length(call: Any, path: str, body: dict[str, Any]) -> None:
    """With the capsule and the usage of each."""
    for more, reason, num in [({}, "stop", 8), ({"max_tokens": 3}, "length", 3)]:
        events = call("POST", path, {**body, "stream": True, **more}).events
        assert ends(events) == dict.fromkeys(range(3), reason)
        assert events[-1] == "[DONE]"
        told = [c["mallee"] for e in events[:-1] for c in e["choices"] if c["finish_reason"]]
        assert [each["completion_tokens"] for each in told] == [num] * 3
        assert len({each["capsule"] for each in told}) == 3


def test_the_tokens_of_branches_add_up_to_the_usage(call: Any) -> None:
    call.service.reply = lambda branch: "x" * (branch + 1) + "STOP more"
    body = {"prompt": "abc", "n": 3, "stop": "STOP"}
    answer = call("POST", PATH, body).body
    tokens = [choice["mallee"]["completion_tokens"] for choice in answer["choices"]]
    assert tokens == [5, 6, 7]
    assert sum(tokens) == answer["usage"]["completion_tokens"]
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    events = call("POST", PATH, streamed).events
    assert ends(events) == dict.fromkeys(range(3), "stop")
    assert events[-2]["usage"]["completion_tokens"] == sum(tokens)


@pytest.mark.parametrize("lost", [(0,), (2,), (0, 1), (0, 1, 2)])
def test_branches_that_fail_in_the_middle_end_each_once(
    call: Any, failed: Failed, lost: tuple[int, ...]
) -> None:
    """Those of a worker that is lost for good, while others go on or fail too."""

    async def script(stream: Any) -> AsyncIterator[Delta]:
        num = 0
        async for delta in call.service.plain(stream):
            num += 1
            if num == 7:
                for branch in lost:
                    yield failed(branch, WorkerLost("w0", "test"))
            if num < 7 or delta.branch not in lost:
                yield delta

    call.service.script = script
    events = call("POST", PATH, {"prompt": "abc", "n": 3, "stream": True}).events
    found = ends(events)
    assert found.keys() == {0, 1, 2}
    good = {index: reason for index, reason in found.items() if index not in lost}
    assert set(good.values()) <= {"stop"}
    assert all(found[index] in ("error", "worker_lost") for index in lost)
    assert (events[-1] == "[DONE]") == (len(lost) < 3)


def test_an_error_of_the_whole_stream_ends_the_branches_that_are_left(call: Any) -> None:
    async def script(stream: Any) -> AsyncIterator[Delta]:
        async for delta in call.service.plain(stream):
            if delta.branch == 1 and delta.boundary > 3:
                continue
            yield delta
        raise PoolExhausted(3, 1, 9)

    call.service.script = script
    call.service.reply = lambda branch: "hi" if branch == 2 else "hello"
    events = call("POST", PATH, {"prompt": "abc", "n": 3, "stream": True}).events
    assert ends(events) == {0: "stop", 1: "pool_exhausted", 2: "stop"}


def test_a_cancelled_branch_ends_as_such(call: Any) -> None:
    """As one that is pruned: the worker says so, and the others go on."""

    async def script(stream: Any) -> AsyncIterator[Delta]:
        async for delta in call.service.plain(stream):
            if delta.branch == 1 and delta.boundary > 3:
                continue
            if delta.branch == 1 and delta.boundary == 3:
                delta = delta._replace(finish="cancelled")
            yield delta

    call.service.script = script
    events = call("POST", PATH, {"prompt": "abc", "n": 2, "stream": True}).events
    assert ends(events) == {0: "stop", 1: "cancelled"}
