"""The reverse proxy over raw sockets: bytes, ends, retries, limits."""

import asyncio
import gzip
import json
import re
import socket
from itertools import groupby
from pathlib import Path

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.trace import StatusCode

from bench.doubles.vllm_pod import VllmPod
from mallee.actors.front.http.backends import Backend as BackendConnection
from mallee.actors.front.http.backends import Backends
from mallee.actors.front.pods.endpoints import Endpoint, ListedEndpoints
from mallee.actors.front.proxy.config import ProxyConfig
from mallee.actors.front.proxy.proxy import Proxy
from mallee.actors.front.proxy.spans import ForwardSpans
from mallee.gateway.access.keys import new_key
from mallee.protocol.errors import ConfigError
from mallee.runtime.telemetry.families import exposition
from support.backends import (
    PLAIN,
    Backend,
    Received,
    answer,
    chunked,
    post,
    routed,
    wire,
)
from support.expositions import check_exposition
from support.pickers import pods
from support.span_tree import Spans
from support.waiting import until

pytestmark = pytest.mark.real_time  # sockets

SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = [b'data: {"choices": [{"text": "%d"}]}\n\n' % n for n in range(5)] + [b"data: [DONE]\n\n"]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
BODIES: list[tuple[str, dict[str, object]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [IMAGE, AUDIO]}]}),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": "é \U0001f333"},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": "x"},
            ],
            "tools": TOOLS,
            "logprobs": True,
            "top_logprobs": 5,
            "stream": True,
            "stream_options": {"include_usage": True},
            "unknown_field": {"nested": [1, None, 2.50]},
        },
    ),
    ("/v1/completions?trace=1", {"prompt": [1, 2, 3], "logprobs": 3, "echo": True}),
    ("/v1/messages?beta=true", {"system": "s", "messages": [], "thinking": {"type": "enabled"}}),
    ("/v1/responses", {"input": "i", "include": ["reasoning.encrypted_content"]}),
    ("/v1/embeddings", {"input": ["a", "b"]}),
    ("/tokenize", {"prompt": "x"}),
]
# As the clients send them: of OpenAI's package, of Claude Code and of Codex.
LINES = (
    "Accept-Encoding: gzip, deflate",
    "User-Agent: OpenAI/Python 2.1.0",
    "X-Stainless-Retry-Count: 0",
    "anthropic-beta: claude-code-20250219,interleaved-thinking-2025-05-14",
    "X-Claude-Code-Session-Id: 7f",
    "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "Authorization: Bearer sk-1",
    "Content-Type: application/json",
    "X-Twice: 1",
    "X-Twice: 2",
)
ANSWERS = [
    PLAIN,
    SSE + chunked(*EVENTS),
    b"HTTP/1.1 400 Bad Request\r\nContent-Length: 3\r\nX-Odd:  spaced \r\n\r\nbad",
    b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%b"
    % (len(gzip.compress(b"x" * 99, mtime=0)), gzip.compress(b"x" * 99, mtime=0)),
    b"HTTP/1.1 204 No Content\r\n\r\n",
    b"HTTP/1.1 500 Our Own Words\r\nContent-Length: 0\r\nSet-Cookie: a\r\nSet-Cookie: b\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN,
]


@pytest.mark.parametrize("raw", ANSWERS)
async def test_bytes_are_those_of_the_backend_and_of_the_client(raw: bytes) -> None:
    """X27, part: as sent there directly: heads but what is of one hop, bodies, statuses, repeated lines."""
    async with (
        Backend(answer(raw)) as backend,
        routed([backend]) as proxy,
        wire(proxy.port) as through,
        wire(backend.port) as direct,
    ):
        for path, body in BODIES:
            message = post(json.dumps(body).encode(), *LINES, path=path)
            seen = await through.ask(message)
            direct.send(message)
            expected = await direct.answer()
            if expected.status == 100:
                expected = await direct.answer()
            assert (seen.status, seen.body) == (expected.status, expected.body)
            assert seen.passed == expected.passed
            assert seen.value("x-mallee-worker") == backend.address
            here, there = backend.received[-2:]
            assert here == there


@pytest.mark.parametrize("named", ["content-length", "Host, Content-Length", "close, host"])
async def test_a_connection_line_takes_no_length_from_a_message(named: str) -> None:
    """A body without its length would be the next request, or the next answer."""
    line = f"Connection: {named}"
    raw = f"HTTP/1.1 200 OK\r\n{line}\r\nContent-Length: 2\r\n\r\n{{}}".encode()
    async with Backend(answer(raw)) as backend, routed([backend]) as proxy:
        async with wire(proxy.port) as client:
            body = b"GET /smuggled HTTP/1.1\r\nHost: r\r\n\r\n"
            assert (await client.ask(post(body, line))).body == b"{}"
        (request,) = backend.received
        assert request.body == body
        assert b"Host: router" in request.lines


async def test_bodies_nested_deeper_than_can_be_read_are_the_backends_to_refuse() -> None:
    deep = b'{"messages":' + b"[" * 3000 + b"]" * 3000 + b"}"
    async with Backend() as backend, routed([backend]) as proxy, wire(proxy.port) as client:
        assert (await client.ask(post(deep))).status == 200
        assert backend.received[0].body == deep
        assert (await client.ask(post(deep, path="/v1/router/select"))).status == 400
        assert (await client.ask(post(deep, path="/v1/router/release"))).status == 400


async def test_gzipped_and_chunked_requests_arrive_whole() -> None:
    async with Backend() as backend, routed([backend]) as proxy, wire(proxy.port) as client:
        packed = gzip.compress(b'{"prompt": "x"}')
        assert (await client.ask(post(packed, "Content-Encoding: gzip"))).status == 200
        head = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n"
        assert (await client.ask(head + chunked(b'{"prom', b'pt": 7}'))).status == 200
        assert [each.body for each in backend.received] == [packed, b'{"prompt": 7}']
        assert b"content-length: 13" in backend.received[1].lines
        expecting = post(b"{}", "Expect: 100-continue")
        client.send(expecting[:-2])
        assert (await client.answer(is_head=True)).status == 100
        client.send(expecting[-2:])
        assert (await client.answer()).status == 200
        assert b"Expect: 100-continue" not in backend.received[2].lines


async def test_other_methods_old_clients_and_pipelined_requests_are_served() -> None:
    async def script(_: Backend, request: Received, writer: asyncio.StreamWriter) -> None:
        number = request.head.split(b" ")[1]
        if request.head.startswith(b"HEAD"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n")
        elif number == b"/stream":
            writer.write(SSE + chunked(*EVENTS))
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(number), number))

    async with Backend(script) as backend, routed([backend]) as proxy:
        async with wire(proxy.port) as client:
            head = await client.ask(b"HEAD /v1/x HTTP/1.1\r\nHost: r\r\n\r\n", is_head=True)
            assert head.value("content-length") == "99"
            assert (await client.ask(b"OPTIONS /o HTTP/1.1\r\nHost: r\r\n\r\n")).body == b"/o"
            client.send(*(b"GET /%d HTTP/1.1\r\nHost: r\r\n\r\n" % n for n in range(40)))
            found = [(await client.answer()).body for _ in range(40)]
            assert found == [b"/%d" % n for n in range(40)]
            await client.ask(b"GET /last HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n")
            assert await client.is_closed()
        async with wire(proxy.port) as client:
            old = await client.ask(b"GET /stream HTTP/1.0\r\n\r\n")
            assert (old.body, old.value("transfer-encoding")) == (b"".join(EVENTS), None)
            assert await client.is_closed()
        assert proxy.counts.registry.get_sample_value(
            "mallee_router_requests_total", {"end": "answered"}
        ) == len(backend.received)


async def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    async def script(_: Backend, __: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nabc")
        await writer.drain()
        raise ConnectionError

    async with Backend(script) as backend, routed([backend]) as proxy, wire(proxy.port) as client:
        for _ in range(2):
            writer_answer = await client.ask(post(b"{}"))
            assert (writer_answer.status, writer_answer.body) == (200, b"abc")


class _Transport:
    """Takes what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True

    close = abort


class _Taker:
    method = b"POST"

    def __init__(self) -> None:
        self.status = 0
        self.body = b""
        self.num_ends = 0
        self.lost = ""

    def on_answer(self, status: int, *_: object) -> bool:
        self.status = status
        return True

    def on_body(self, data: bytes, *, ends: bool) -> None:
        self.body += data
        self.num_ends += ends

    def on_lost(self, reason: str) -> None:
        self.lost = reason


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.data())
async def test_an_answer_is_the_same_however_it_is_split(
    pieces: list[bytes], data: st.DataObject
) -> None:
    raw = SSE + chunked(*pieces)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(raw) - 1), max_size=12)))
    connection, taker = BackendConnection(Backends(1.0), "a:1"), _Taker()
    connection.connection_made(_Transport())  # type: ignore[arg-type]
    for _ in range(2):  # it is kept for another
        connection.send(taker, b"")
        for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
            connection.data_received(raw[begin:end])
    assert (taker.status, taker.body, taker.num_ends) == (200, b"".join(pieces) * 2, 2)
    assert not taker.lost
    cut = data.draw(st.integers(0, len(raw) - 1))
    connection.send(taker, b"")
    connection.data_received(raw[:cut])
    connection.connection_lost(None)
    assert (taker.num_ends, bool(taker.lost)) == (2, True)


@settings(max_examples=30, deadline=None)
@given(st.data())
async def test_more_than_an_answer_is_not_passed_on(data: st.DataObject) -> None:
    """A backend that sends a second answer to one request could give it to the next client."""
    raw = PLAIN + PLAIN
    cut = data.draw(st.integers(0, len(raw)))
    connection, taker = BackendConnection(Backends(1.0), "a:1"), _Taker()
    transport = _Transport()
    connection.connection_made(transport)  # type: ignore[arg-type]
    connection.send(taker, b"")
    connection.data_received(raw[:cut])
    if raw[cut:]:
        connection.data_received(raw[cut:])
    assert transport.closed
    assert taker.body in (b"", b"{}")


async def test_a_client_that_leaves_ends_its_request_at_the_backend() -> None:
    gone = asyncio.Event()

    async def script(backend: Backend, _: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE + b"3\r\nabc\r\n")
        await writer.drain()
        await backend.left(writer)
        gone.set()

    async with Backend(script) as backend, routed([backend]) as proxy:
        async with wire(proxy.port) as client:
            client.send(post(b"{}", path="/v1/responses"))
            await client.reader.readuntil(b"abc\r\n")
        async with asyncio.timeout(1):
            await gone.wait()


async def fail(_: Backend, __: Received, writer: asyncio.StreamWriter) -> None:
    raise ConnectionError


@pytest.mark.parametrize("kind", ["reset", "503", "half a head", "no HTTP"])
async def test_another_backend_is_asked_before_the_first_byte(kind: str) -> None:
    async def script(backend: Backend, request: Received, writer: asyncio.StreamWriter) -> None:
        if kind == "503":
            writer.write(b"HTTP/1.1 503 Busy\r\nContent-Length: 1\r\n\r\n!")
            return
        writer.write(
            {"half a head": b"HTTP/1.1 200 OK\r\n", "no HTTP": b"hello\r\n\r\n"}.get(kind, b"")
        )
        await writer.drain()
        raise ConnectionError

    async with Backend(script) as bad, Backend() as good, routed([bad, good]) as proxy:
        async with wire(proxy.port) as client:
            for number in range(4):
                raw = json.dumps({"prompt": [number] * 64}).encode()
                found = await client.ask(post(raw, path="/v1/completions"))
                assert (found.status, found.value("x-mallee-worker")) == (200, good.address)
        assert bad.received
        assert {each.body for each in bad.received} <= {each.body for each in good.received}


async def test_retries_have_a_bound_and_the_last_failure_is_told() -> None:
    async with (
        Backend(fail) as a,
        Backend(fail) as b,
        Backend(fail) as c,
        routed([a, b, c], retries=1) as proxy,
        wire(proxy.port) as client,
    ):
        found = await client.ask(post(b"{}"))
        error = json.loads(found.body)["error"]
        assert (found.status, error["code"]) == (502, "backend_failed")
        assert found.value("retry-after") == "1"
        assert sum(bool(each.received) for each in (a, b, c)) == 2
    async with (
        Backend(answer(b"HTTP/1.1 503 Busy\r\nContent-Length: 3\r\n\r\nown")) as only,
        routed([only]) as proxy,
        wire(proxy.port) as client,
    ):
        found = await client.ask(post(b"{}"))
        assert (found.status, found.body) == (503, b"own"), "there is no other"


@pytest.mark.parametrize("is_gone", [False, True])
async def test_a_request_that_two_backends_died_of_is_sent_to_no_third(is_gone: bool) -> None:
    """Also where each ended a connection that was kept, and listens no more."""

    async def script(backend: Backend, request: Received, writer: asyncio.StreamWriter) -> None:
        if b"fine" in request.body:
            writer.write(PLAIN)
            return
        if is_gone:
            backend.stop_listening()
        raise ConnectionError

    async with (
        Backend(script) as a,
        Backend(script) as b,
        Backend(script) as c,
        routed([a, b, c], retries=5, scrape_s=5) as proxy,
        wire(proxy.port) as client,
    ):
        while not all(each.received for each in (a, b, c)):
            number = len(a.received + b.received + c.received)
            body = json.dumps({"fine": 1, "prompt": [number] * 64}).encode()
            assert (await client.ask(post(body, path="/v1/completions"))).status == 200
        for each in (a, b, c):
            each.received.clear()
        found = await client.ask(post(b'{"prompt": "bad"}', path="/v1/completions"))
        assert (found.status, json.loads(found.body)["error"]["code"]) == (503, "poison_request")
        assert sum(bool(each.received) for each in (a, b, c)) == 2


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("raw", [SSE + b"3\r\nabc\r\n", SSE + b"9\r\nabc", PLAIN[:-1]])
async def test_an_answer_that_breaks_is_cut_and_not_asked_for_again(
    raw: bytes, version: bytes
) -> None:
    """X20, part: never a clean end, and no [DONE]."""

    async def script(_: Backend, __: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)
        await writer.drain()
        raise ConnectionError

    async with Backend(script) as a, Backend(script) as b, routed([a, b]) as proxy:
        async with wire(proxy.port) as client:
            message = post(b"{}").replace(b"HTTP/1.1", b"HTTP/" + version)
            message += post(b"{}")  # one that waits for its turn
            with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
                await client.ask(message)
        assert len(a.received) + len(b.received) == 1
        assert proxy.counts.registry.get_sample_value(
            "mallee_router_requests_total", {"end": "cut"}
        )


async def test_a_connection_that_the_backend_ended_meanwhile_is_no_failure() -> None:
    """Servers end idle connections when they like."""
    async with Backend() as backend, routed([backend], scrape_s=30) as proxy:
        async with wire(proxy.port) as client:
            for _ in range(3):
                assert (await client.ask(post(b"{}"))).status == 200
                for writer in list(backend._writers):
                    writer.transport.abort()
        assert proxy.counts.registry.get_sample_value("mallee_router_retries_total") == 0


@pytest.mark.parametrize("begun", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"])
async def test_a_backend_that_has_read_a_request_is_not_asked_again(begun: bytes) -> None:
    """It has begun to answer, or has had the time to."""
    async with Backend() as backend, routed([backend], scrape_s=30) as proxy:
        async with wire(proxy.port) as client:
            await client.ask(post(b"{}"))

            async def script(_: Backend, __: Received, writer: asyncio.StreamWriter) -> None:
                (connection,) = proxy.connections
                assert connection._exchange is not None
                if not begun:
                    connection._exchange._heard_at -= 2
                writer.write(begun)
                await writer.drain()
                raise ConnectionError

            backend.script = script
            assert (await client.ask(post(b"{}"))).status == 502
        assert len(backend.received) == 2


async def test_a_slow_client_holds_its_backend_back() -> None:
    """Bytes that are not read are neither buffered here nor sent there."""
    sent = 0

    async def script(_: Backend, __: Received, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (64 << 20))
        for _ in range(1024):
            writer.write(bytes(64 << 10))
            await writer.drain()
            sent += 64 << 10

    async with Backend(script) as backend, routed([backend]) as proxy, wire(proxy.port) as client:
        client.send(post(b"{}"))
        await until(lambda: bool(proxy.connections) and next(iter(proxy.connections)).is_paused)
        (connection,) = proxy.connections
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.1)
        assert connection._transport.get_write_buffer_size() < 2 << 20
        assert sent < 32 << 20
        assert len((await client.answer()).body) == 64 << 20


@pytest.mark.parametrize(
    ("message", "status"),
    [
        (post(b"{}", "Transfer-Encoding: chunked"), 400),
        (post(b"{}", "Content-Length: 3"), 400),
        (post(b"{}", "Content-Length: 2"), 400),
        (
            b"POST / HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: gzip, chunked, x\r\n\r\n0\r\n\r\n",
            400,
        ),
        (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: r\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: r\r\nContent-Length : 2\r\n\r\n{}", 400),
        (b"GET / HTTP/1.1\r\nHost: r\r\nX: a\rb\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: r\r\nX: a\x00b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: r\r\nHost: s\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (
            b"POST / HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
            501,
        ),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: r\r\n\r\n", 501),
        (
            b"GET / HTTP/1.1\r\nHost: r\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
            501,
        ),
        (b"GET / HTTP/1.1\r\nHost: r\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: r\r\n" + b"a: b\r\n" * 300 + b"\r\n", 431),
        (b"POST / HTTP/1.1\r\nHost: r\r\nContent-Length: 1048577\r\n\r\n", 413),
    ],
)
async def test_what_could_be_read_in_two_ways_or_is_too_large_is_refused(
    message: bytes, status: int
) -> None:
    """Nothing of it reaches a backend, nor of what follows it; the error has OpenAI's form."""
    async with Backend() as backend, routed([backend], max_body_mb=1) as proxy:
        async with wire(proxy.port) as client:
            found = await client.ask(message + b"GET /smuggled HTTP/1.1\r\nHost: r\r\n\r\n")
            assert (found.status, found.value("connection")) == (status, "close")
            assert json.loads(found.body)["error"]["message"]
            assert await client.is_closed()
        assert not backend.received


async def test_a_body_that_grows_too_large_is_refused_while_it_comes() -> None:
    async with Backend() as backend, routed([backend], max_body_mb=1) as proxy:
        async with wire(proxy.port) as client:
            client.send(b"POST / HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n")
            client.send(*[b"10000\r\n" + bytes(1 << 16) + b"\r\n"] * 17)
            assert (await client.answer()).status == 413
        assert not backend.received
        assert proxy.num_buffered == 0


async def test_slow_heads_slow_bodies_and_many_connections_are_bounded() -> None:
    limits = {"head_s": 0.2, "body_s": 0.4, "keep_alive_s": 0.3, "max_requests": 3}
    async with Backend() as backend, routed([backend], **limits) as proxy:
        async with wire(proxy.port) as slow, wire(proxy.port) as slower, wire(proxy.port) as idle:
            slow.send(b"POST / HTT")
            slower.send(post(b"{}")[:-1])
            assert (await idle.ask(post(b"{}"))).status == 200
            async with wire(proxy.port) as fourth:
                assert (await fourth.answer()).status == 503
            assert (await slow.answer()).status == 408
            assert (await slower.answer()).status == 408
            assert await idle.is_closed()
        await until(lambda: not proxy.connections)
        assert len(backend.received) == 1


async def test_a_backend_that_says_nothing_is_given_up() -> None:
    async def script(backend: Backend, request: Received, writer: asyncio.StreamWriter) -> None:
        if b"/stream" in request.head:
            writer.write(SSE + b"3\r\nabc\r\n")
        await writer.drain()
        await backend.left(writer)

    async with (
        Backend(script) as backend,
        routed([backend], silence_s=0.3) as proxy,
        wire(proxy.port) as client,
        wire(proxy.port) as other,
    ):
        other.send(post(b"{}", path="/stream"))
        found = await client.ask(post(b"{}"))
        assert (found.status, found.value("retry-after")) == (504, "1")
        with pytest.raises(asyncio.IncompleteReadError):
            await other.answer()


async def test_keys_are_asked_for_before_anything_is_forwarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MALLEE_API_KEY", raising=False)
    user, operator = new_key("user", "client", None), new_key("ops", "operator", None)
    file = tmp_path / "keys.yaml"
    file.write_text(json.dumps({"keys": [user.entry, operator.entry]}))
    async with Backend() as backend, routed([backend], keys_file=str(file)) as proxy:
        for lines, status in (
            ((), 401),
            (("Authorization: Bearer mallee_wrong",), 401),
            ((f"Authorization: Bearer {user.token}",), 200),
            ((f"x-api-key: {user.token}",), 200),
        ):
            async with wire(proxy.port) as client:
                assert (await client.ask(post(b"{}", *lines))).status == status
        assert len(backend.received) == 2
        assert user.token.encode() not in b"".join(each.head for each in backend.received)
        async with wire(proxy.port) as client:
            assert (
                await client.ask(b"GET /router/health HTTP/1.1\r\nHost: r\r\n\r\n")
            ).status == 200
            for token, status in ((user.token, 403), (operator.token, 200)):
                line = f"Authorization: Bearer {token}".encode()
                page = b"GET /router/backends HTTP/1.1\r\nHost: r\r\n" + line + b"\r\n\r\n"
                assert (await client.ask(page)).status == status
    with pytest.raises(ConfigError, match="listens beyond this machine"):
        async with Proxy(ProxyConfig(listen="0.0.0.0:0", endpoints=("127.0.0.1:1",))):
            pass


async def test_limits_of_keys_hold_as_at_a_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests and tokens of a minute, requests and branches at once; and keys expire, and are changed."""
    monkeypatch.delenv("MALLEE_API_KEY", raising=False)
    limits: dict[str, dict[str, object]] = {
        "requests": {"requests_per_minute": 2},
        "tokens": {"tokens_per_minute": 30},
        "running": {"max_running": 1},
        "branches": {"max_branches": 2},
        "old": {"expires": "2020-01-01T00:00:00Z"},
    }
    keys = {name: new_key(name, "client", None) for name in limits}
    file = tmp_path / "keys.yaml"
    entries = [key.entry | limits[name] for name, key in keys.items()]
    file.write_text(json.dumps({"keys": entries}))
    going = asyncio.Event()

    async def script(_: Backend, request: Received, writer: asyncio.StreamWriter) -> None:
        if b"wait" in request.body:
            await going.wait()
        if b"stream" in request.body:
            writer.write(SSE + chunked(*EVENTS))
            return
        body = b'{"usage": {"completion_tokens": 20}}'
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))

    async with (
        Backend(script) as backend,
        routed([backend], keys_file=str(file)) as proxy,
        wire(proxy.port) as client,
        wire(proxy.port) as other,
    ):

        def message(name: str, **body: object) -> bytes:
            line = f"Authorization: Bearer {keys[name].token}"
            raw = json.dumps({"prompt": list(range(8))} | body).encode()
            return post(raw, line, path="/v1/completions")

        async def refused(name: str, **body: object) -> tuple[int, str, str]:
            found = await client.ask(message(name, **body))
            error = json.loads(found.body)["error"]
            assert (found.value("retry-after") is not None) == (found.status == 429)
            return found.status, error["code"], error["message"]

        for _ in range(2):
            assert (await client.ask(message("requests"))).status == 200
        status, code, text = await refused("requests")
        assert (status, code) == (429, "quota_exceeded")
        assert "2 of 2 requests per minute" in text
        models = f"GET /v1/models HTTP/1.1\r\nHost: r\r\nx-api-key: {keys['requests'].token}"
        assert (await client.ask(f"{models}\r\n\r\n".encode())).status == 200, "it asks for nothing"
        assert (await client.ask(message("tokens", stream=True))).status == 200  # 8, and 6 events
        assert (await client.ask(message("tokens"))).status == 200  # 8, and 20
        assert (await refused("tokens"))[:2] == (429, "quota_exceeded")
        other.send(message("running", wait=1))
        await until(lambda: b"wait" in backend.received[-1].body)
        assert (await refused("running"))[:2] == (429, "quota_exceeded")
        going.set()
        assert (await other.answer()).status == 200
        assert (await client.ask(message("running"))).status == 200
        assert (await client.ask(message("branches", n=2))).status == 200
        assert (await refused("branches", n=3))[0] == 400, "never"
        page = b"".join(exposition(proxy.counts.registry, "")).decode()
        denied = dict(re.findall(r'mallee_router_denied_total\{.*status="(\d+)".*\} (\d)', page))
        assert denied == {"429": "3", "400": "1"}
        assert len(backend.received) == 7
    del entries[:-1]
    entries[0]["expires"] = "2099-01-01T00:00:00Z"
    async with Backend() as backend, routed([backend], keys_file=str(file)) as proxy:
        async with wire(proxy.port) as client:
            assert (await client.ask(message("old"))).status == 401
        file.write_text(json.dumps({"keys": entries}))
        await proxy.access.reload()
        async with wire(proxy.port) as client:
            assert (await client.ask(message("old"))).status == 200
            assert (await client.ask(message("requests"))).status == 401


async def test_the_course_of_a_request_is_a_trace() -> None:
    """The backend is told the router's span; a failure and the way on are seen."""

    async def script(backend: Backend, request: Received, writer: asyncio.StreamWriter) -> None:
        if backend is bad:
            raise ConnectionError
        writer.write(PLAIN)

    spans = Spans()
    async with (
        Backend(script) as bad,
        Backend(script) as good,
        routed([bad, good], scrape_s=5) as proxy,
        wire(proxy.port) as client,
    ):
        proxy.spans = ForwardSpans(spans.tracing)
        number = 0
        while not bad.received:
            number += 1
            body = json.dumps({"prompt": [number] * 64}).encode()
            parent = f"00-{number:032x}-b7ad6b7169203331-01"
            message = post(body, f"traceparent: {parent}", path="/v1/completions")
            assert (await client.ask(message)).status == 200
        for each in bad.received, good.received:
            told = [line for line in each[-1].lines if line.startswith(b"traceparent")]
            root = spans.named("POST /v1/completions")[-1].context
            assert told == [f"traceparent: 00-{number:032x}-{root.span_id:016x}-01".encode()]
        last = [each for each in spans.ended if each.context.trace_id == number]
        names = [each.name for each in last if each.name not in ("connect", "POST /v1/completions")]
        parts = [name for name, _ in groupby(names)]  # a kept connection may have ended before
        assert parts == ["choose", "first byte", "failover", "first byte", "answer"]
        failed = [each.name for each in last if each.status.status_code is StatusCode.ERROR]
        assert failed == ["first byte"]
        root_span = last[-1]
        assert root_span.attributes is not None
        assert root_span.attributes["mallee.worker.id"] == good.address
        assert root_span.attributes["http.response.status_code"] == 200
        assert root_span.parent is not None
        assert root_span.parent.span_id == 0xB7AD6B7169203331
        found = await client.ask(b"GET /names/of/clients HTTP/1.1\r\nHost: r\r\n\r\n")
        assert found.status == 200
        assert "names" not in str([each.to_json() for each in spans.ended])


async def test_backends_are_shown_their_own_key_and_not_the_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MALLEE_API_KEY", raising=False)
    monkeypatch.setenv("MALLEE_BACKENDS_API_KEY", "theirs")
    async with Backend(models=models("m")) as backend:
        backend.key = b"theirs"
        async with routed([backend]) as proxy, wire(proxy.port) as client:
            assert proxy.pods.served.workers.keys() == {"m"}
            found = await client.ask(post(b"{}", "Authorization: Bearer sk-1", "x-api-key: sk-2"))
            assert found.status == 200
            assert b"sk-" not in backend.received[0].head
    monkeypatch.setenv("MALLEE_BACKENDS_API_KEY", "a\r\nb: c")
    with pytest.raises(ConfigError, match="printable"):
        Proxy(ProxyConfig(endpoints=("127.0.0.1:1",)))


async def test_requests_under_way_end_before_the_router_does() -> None:
    going = asyncio.Event()

    async def script(_: Backend, __: Received, writer: asyncio.StreamWriter) -> None:
        await going.wait()
        writer.write(PLAIN)

    async with Backend(script) as backend, routed([backend]) as proxy, wire(proxy.port) as client:
        client.send(post(b"{}"))
        await until(lambda: bool(backend.received))
        closing = asyncio.create_task(proxy.close(5.0))
        await until(lambda: proxy.is_draining)
        going.set()
        found = await client.answer()
        assert (found.status, found.value("connection")) == (200, "close")
        await closing


def models(*names: str, adapter: str = "") -> str:
    listed: list[dict[str, object]] = [{"id": name, "max_model_len": 4096} for name in names]
    if adapter:
        listed.append({"id": adapter, "parent": names[0]})
    return json.dumps({"object": "list", "data": listed})


async def test_a_request_goes_to_the_backends_that_serve_its_model() -> None:
    """An unknown model's too: a backend refuses it in its own words."""
    one, two = models("a", adapter="lora"), models("b")
    async with (
        Backend(models=one) as a,
        Backend(models=two) as b,
        routed([a, b]) as proxy,
        wire(proxy.port) as client,
    ):
        for name, served in (("a", [a]), ("lora", [a]), ("b", [b]), ("c", [a, b])):
            for number in range(4):
                body = {"model": name, "prompt": [number] * 40}
                found = await client.ask(post(json.dumps(body).encode(), path="/v1/completions"))
                assert found.value("x-mallee-worker") in [each.address for each in served]
        assert proxy.pods.served.adapters == {"lora"}
        assert {view.max_model_len for view in proxy.pods.views()} == {4096}


async def test_a_model_that_one_backend_serves_is_refused_in_its_own_words() -> None:
    busy = answer(b"HTTP/1.1 503 Busy\r\nContent-Length: 3\r\n\r\nown")
    async with (
        Backend(busy, models=models("a", "a")) as a,
        Backend(models=models("b")) as b,
        routed([a, b]) as proxy,
        wire(proxy.port) as client,
    ):
        found = await client.ask(post(b'{"model": "a"}'))
        assert (found.status, found.body) == (503, b"own")
        assert not b.received


async def test_a_backend_that_joins_takes_no_readiness() -> None:
    async with Backend() as backend, routed([backend]) as proxy:
        proxy.pods.update([Endpoint(backend.address), Endpoint("127.0.0.1:1")])
        assert proxy.is_ready


async def test_the_ground_of_each_decision_is_told() -> None:
    async with (
        Backend() as a,
        Backend() as b,
        routed([a, b]) as proxy,
        wire(proxy.port) as client,
    ):

        async def ask(num_tokens: int, *lines: str) -> tuple[str | None, str | None]:
            body = json.dumps({"prompt": list(range(num_tokens))}).encode()
            found = await client.ask(post(body, *lines, path="/v1/completions"))
            return found.value("x-mallee-worker"), found.value("x-mallee-reason")

        first = await ask(512)
        assert first[1] == "load"
        assert await ask(1024) == (first[0], "prefix 0.50")
        homes = {(await ask(0, f"x-session-id: {n}")) for n in (1, 1, 1)}
        assert len(homes) == 1
        assert homes.pop()[1] == "affinity"


async def test_what_is_known_of_each_backend_is_told_and_follows_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A restart, another model or block size, no metrics of vLLM's, no server: within a second."""
    caplog.set_level("INFO")
    async with Backend(models=models("m")) as backend, routed([backend]) as proxy:

        def states() -> list[tuple[str, str]]:
            return [(v.knowledge.state, v.knowledge.reason) for v in proxy.pods.views()]

        def incarnation() -> int:
            (view,) = proxy.router.workers()
            return view.incarnation

        assert [state for state, _ in states()] == ["predicted"]
        before = incarnation()
        backend.started += 60
        backend.models = models("other")
        await until(lambda: incarnation() > before, 1)
        await until(lambda: proxy.pods.served.workers.keys() == {"other"}, 1)
        backend.block_size = 32
        reason = "its block size is 32, the router's 16"
        await until(lambda: states() == [("predicted", reason)], 1)
        assert proxy.router.workers()[0].num_blocks == 2 * 4096
        backend.metrics_status = b"404 Not Found"
        await until(lambda: states() == [("predicted", "its /metrics are not vLLM's")], 1)
        async with wire(proxy.port) as client:
            assert (await client.ask(post(b"{}"))).status == 200
            backend.metrics_status = b"200 OK"
            port = backend.port
            await backend.__aexit__()
            await until(lambda: states() == [("blind", "nothing listens there")], 1)
            assert not proxy.router.workers()
            refused = await client.ask(post(b"{}"))
            assert (refused.status, refused.value("retry-after")) == (503, "1")
            page = b"GET /router/%b HTTP/1.1\r\nHost: r\r\n\r\n"
            health = await client.ask(page % b"health")
            assert (health.status, json.loads(health.body)["backends"]) == (503, {"blind": 1})
            listed = json.loads((await client.ask(page % b"backends")).body)["backends"]
            assert listed[0]["reason"] == "nothing listens there"
            text = (await client.ask(page % b"metrics")).body.decode()
            assert not check_exposition(text, "router") - {"mallee_router_denied_total"}
            assert f'endpoint="{backend.address}",state="blind"}} 1.0' in text
            assert (await client.ask(page % b"nothing")).status == 404
            successor = Backend(port=port)
            successor.started = backend.started + 60
            async with successor:
                await until(lambda: len(proxy.router.workers()) == 1, 1)
                assert (await client.ask(page % b"health")).status == 200
    assert "BLIND: nothing listens there" in caplog.text
    assert "serves ('other',) now, not ('m',)" in caplog.text


async def test_names_are_resolved_again() -> None:
    found = {"pods": ["10.0.0.1"]}
    seen: list[list[str]] = []
    source = ListedEndpoints(["http://pods:80", "10.0.0.9:80"], look_s=0.01, resolve_s=0.01)

    async def resolve(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if not found[host]:
            raise socket.gaierror("no such name")
        return [(socket.AF_INET, None, None, "", (each, 80)) for each in found[host]]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
        task = asyncio.create_task(
            source.follow(lambda endpoints: seen.append([each.address for each in endpoints]))
        )
        await until(lambda: seen == [["10.0.0.1:80", "10.0.0.9:80"]])
        found["pods"] = ["10.0.0.3", "10.0.0.2"]
        await until(lambda: seen[-1] == ["10.0.0.2:80", "10.0.0.3:80", "10.0.0.9:80"])
        found["pods"] = []
        await asyncio.sleep(0.05)
        assert len(seen) == 2, "a name that can't be resolved keeps its addresses"
        task.cancel()


async def test_a_decision_alone_is_told_and_booked_until_it_is_released() -> None:
    async with (
        Backend() as a,
        Backend() as b,
        routed([a, b]) as proxy,
        wire(proxy.port) as client,
    ):

        async def ask(path: str, **body: object) -> tuple[int, dict[str, object]]:
            found = await client.ask(post(json.dumps(body).encode(), path=f"/v1/router/{path}"))
            return found.status, json.loads(found.body)

        ids = list(range(1024))
        status, first = await ask("select", prompt=ids, request_id="r1")
        assert (status, first["reason"], first["prompt_tokens"]) == (200, "load", 1024)
        assert (await ask("select", prompt=ids, request_id="r1"))[0] == 400
        assert proxy.router.stats().booked_requests == 1
        _, second = await ask("select/v1/completions", prompt=[*ids, *ids])
        assert (second["worker"], second["overlap_tokens"]) == (first["worker"], 1024)
        for expected in (True, False):
            assert await ask("release", request_id="r1") == (200, {"released": expected})
        long = [{"role": "user", "content": "long " * 10_000}]
        assert (await ask("select", messages=long))[0] == 200
        for wrong in ({}, {"request_id": 7}, {"request_id": ""}):
            assert (await ask("release", **wrong))[0] == 400
        async with wire(proxy.port) as other:
            same = post(
                json.dumps({"messages": long, "request_id": "r2"}).encode(),
                path="/v1/router/select",
            )
            found = await asyncio.gather(client.ask(same), other.ask(same))
            assert sorted(each.status for each in found) == [200, 400]
        assert proxy.router.stats().booked_requests == 1
        assert await ask("release", request_id="r2") == (200, {"released": True})
        assert not a.received
        assert not b.received


async def test_openais_client_streams_through_it() -> None:
    async with pods(2) as found, VllmPod() as third:
        addresses = tuple(each.address for each in (*found, third))
        config = ProxyConfig(listen="127.0.0.1:0", endpoints=addresses, scrape_s=0.1)
        async with Proxy(config) as proxy:
            await until(lambda: len(proxy.router.workers()) == 3)
            async with openai.AsyncOpenAI(
                base_url=f"http://127.0.0.1:{proxy.port}/v1", api_key="sk-1", max_retries=0
            ) as client:
                cached = []
                for num in (512, 1024):
                    stream = await client.completions.create(
                        model="m",
                        prompt=list(range(num)),
                        max_tokens=3,
                        stream=True,
                        stream_options={"include_usage": True},
                    )
                    chunks = [chunk async for chunk in stream]
                    usage = chunks[-1].usage
                    assert len(chunks) == 4
                    assert usage is not None
                    assert usage.prompt_tokens_details is not None
                    cached.append(usage.prompt_tokens_details.cached_tokens)
                assert cached == [0, 512]
