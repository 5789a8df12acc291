"""Sessions of gateways that have no workers, over one hub: requests begin, leave capsules and end by call."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from bench.doubles.bus import LocalBus, LocalHub
from mallee.gateway.peers import Peers
from mallee.gateway.sessions.copies import SessionLimits
from mallee.gateway.sessions.sessions import GatewaySessions
from mallee.gateway.store.store import Store, StoreTerms
from mallee.protocol.errors import MalleeError
from mallee.protocol.hashing import NO_HASHES, as_tokens
from mallee.protocol.ids import CapsuleId, RequestId, Scope
from mallee.router.config import RouterConfig
from mallee.router.dispatch.jobs import PrefillJob, QueueTerms
from support.plain_ids import SCOPES

SCOPE = Scope("a")
Release = Callable[[CapsuleId, Scope], Awaitable[None]]


class SessionGateway:
    """One gateway: what runs of its sessions, and the capsules that they had released."""

    def __init__(self, name: str, hub: LocalHub, clock: Callable[[], float], **more: Any) -> None:
        """`more`: `others`, `limits`, `release`, `bus` in place of one of the hub."""
        self.name = name
        self.bus = more.get("bus") or LocalBus(hub)
        self.running: set[RequestId] = set()
        self.released: list[CapsuleId] = []
        others = more.get("others", lambda: ())
        self.store = Store(self.bus, StoreTerms("f"), clock=clock)
        self.peers = Peers(
            self.bus, gateway=name, store="f", others=others, ids=SCOPES, clock=clock
        )
        process: Any = SimpleNamespace(
            gateway=name,
            bus=self.bus,
            wall_clock=clock,
            router=SimpleNamespace(config=RouterConfig(block_size=4)),
        )
        shell: Any = SimpleNamespace(give_up=self.give_up)
        capsules: Any = SimpleNamespace(
            release=more.get("release", self.release),
            hashes=lambda capsule: NO_HASHES,
            watch=lambda observer: None,
        )
        limits = more.get("limits", SessionLimits())
        self.sessions = GatewaySessions(process, shell, capsules, self.store, self.peers, limits)

    async def start_up(self) -> None:
        await self.bus.connect()
        await self.peers.start_up()
        await self.sessions.start_up()

    async def close(self) -> None:
        await self.sessions.close_up()
        await self.store.close()
        await self.bus.close()

    async def quiet(self) -> None:
        """Return once all is stored, and read, that can be."""
        while self.store.is_up and (self.sessions.tasks._tasks or self.store.num_waiting):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        assert self.sessions.tasks.failure is None
        assert self.store.tasks.failure is None
        self.sessions.trees.check()

    async def release(self, capsule: CapsuleId, scope: Scope) -> None:
        self.released.append(capsule)

    def give_up(self, request: RequestId, _: MalleeError) -> None:
        asyncio.get_running_loop().call_soon(self.end, request)

    # Requests

    def begin(self, request: str, session: str, parent: str = "", **more: Any) -> None:
        terms = QueueTerms(session=session, parent_session=parent, **more)
        name = RequestId(request)
        self.running.add(name)
        self.sessions.begin(name, PrefillJob(as_tokens([1]), scope=SCOPE, terms=terms))

    def leave(self, request: str, num: int = 0) -> CapsuleId:
        capsule = CapsuleId(f"{request}.{num}")
        self.sessions.left(RequestId(request), capsule, 9, NO_HASHES)
        return capsule

    def end(self, request: str) -> None:
        self.running.discard(RequestId(request))
        self.sessions.ended(RequestId(request))

    def ask(self, request: str, session: str, parent: str = "") -> CapsuleId:
        """A request from its beginning to its end."""
        self.begin(request, session, parent)
        capsule = self.leave(request)
        self.end(request)
        return capsule
