"""Ten gateways, thousands of sessions, and a real broker that goes away and comes back.

python -m pytest tests/gateway/sessions/test_reconnect.py -o log_cli_level=INFO    tells what it measured
"""

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from statistics import median
from typing import Any

import pytest

from bench.doubles.bus import LocalHub
from bench.soak.proxy import Proxy
from mallee.runtime.addresses import free_port
from mallee.runtime.bus.access import BrokerAccess
from mallee.runtime.bus.nats import NatsBus
from support.brokers import OpenBroker
from support.session_gateways import SCOPE, SessionGateway
from support.waiting import until

log = logging.getLogger(__name__)

pytestmark = [pytest.mark.process, pytest.mark.nats]

NUM_GATEWAYS, NUM_SESSIONS, NUM_CAPSULES = 10, 7000, 8
NUM_RUNNING = 1000
MAX_CALLBACK_MS = 5.0
MAX_BURST = 1 << 20


class Watch:
    """The longest callback of the loop, in processor time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._run = asyncio.Handle._run
        self.longest_s = 0.0
        monkeypatch.setattr(asyncio.Handle, "_run", lambda handle: self.run(handle))

    def run(self, handle: asyncio.Handle) -> None:
        begun = time.thread_time()
        self._run(handle)
        self.longest_s = max(self.longest_s, time.thread_time() - begun)


@asynccontextmanager
async def gateways() -> AsyncIterator[tuple[Proxy, list[SessionGateway]]]:
    """Over a proxy, by which all lose the broker at once."""
    broker, port = OpenBroker(), free_port()
    await broker.start()
    proxy, hub, made = Proxy(port, broker.port), LocalHub(), list[SessionGateway]()
    await proxy.start()
    names = [f"g{i}" for i in range(NUM_GATEWAYS)]
    for name in names:
        bus = NatsBus(BrokerAccess(f"nats://127.0.0.1:{port}"), fleet="f", name=name)
        others: Any = lambda own=name: {*names} - {own}  # noqa: E731
        made.append(SessionGateway(name, hub, lambda: 1000.0, others=others, bus=bus))
        await made[-1].start_up()
    try:
        await until(lambda: all(each.bus.is_up for each in made))
        yield proxy, made
    finally:
        for each in made:
            await each.close()
        await proxy.close()
        await broker.stop()


def request(number: int) -> str:
    """A name as long as a real one."""
    return f"req_{number:040x}"


async def test_a_broker_that_comes_back_is_no_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions that all gateways have; then some run, and leave a node each while the broker is away."""
    async with gateways() as (proxy, made):

        async def reconnect() -> tuple[float, int]:
            """The longest callback in milliseconds, and the bytes sent."""
            watch, begun, before = Watch(monkeypatch), time.monotonic(), proxy.nbytes["up"]
            proxy.pass_all()
            await until(lambda: all(each.bus.is_up for each in made))
            for gateway in made:
                await gateway.quiet()
            monkeypatch.undo()
            found = watch.longest_s * 1e3, proxy.nbytes["up"] - before
            text = "longest callback %.2f ms, %d bytes sent, in %.1f s"
            log.info(text, *found, time.monotonic() - begun)
            return found

        for i in range(NUM_SESSIONS):
            gateway = made[i % NUM_GATEWAYS]
            gateway.begin(request(i), f"s{i}")
            for j in range(NUM_CAPSULES):
                gateway.leave(request(i), j)
            if i >= NUM_RUNNING:
                gateway.end(request(i))
            if i % 100 == 0:
                await gateway.quiet()
        for gateway in made:
            await gateway.quiet()
        gc.collect()
        gc.disable()
        try:
            found = []
            for num in range(3):
                proxy.cut()
                await until(lambda: not any(each.bus.is_up for each in made))
                for i in range(NUM_RUNNING):
                    made[i % NUM_GATEWAYS].leave(request(i), NUM_CAPSULES + num)
                found.append(await reconnect())
        finally:
            gc.enable()
        # Others on the machine make one or the other longer.
        assert median(longest_ms for longest_ms, _ in found) < MAX_CALLBACK_MS
        assert max(nbytes for _, nbytes in found) < MAX_BURST
        for i, num in ((1, NUM_CAPSULES + 3), (NUM_SESSIONS - 1, NUM_CAPSULES)):
            shown = [await each.sessions.show(f"s{i}", SCOPE) for each in made]
            assert {len(each.nodes) for each in shown} == {num}
