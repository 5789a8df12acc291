"""The gateway's bench runs without a peer, and its load generator counts what it should."""

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest

from bench.gateway import backends, load
from bench.measure import run_async
from support.benches import run_bench


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    """The last line of one short run: load generator, our gateway and stubs, in three processes."""
    return run_bench("gateway", "--quick", "--smg", "")[0]


def test_every_figure_of_ours_is_there(result: dict[str, Any]) -> None:
    assert set(result) >= {"direct", "ours", "peer", "ratio", "tokenizer", "machine"}
    assert set(result["ours"]) == {"p50_ms", "p99_ms", "rps", "added_ms", "fork_affinity"}
    assert set(result["ours"]["p50_ms"]) == {"c1", "c4", "tokens_c1"}
    assert result["peer"] == {}


def test_the_gateway_answers_and_costs_something(result: dict[str, Any]) -> None:
    ours, direct = result["ours"], result["direct"]
    assert all(ours["p50_ms"][case] > direct["p50_ms"][case] > 0 for case in direct["p50_ms"])
    assert all(rate > 0 for rate in ours["rps"].values())


def test_children_go_to_their_parent(result: dict[str, Any]) -> None:
    """X1: over HTTP, with prompts that extend the parent's, while it fits."""
    assert result["ours"]["fork_affinity"] == {"2": 1.0, "4": 1.0}


def test_the_stubs_tell_of_events_after_a_garbage_collection(tmp_path: Path) -> None:
    """A gateway that heard none would send children anywhere; uvloop drops what nothing refers to."""
    events = str(tmp_path / "events.sock")
    is_there = (tmp_path / "events.sock").exists

    async def check() -> None:
        stubs = asyncio.create_task(backends.serve([], [], 0.0, events))
        while not is_there() and not stubs.done():  # noqa: ASYNC110 - told by the file alone
            await asyncio.sleep(0.01)
        for _ in range(3):
            gc.collect()
            await asyncio.sleep(0)
        try:
            _, writer = await asyncio.open_unix_connection(events)
            writer.close()
            await writer.wait_closed()
        finally:
            stubs.cancel()
            await asyncio.wait([stubs])

    run_async(check())


async def test_the_load_generator_reads_answers_of_both_kinds() -> None:
    """A worker is named by a header, or by the fingerprint in the body; chunked bodies are read."""
    answers = [
        b"HTTP/1.1 200 OK\r\nx-mallee-worker: w7\r\ncontent-length: 2\r\n\r\n{}",
        b'HTTP/1.1 200 OK\r\ncontent-length: 28\r\n\r\n{"system_fingerprint": "w9"}',
        b"HTTP/1.1 503 No\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n1\r\n \r\n0\r\n\r\n",
    ]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().split(b"content-length:")[1].split()[0]))
            writer.write(answer)
        writer.close()

    found: list[load.Answer] = []

    def on_answer(connection: load.Connection, answer: load.Answer) -> None:
        found.append(answer)
        if len(found) < len(answers):
            connection.send(request)
        else:
            connection.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    request = b"POST /v1/completions HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}"
    connection = load.Connection(f"http://127.0.0.1:{port}", on_answer)
    await connection.open()
    connection.send(request)
    await connection.closed
    server.close()
    assert [answer[:2] for answer in found] == [(200, "w7"), (200, "w9"), (503, "")]
    assert all(0 < answer.first_s <= answer.whole_s for answer in found)


@pytest.mark.parametrize("dies", [False, True])
async def test_what_is_sent_on_a_connection_that_closes_is_sent_again(dies: bool) -> None:
    """A server that closes after an answer costs no request; one that closes in mid-answer does."""
    num_served = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_served
        await reader.readuntil(b"\r\n\r\n")
        num_served += 1
        length = 9 if dies and num_served == 2 else 2
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n{}" % length)
        writer.close()

    found: list[load.Answer] = []

    def on_answer(connection: load.Connection, answer: load.Answer) -> None:
        found.append(answer)
        if len(found) == 3:
            connection.close()
        else:
            connection.send(b"GET / HTTP/1.1\r\n\r\n")

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    connection = load.Connection(url, on_answer)
    await connection.open()
    connection.send(b"GET / HTTP/1.1\r\n\r\n")
    if dies:
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(connection.closed, 5)
    else:
        await asyncio.wait_for(connection.closed, 5)
    assert [answer.status for answer in found] == [200] * (1 if dies else 3)
    assert num_served == (2 if dies else 3)
    server.close()
