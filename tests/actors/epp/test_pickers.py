"""Two active pickers, which hear of each other over NATS."""

import pytest

from mallee.testing.vllm_pod import VllmPod
from support.brokers import OpenBroker
from support.pickers import Proxy, picker_config, prompt, running
from support.waiting import until

pytestmark = [pytest.mark.process, pytest.mark.nats]


async def test_pickers_count_each_others_requests_and_agree() -> None:
    """X21: active and active: what one sends is load and prefix to the other, and ends with it."""
    broker = OpenBroker()
    await broker.start()
    try:
        async with VllmPod() as a, VllmPod() as b:
            addresses = [a.address, b.address]
            config = picker_config(addresses, nats_url=broker.url, fleet="test")
            async with (
                running(config) as one,
                running(config) as two,
                Proxy(one.server.port) as first,
                Proxy(two.server.port) as second,
            ):
                await until(lambda: one._bus.is_up and two._bus.is_up)  # type: ignore[union-attr]
                exchange = first.stream()
                chosen = (await exchange.request(prompt(0))).endpoints[0]
                await until(lambda: two.router.stats().remote_requests == 1)
                (rows,) = [v.rows for v in two.router.workers() if v.worker == chosen]
                assert rows == 1
                assert (await second.ask(prompt(7))).endpoints[0] != chosen, "the other is idle"
                await exchange.respond(b"{}")
                await exchange.end()
                await until(lambda: two.router.stats().remote_requests == 0)
                # The prompt is predicted there, too, though its events come from nowhere.
                assert (await second.ask(prompt(0, 400))).endpoints[0] == chosen
    finally:
        await broker.stop()
