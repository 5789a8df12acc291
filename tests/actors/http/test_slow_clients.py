"""Connections that stay half open, and clients that read slowly: sockets against a real server."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from mallee.actors.http.entry import middleware
from mallee.actors.proxy import connections
from support.waiting import wait_until

BODY = json.dumps({"prompt": "abc"}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
LIMIT_S = 0.5
SEEN_S = 2.5  # the server looks once a second


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that a test can wait for."""
    monkeypatch.setattr(connections, "HEAD_S", LIMIT_S)
    monkeypatch.setattr(connections, "WRITE_S", LIMIT_S)
    monkeypatch.setattr(connections, "MIN_READ_RATE", 1 << 24)
    monkeypatch.setattr(middleware, "BODY_S", LIMIT_S)


def ask(live: Any) -> int:
    """The status of an ordinary request."""
    with live.connect() as conn:
        conn.sendall(HEAD % len(BODY) + BODY)
        return int(received(conn, b"\r\n").split(b" ")[1])


def received(conn: socket.socket, mark: bytes) -> bytes:
    raw = b""
    while mark not in raw and (more := conn.recv(65536)):
        raw += more
    return raw


def ending(conn: socket.socket) -> bytes:
    """All that comes until the server closes."""
    raw = b""
    try:
        while more := conn.recv(65536):
            raw += more
    except ConnectionResetError:
        pass
    return raw


def num_open(live: Any) -> int:
    """Connections of this process's server."""
    return sum(
        c.laddr.port == live.port and c.status == psutil.CONN_ESTABLISHED
        for c in psutil.Process().net_connections("tcp")
    )


def crowd(live: Any, num: int, sent: bytes) -> Iterator[socket.socket]:
    for _ in range(num):
        conn = live.connect()
        conn.sendall(sent)
        yield conn


@pytest.mark.parametrize("num", [100, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", b""),
        (b"POST /v1/comp", b"HTTP/1.1 408"),
        (HEAD % 100 + b'{"prompt"', b"HTTP/1.1 408"),
    ],
    ids=["nothing", "half a head", "half a body"],
)
def test_half_open_connections_are_cut_and_the_service_goes_on(
    live: Any, short: None, num: int, sent: bytes, answer: bytes
) -> None:
    """F30, part, I26, part: others are answered meanwhile, files and memory come back."""
    assert ask(live) == 200
    process = psutil.Process()
    before, memory = process.num_fds(), process.memory_info().rss
    conns = list(crowd(live, num, sent))
    assert ask(live) == 200
    began = time.monotonic()
    endings = [ending(conn) for conn in conns]
    assert time.monotonic() - began < SEEN_S + num / 200
    assert all(raw.startswith(answer) for raw in endings)
    assert ask(live) == 200
    for conn in conns:
        conn.close()
    wait_until(lambda: process.num_fds() <= before + 2, timeout_s=5)
    assert process.memory_info().rss - memory < 30 << 20
    assert len(live.service.streams) == 3  # those of `ask`


@pytest.mark.parametrize("num", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_head_that_comes_byte_by_byte_is_cut(live: Any, short: None, num: int) -> None:
    """F30, part: bytes win no time; an empty line before a request is no request."""
    for drip in (b"X", b"\r\n"):
        conns = list(crowd(live, num, b""))
        cut: set[socket.socket] = set()
        deadline = time.monotonic() + SEEN_S + num / 100
        while len(cut) < num:
            assert time.monotonic() < deadline, f"{num - len(cut)} are open"
            for conn in conns:
                if conn in cut:
                    continue
                try:
                    conn.setblocking(False)
                    conn.sendall(drip)
                    if not conn.recv(1000):
                        cut.add(conn)
                except BlockingIOError:
                    pass
                except OSError:
                    cut.add(conn)
            time.sleep(0.05)
        assert ask(live) == 200
        for conn in conns:
            conn.close()


@pytest.mark.parametrize("head", [b"GET /" + b"x" * 10**6, b"GET / HTTP/1.1\r\nX: " + b"y" * 10**6])
def test_a_head_without_end_is_431(live: Any, head: bytes) -> None:
    """F30, part: the length of a head is bounded."""
    with live.connect() as conn:
        try:
            conn.sendall(head)
        except ConnectionError:
            return  # cut while it was sent
        assert ending(conn)[:12] in (b"HTTP/1.1 431", b"")


def test_a_chunked_body_without_data_is_cut(live: Any, short: None) -> None:
    """Extensions of chunks and trailers are bytes of nothing."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    for more in (b"1;ext=" + b"e" * 10**6, b"0\r\nTrailer: " + b"t" * 10**6):
        with live.connect() as conn:
            try:
                conn.sendall(head + more)
            except ConnectionError:
                continue
            assert b" 200 " not in ending(conn)
    assert ask(live) == 200


def test_the_rest_of_a_refused_body_is_not_waited_for(live: Any, short: None) -> None:
    """An answer given before the body has come (an unknown path) does not hold the connection."""
    with live.connect() as conn:
        conn.sendall(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
        assert b"404" in received(conn, b"}}")
        assert ending(conn) == b""


def test_a_client_may_wait_for_the_word_to_go_on(live: Any) -> None:
    """`Expect: 100-continue`: 100, then the answer; one of a body too long gets its 413 alone."""
    ask_first = HEAD.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n")
    with live.connect() as conn:
        conn.sendall(ask_first % len(BODY))
        assert received(conn, b"\r\n\r\n").startswith(b"HTTP/1.1 100")
        conn.sendall(BODY)
        assert received(conn, b"\r\n").startswith(b"HTTP/1.1 200")
    with live.connect() as conn:
        conn.sendall(ask_first % 10**9)
        assert ending(conn).startswith(b"HTTP/1.1 413")


@contextmanager
def large_answer(live: Any) -> Iterator[socket.socket]:
    """The connection of an answer of megabytes whose beginning came."""
    live.service.reply = lambda branch: "x" * 16000
    body = json.dumps({"prompt": "abc", "max_tokens": 190, "n": 128, "logprobs": 20}).encode()
    with socket.socket() as conn:
        conn.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        conn.settimeout(10)
        conn.connect(("127.0.0.1", live.port))
        conn.sendall(HEAD % len(body) + body)
        assert conn.recv(100).startswith(b"HTTP/1.1 200")
        yield conn


def test_a_client_that_takes_nothing_of_a_whole_answer_is_cut(live: Any, short: None) -> None:
    """F30, part: what it doesn't read is given up; the others don't notice."""
    with large_answer(live):
        assert num_open(live) >= 1
        wait_until(lambda: num_open(live) == 0, timeout_s=60)
        assert ask(live) == 200
    assert live.service.closed.is_set()


def test_a_large_unread_answer_is_no_reason_to_wait_longer(
    live: Any, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F30, part: its size gives the time to take it all, but not to take nothing."""
    monkeypatch.setattr(connections, "MIN_READ_RATE", 1)
    with large_answer(live):
        wait_until(lambda: num_open(live) == 0, timeout_s=10)
    assert ask(live) == 200


def test_a_reader_that_takes_something_now_and_then_is_left_alone(
    live: Any, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as it keeps the least rate of the whole."""
    monkeypatch.setattr(connections, "WRITE_S", 3.0)
    monkeypatch.setattr(connections, "MIN_READ_RATE", 1)
    with large_answer(live) as conn:
        began = time.monotonic()
        while time.monotonic() - began < 7.0:
            assert conn.recv(16384)
            time.sleep(0.03)
        assert num_open(live) == 1
        monkeypatch.setattr(connections, "WRITE_S", LIMIT_S)
        wait_until(lambda: num_open(live) == 0, timeout_s=10)


def test_connections_beyond_a_clients_share_are_503(
    live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F30, part: with a time to come back and the numbers; room is there again at once."""
    limits = live.server._connections
    monkeypatch.setattr(limits, "_most_of_client", 5)
    wait_until(lambda: not limits._open, timeout_s=15)
    conns = list(crowd(live, 5, b""))
    with live.connect() as refused:
        raw = ending(refused)
    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 1" in head
    assert "6 connections of one client, of 5" in json.loads(body)["error"]["message"]
    conns.pop().close()
    wait_until(lambda: len(limits._open) == 4, timeout_s=5)
    assert ask(live) == 200
    for conn in conns:
        conn.close()
    wait_until(lambda: not limits._by_client, timeout_s=5)


def test_connections_beyond_all_are_refused(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """F30, part: with a word as long as there are not too many even for that."""
    limits = live.server._connections
    wait_until(lambda: not limits._open, timeout_s=15)
    monkeypatch.setattr(limits, "_most", 3)
    monkeypatch.setattr(connections, "REFUSED_S", 60.0)
    conns = list(crowd(live, 8, b""))
    endings = [received(conn, b"}}") for conn in conns[3:6]]
    assert all(raw.startswith(b"HTTP/1.1 503") for raw in endings)
    assert ending(conns[7]) == b""
    for conn in conns:
        conn.close()
    wait_until(lambda: not limits._open, timeout_s=5)
    assert ask(live) == 200
