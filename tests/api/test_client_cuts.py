"""The SDK behind a proxy that cuts answers: the API runs each request once."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from mallee.client import AsyncMallee, ConnectionFailed, Mallee, StreamBroken, calls
from mallee.protocol.errors import UnknownRequest
from support.waiting import until


class Cutter:
    """A TCP proxy that cuts the next connections, each after so many bytes of its answers."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.num_open = 0
        self.after: list[int] = []
        self.change: Callable[[bytes], bytes] = lambda data: data  # of requests
        self.url = ""

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        inner, outer = await asyncio.open_connection("127.0.0.1", self._port)
        asking = asyncio.create_task(self._ask(reader, outer))
        left = self.after.pop(0) if self.after else 1 << 30
        try:
            while left and (data := await inner.read(min(left, 4096))):
                writer.write(data)
                await writer.drain()
                left -= len(data)
        except ConnectionError:
            pass  # the client has gone
        finally:
            asking.cancel()
            await asyncio.wait([asking])
            writer.close()
            self.num_open -= 1

    async def _ask(self, reader: asyncio.StreamReader, outer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                outer.write(self.change(data))
                await outer.drain()
        finally:
            outer.close()  # so that nothing more is read of it


@pytest.fixture
async def cutter(live: Any) -> AsyncIterator[Cutter]:
    cutter = Cutter(live.port)
    server = await asyncio.start_server(cutter.relay, "127.0.0.1", 0)
    cutter.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield cutter
    server.close()
    await until(lambda: not cutter.num_open)


@pytest.mark.parametrize("after", [1, 60, 300, 700, 1100])
async def test_what_was_cut_is_fetched_and_not_computed_again(
    live: Any, cutter: Cutter, after: int
) -> None:
    """I17, part: at any byte of a stream of branches, and before and inside of a whole answer."""
    texts = ["hello 0", "hello 1", "hello 2"]
    cutter.after = [after, after]
    async with AsyncMallee(cutter.url) as client:
        assert [each.text for each in await client.complete("abc", n=3)] == texts
        cutter.after = [min(after, 200)]
        assert (await client.prefill("abc", ttl_s=60)).id
    assert len(live.service.streams) == 2


async def test_cuts_are_followed_as_often_as_the_client_retries(live: Any, cutter: Cutter) -> None:
    async with AsyncMallee(cutter.url, max_retries=1) as client:
        cutter.after = [300, 400]
        with pytest.raises(StreamBroken):
            await client.complete("abc", n=3)
        cutter.after = [1, 1]
        with pytest.raises(ConnectionFailed):
            await client.prefill("abc")
        assert len(live.service.streams) == 2
        # A stream that its reader sees grow is not sent again: left early, it ends at once, and a key would
        # have it go on for its reader's return.
        cutter.after = [600]
        with pytest.raises(StreamBroken):
            await client.stream("abc", n=3).wait()
        assert len(live.service.streams) == 3


async def test_an_answer_of_another_run_is_not_taken_for_the_same(cutter: Cutter) -> None:
    """Another gateway knows no key, so it runs the request: its text may differ."""
    keys = iter(range(9))

    def rekeyed(data: bytes) -> bytes:
        head, mark, rest = data.partition(b"Idempotency-Key: ")
        return head + mark + str(next(keys)).encode() + rest[1:] if mark else data

    cutter.change, cutter.after = rekeyed, [500]
    async with AsyncMallee(cutter.url) as client:
        with pytest.raises(StreamBroken, match="another gateway"):
            await client.complete("abc", n=3)


async def test_one_branch_is_pruned_and_a_request_tells_its_course(live: Any) -> None:
    """Both go to the service's own paths, and its errors keep their type."""
    live.service.holds_after = 2
    asked: list[Any] = []
    live.service.prune = lambda name, branches, scope: asked.append((name, branches)) or branches
    record = {"object": "request", "age_s": 1.0, "state": "ended", "cache": None, "branches": []}
    live.service.life = lambda name, scope, **_: {"id": name, **record}
    async with AsyncMallee(live.url) as client, client.stream("abc", n=2) as branches:
        async for _ in branches.events():
            if len(branches.branches) == 2:
                break
        assert await branches.branches[1].prune()
        assert asked == [(branches.request_id, [1])]
        assert (await client.request("req_7")).id == "req_7"
        del live.service.prune, live.service.life
        with pytest.raises(UnknownRequest):
            await client.request("req_7")


@pytest.mark.parametrize("repeats", [True, False])
async def test_closing_an_answer_that_was_cut_closes_no_other_s_connection(
    live: Any, cutter: Cutter, repeats: bool
) -> None:
    """I17, part: neither that on which it was fetched again, which another answer has now, nor a new one."""
    goes_on, plain = asyncio.Event(), live.service.plain

    async def script(stream: Any) -> AsyncIterator[Any]:
        deltas = [delta async for delta in plain(stream)]
        for number, delta in enumerate(deltas):
            if number == 4 and len(live.service.streams) == 2:
                await goes_on.wait()
            yield delta

    live.service.script = script
    cutter.after = [300]
    asked = calls.generate("abc", None, {"n": 3})
    async with AsyncMallee(cutter.url) as client:
        cut = client._open(asked.keyed() if repeats else asked)
        if repeats:
            assert [each.text for each in await cut] == ["hello 0", "hello 1", "hello 2"]
        else:
            with pytest.raises(StreamBroken):
                await cut
        async with client.stream("abc", n=2) as other:
            events = other.events()
            await anext(events)
            await until(lambda: cutter.num_open == 1)
            await cut.close()
            goes_on.set()
            assert [each.text for each in await other] == ["hello 0", "hello 1"]
    assert len(live.service.streams) == 2, "nothing was asked again"


async def test_closing_the_client_ends_its_streams(live: Any) -> None:
    live.service.holds_after = 2

    def ask() -> None:
        client = Mallee(live.url)
        branches = client.stream("abc", n=2)
        next(branches.events())
        client.close()
        assert live.service.closed.wait(5)
        branches.close()

    await asyncio.to_thread(ask)


async def test_what_has_a_salt_is_used_with_it(live: Any) -> None:
    """Forks of a capsule and of an answer, reading, deleting: all in the scope that made it."""
    service = live.service
    async with AsyncMallee(live.url) as client:
        async with await client.prefill("abc", cache_salt="s") as capsule:
            scope = service.job.scope
            await capsule.fork(1).wait()
            assert service.job.scope == scope
            await client.capsule(capsule.id, cache_salt="s")
            assert service.capsules.asked_scope == scope
            await client.capsule(capsule.id)
            assert service.capsules.asked_scope != scope
        assert service.capsules.asked_scope == scope
        (branch,) = await client.stream("abc", cache_salt="t").wait()
        scope = service.job.scope
        service.capsules[branch.capsule] = service.capsules["req_x.0"]
        await branch.fork(1).wait()
        assert service.job.scope == scope
