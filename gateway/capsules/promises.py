"""Capsules that are promised here, for other gateways: they wait at this one until a state changes."""

import asyncio
from collections.abc import Sequence

from mallee.gateway.requests.lives import BranchLife
from mallee.gateway.requests.observers import Observer
from mallee.protocol.errors import MalleeError
from mallee.protocol.ids import CapsuleId
from mallee.router.dispatch.shards import Shard
from mallee.router.placement.placer import Placement


class PromiseChanges:
    """The changes that are waited for. Belongs to one event loop."""

    def __init__(self) -> None:
        self._waited: dict[CapsuleId, asyncio.Event] = {}

    async def wait(self, capsule: CapsuleId) -> None:
        """Return at the next change of a capsule whose prefill is not over."""
        await self._waited.setdefault(capsule, asyncio.Event()).wait()

    def note(self, capsule: CapsuleId) -> None:
        """`capsule` is on another worker, or its prefill is over."""
        if (change := self._waited.pop(capsule, None)) is not None:
            change.set()


class PromiseObserver(Observer):
    """Notes the changes of one capsule."""

    __slots__ = ("_capsule", "_changes")

    def __init__(self, changes: PromiseChanges, capsule: CapsuleId) -> None:
        self._changes = changes
        self._capsule = capsule

    def placed(self, shard: Shard, placement: Placement, at_s: float) -> None:
        self._changes.note(self._capsule)

    def ended(self, branches: Sequence[BranchLife], error: MalleeError | None) -> None:
        self._changes.note(self._capsule)
