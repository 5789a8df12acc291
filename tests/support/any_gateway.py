"""The API of a fleet whose every request reaches another gateway, and whose gateways come and go.

With `ANY_GATEWAY=1` in the environment, `tiny_api` stands behind this in place of one gateway: each request
is sent to one of three, drawn at random, and every two seconds an idle one is closed and another takes its
place. Scripted services (`tests/api/conftest.py`) then have three gateways, too.
"""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from mallee.gateway.gateway import Gateway
from support.live_fleet import LiveFleet
from support.plain_ids import scopes_at
from support.waiting import until

IS_ON: Final = os.environ.get("ANY_GATEWAY") == "1"
one_gateway: Final = pytest.mark.skipif(IS_ON, reason="it looks at the counts of one gateway")
OPTIONS: Final[dict[str, Any]] = {"gateways": 3, "syncs": True, "ids": scopes_at}
"""Of a fleet for it."""
LIFE_S: Final = 2.0
WAIT_S: Final = 10.0  # for a new gateway to know the fleet


class AnyGateway:
    """An ASGI app over all gateways of `fleet`."""

    def __init__(self, fleet: LiveFleet, make_app: Callable[[Gateway], ASGIApp], seed: int) -> None:
        self._fleet = fleet
        self._make_app = make_app
        self._draws = random.Random(seed)
        self._apps = {gateway: make_app(gateway) for gateway in fleet.gateways}
        self._num_running = dict.fromkeys(fleet.gateways, 0)
        self.num_replaced = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._draws.choice(self._fleet.gateways)
        self._num_running[gateway] += 1
        try:
            await self._apps[gateway](scope, receive, send)
        finally:
            self._num_running[gateway] -= 1

    async def replace_for_ever(self) -> None:
        """Close an idle gateway after each `LIFE_S`, once another is there for it."""
        while True:
            await asyncio.sleep(LIFE_S)
            idle = [each for each in self._fleet.gateways if self._is_idle(each)]
            if idle:
                await self._replace(self._draws.choice(idle))

    def _is_idle(self, gateway: Gateway) -> bool:
        return not self._num_running[gateway] and not gateway.shell.running

    async def _replace(self, old: Gateway) -> None:
        num_workers = len(self._fleet.hosts)
        new = await self._fleet.add_gateway()
        await until(lambda: self._knows_all(new, num_workers))
        self._apps[new], self._num_running[new] = self._make_app(new), 0
        at = self._fleet.gateways.index(old)
        self._fleet.gateways.remove(old)
        del self._fleet.routers[at]
        while not self._is_idle(old):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await old.close()
        self.num_replaced += 1

    def _knows_all(self, gateway: Gateway, num_workers: int) -> bool:
        workers = gateway.context.router.workers()
        return sum(each.is_whole for each in workers) == num_workers and (
            len(gateway.peers.others) >= len(self._fleet.gateways) - 1
        )


@asynccontextmanager
async def any_gateway(
    fleet: LiveFleet, make_app: Callable[[Gateway], ASGIApp], seed: int = 0
) -> AsyncIterator[AnyGateway]:
    """The app over gateways that are replaced meanwhile."""
    app = AnyGateway(fleet, make_app, seed)
    replacing = asyncio.create_task(app.replace_for_ever())
    try:
        yield app
        if replacing.done():
            replacing.result()
    finally:
        replacing.cancel()
        await asyncio.wait([replacing])
