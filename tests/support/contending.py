"""Two tenants at two live gateways that share one worker: one at the first alone, one at the second."""

import asyncio
from collections.abc import Callable
from typing import Any

from mallee.mocker.passes import mock_spec
from mallee.protocol.hashing import as_tokens
from mallee.protocol.messages import Limits
from mallee.router.config import RouterConfig
from mallee.router.dispatch.jobs import GenerateJob, QueueTerms
from mallee.router.dispatch.queue import AdmissionConfig
from mallee.runtime.bus.bus import Bus
from support.live_fleet import LiveFleet, collect, running

ROWS = 8
CLIENTS = 24  # of each tenant
WEIGHTS = {"a": 1.0, "b": 3.0}
TOKENS = 40  # of an answer


async def contend(num: int, make_bus: Callable[[Any], Bus] | None = None) -> dict[str, int]:
    """Requests that were answered of each tenant, from the twentieth of both to so many more."""
    made = LiveFleet(
        mock_spec(max_model_len=4096),
        RouterConfig(block_size=16, lease_s=1e6),
        rows=ROWS,
        syncs=True,
        make_bus=make_bus,
        admission=AdmissionConfig(weights=WEIGHTS),
    )
    answered = dict.fromkeys(WEIGHTS, 0)
    async with running(made, 1, gateways=2):

        async def ask(number: int, tenant: str, client: int) -> None:
            prompt = as_tokens([client] * 8)
            while True:
                job = GenerateJob(
                    prompt, Limits(TOKENS, ignore_eos=True), terms=QueueTerms(tenant=tenant)
                )
                await collect(await made.gateways[number].requests.start(job))
                answered[tenant] += 1

        clients = [
            asyncio.create_task(ask(number, tenant, client))
            for number, tenant in enumerate(WEIGHTS)
            for client in range(CLIENTS)
        ]

        async def answer(least: int) -> None:
            while sum(answered.values()) < least:
                await asyncio.sleep(0.01)
                assert not any(client.done() for client in clients)

        await answer(20)
        before = dict(answered)
        await answer(20 + num)
        found = {tenant: n - before[tenant] for tenant, n in answered.items()}
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    return found
