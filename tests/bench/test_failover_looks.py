"""The bench of faults says what it waited for in vain."""

import httpx
import pytest

from bench.failover import __main__ as failover

KEPT = 'mallee_worker_capsules{{worker="w0"}} {}\n'


async def left(kept: float, rows: int = 0) -> str:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            return httpx.Response(200, text=KEPT.format(kept))
        if request.url.path == "/health":
            return httpx.Response(200, json={"status": "ok"})
        return httpx.Response(200, json={"data": [{"rows": rows, "active_blocks": 0}]})

    transport = httpx.MockTransport(answer)
    async with httpx.AsyncClient(base_url="http://test", transport=transport) as client:
        return await failover.Service(client, 0).leftovers()


async def test_bookings_and_kept_capsules_are_named() -> None:
    assert await left(1.0) == ""
    assert await left(0.0) == """kept capsules: [('worker="w0"', '0.0')]"""
    assert "kept capsules" in await left(2.0)
    assert await left(1.0, rows=3) == "booked: [{'rows': 3, 'active_blocks': 0}]"


async def test_a_wait_ends_with_what_was_found_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "BACK_S", -1.0)

    async def look() -> str:
        return "a worker is gone"

    async with httpx.AsyncClient() as client:
        with pytest.raises(TimeoutError, match="a worker is gone"):
            await failover.Service(client, 0).wait(look)
