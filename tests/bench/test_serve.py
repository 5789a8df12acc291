"""The bench of the whole service runs: `mallee serve` over Ray, and the same without, side by side."""

import asyncio
from functools import partial

import pytest

from bench.gateway import backends, load
from support.benches import run_bench

LATENCIES = {"p50_ms", "p99_ms", "first_p50_ms", "first_p99_ms", "rps"}


@pytest.mark.ray
@pytest.mark.service
@pytest.mark.model
def test_sides_take_turns_and_every_figure_is_there() -> None:
    """The gateway over Ray costs something, and a peer that is not installed is said to be not."""
    found, table = run_bench("serve", "--quick", "--sides", "serve,one_process,itl", "--smg", "")
    for side in ("serve", "one_process"):
        assert set(found[side]) == {"c1", "c4", "streams8"}
        assert set(found[side]["c1"]) == LATENCIES
        assert found[side]["c4"]["rps"] > 0
        assert found[side]["streams8"]["tokens_per_s"] > 0
    assert 0 < found["itl"]["step_p50_ms"] < 1000
    assert {"itl_p50_ms", "added_ms"} < set(found["itl"])
    assert found["versions"]["smg"] == found["versions"]["ai-dynamo"] == "not installed"
    assert {"python", "machine", "scale"} <= set(found)
    assert "c1.p50_ms" in table


async def test_stub_engines_stream_as_many_tokens_as_are_asked_for() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(partial(backends.HttpBackend, 1, 0.0), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    options = ["--stream", "--concurrency", "3", "--requests", "6", "--max-tokens", "40", "--usage"]
    found = await load.run(load.parse(["--url", url, *options]))
    server.close()
    assert (found["requests"], found["errors"]) == (6, 0)
    assert found["tokens_per_s"] * found["seconds"] == pytest.approx(6 * 40)


def test_a_stream_with_too_few_tokens_is_an_error() -> None:
    answer = load.Answer(200, "", 0.1, 0.2, is_done=True, tokens=7)
    assert answer.is_good(True)
    assert answer.is_good(True, 7)
    assert not answer.is_good(True, 8)
