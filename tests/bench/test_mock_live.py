"""The live fleet's bench runs, and its client reads streams."""

import asyncio
import json
from pathlib import Path

import pytest

from bench.gateway import load
from support.benches import run_bench
from support.mock_scene import make_folder


async def test_the_client_counts_whole_streams_and_failures() -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    whole = b'6\r\ndata: \r\n1c\r\n{"a": 0}\n\ndata: [DONE]\n\n\r\n0\r\n\r\n'
    answers = [
        [head + whole],
        [head, whole[:20], whole[20:-3], whole[-3:]],
        [b"HTTP/1.1 503 No\r\ncontent-length: 2\r\n\r\n{}"],
        [head + b"6\r\ndata: \r\n0\r\n\r\n"],
    ]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            asked = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(int(asked.split(b"content-length: ")[1].split()[0]))
            assert json.loads(body)["stream"] is True
            for part in answer:
                writer.write(part)
                await asyncio.sleep(0.005)
        await reader.read()
        writer.close()
        await writer.wait_closed()
        served.set()

    served = asyncio.Event()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    asked = load.parse(["--url", url, "--stream", "--requests", "4", "--prompts", "2"])
    result = await load.run(asked)
    await served.wait()
    server.close()
    assert result["requests"] == 4
    assert result["errors"] == 2
    assert 0 < result["first_p50_ms"] <= result["p50_ms"]


@pytest.mark.service
@pytest.mark.nats
@pytest.mark.slow
def test_a_small_fleet_stands_answers_and_idles(tmp_path: Path) -> None:
    """K21, part: every engine's digest is right; all figures are there."""
    result, _ = run_bench(
        "mocker.live", "--quick", "--model", str(make_folder(tmp_path)), "--register", "0"
    )
    ready = result["ready"]
    assert ready["digests_right"] == ready["engines"] == 40
    assert (ready["gaps"], ready["empty"]) == (0, 0)
    assert result["load"]["rps"] > 0
    assert set(result["idle_cores"]) == {"broker", "engines", "gateway", "all"}
