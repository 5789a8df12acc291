"""Copies of stored sessions at one gateway: what it reads of them, and what it has to store."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from mallee.gateway.peers import Peers
from mallee.gateway.sessions.stored import StoredSessions
from mallee.gateway.sessions.trees import TICK_S, SessionKey, SessionTree, SessionTrees
from mallee.gateway.shell import GatewayContext
from mallee.gateway.store.store import Entry, Store
from mallee.protocol.errors import StoreAway, StoreFull, Unavailable
from mallee.protocol.gateways.session_notes import SessionHead
from mallee.runtime.tasks import Tasks

log = logging.getLogger(__name__)

NUM_AT_ONCE: Final = 16  # sessions that are read
RETRY_S: Final = 1.0  # until a session that could not be stored is put again
# Of the time for which they are remembered: a session in use is stored anew so often.
KEEP: Final = 0.25


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """`max_nodes` counts sessions and their capsules; a session is forgotten after `ttl_s` without use."""

    max_nodes: int = 65_536
    ttl_s: float = 86_400.0


class SessionCopies:
    """The sessions that one gateway has used, or looked at, as it knows them and as they are stored.

    Belongs to one event loop. What others have put is read when it is asked for. `on_over` is called with
    what was closed while this gateway could not be asked. Methods that wait raise StoreAway and OtherLayout.
    """

    def __init__(
        self,
        context: GatewayContext,
        store: Store,
        peers: Peers,
        limits: SessionLimits,
        on_over: Callable[[SessionTree], None],
    ) -> None:
        self._bus = context.bus
        self._gateway = context.gateway
        self._peers = peers
        self._on_over = on_over
        self._keep_s = KEEP * limits.ttl_s
        self.stored = StoredSessions(
            store, max_nodes=limits.max_nodes, ttl_s=limits.ttl_s + self._keep_s
        )
        self.trees = SessionTrees(
            max_nodes=limits.max_nodes,
            ttl_s=limits.ttl_s,
            block_size=context.router.config.block_size,
            clock=context.wall_clock,
            on_evicted=self._evicted,
            on_dropped=lambda tree, capsule: self.stored.remove_soon(tree.key, capsule),
        )
        self._unsaved: dict[SessionKey, None] = {}
        self._saving: asyncio.Task[None] | None = None
        self.tasks = Tasks("the gateways' sessions")

    async def start_up(self) -> None:
        """Store what could not be stored, whenever the broker is back."""
        self._bus.on_state(self._on_state)

    def _on_state(self, is_up: bool) -> None:
        if is_up:  # what runs here may have been closed elsewhere
            self.tasks.spawn(self.each(self.trees.running(), self.read))
            self._save_all_soon()

    def save_soon(self, key: SessionKey) -> None:
        """Save it as soon as the store takes it."""
        self._unsaved[key] = None
        self._save_all_soon()

    def _save_all_soon(self) -> None:
        if self._saving is None or self._saving.done():
            self._saving = self.tasks.spawn(self._save_all())

    async def _save_all(self) -> None:
        while self._bus.is_up and self._unsaved:
            await self.each(list(self._unsaved), self.save)
            if self._unsaved:
                await asyncio.sleep(RETRY_S)

    async def each(
        self, keys: Iterable[SessionKey], do: Callable[[SessionKey], Awaitable[object]]
    ) -> None:
        """Some at once, until the store takes, or tells, no more."""
        rest = iter(keys)

        async def work() -> None:
            for key in rest:
                try:
                    await do(key)
                except (StoreAway, StoreFull) as error:
                    log.info("sessions are stored, or read, later: %s", error)
                    return
                except Unavailable as error:
                    log.warning("a session was not read: %s", error)

        await asyncio.gather(*(work() for _ in range(NUM_AT_ONCE)))

    async def fresh(self, key: SessionKey) -> SessionTree | None:
        """The session as its last user has stored it; while the store is away, as it is known here."""
        tree = self.trees.get(key)
        if tree is not None and tree.entry is not None and not self._peers.others:
            return tree
        try:
            return await self.read_head(key)
        except StoreAway:
            return self.trees.get(key)

    def may_have_news(self, key: SessionKey, *, was_read: bool) -> bool:
        """Whether others may have put what is not here; its head `was_read` just now."""
        tree = self.trees.get(key)
        if tree is None or not tree.is_whole:
            return True
        is_ours = tree.entry is not None and tree.entry.value.gateway == self._gateway
        return bool(self._peers.others) and not (is_ours and was_read)

    async def read(self, key: SessionKey, *, is_anew: bool = False) -> SessionTree | None:
        """The session with all nodes that are stored, `is_anew`: also those that are here already.

        None: there is none.
        """
        tree = await self.read_head(key)
        if tree is None or tree.entry is None:
            return tree
        if is_anew or not tree.is_whole or tree.entry.value.gateway != self._gateway:
            nodes = await self.stored.nodes(key, () if is_anew else tree.nodes)
            if self.trees.get(key) is not tree:
                return self.trees.get(key)  # it was closed meanwhile
            late = [node for node in nodes if node.created < tree.created and not node.is_root]
            for node in late:  # of one of that name that is over
                self.stored.remove_soon(key, node.capsule)
            self.trees.take(tree, [node for node in nodes if node not in late])
            tree.is_whole = True
        return tree

    async def read_head(self, key: SessionKey) -> SessionTree | None:
        """The session without news of its nodes; None: there is none."""
        while True:
            tree = self.trees.get(key)
            known = None if tree is None else tree.entry
            entry = await self.stored.head(key, known)
            since = known.value.created if known is not None else tree.created if tree else 0.0
            is_other = tree is not None and (entry is None or since < entry.value.created)
            ended = await self.stored.ended(key) if is_other else 0.0
            if self.trees.get(key) is not tree or (tree is not None and tree.entry is not known):
                continue  # it was closed, or stored, meanwhile
            if tree is not None and is_other:
                self._check_life(tree, entry, ended)
            return self.trees.get(key) if entry is None else self.trees.adopt(key, entry)

    def _check_life(
        self, tree: SessionTree, entry: Entry[SessionHead] | None, ended: float
    ) -> None:
        """Forget a session that is over, or that the store has forgotten; not one that is new, or runs."""
        if tree.entry is None and not tree.nodes:
            tree.created = max(tree.created, ended + TICK_S)
        elif tree.created <= ended or (tree.entry is not None and entry is not None):
            self.trees.close(tree.key)
            self._on_over(tree)
        elif tree.entry is not None and tree.running:
            tree.entry = None
            self.save_soon(tree.key)
        elif tree.entry is not None:
            self.trees.close(tree.key)

    async def save(self, key: SessionKey) -> None:
        """Store a session that is used here, if that is due. Raises StoreFull."""
        tree = self.trees.get(key)
        if tree is not None and tree.entry is None and tree.nodes:
            await self.read_head(key)  # it was cut off, and may be over
        while (tree := self.trees.get(key)) is not None:
            head, before = self._head(tree), tree.entry
            if not tree.is_due(head):
                break
            at = 0 if before is None else before.revision
            entry = await self.stored.put(key, head, at)
            if entry is None:
                await self.read_head(key)
            elif self.trees.get(key) is not tree:
                await self.stored.delete(tree)  # it was closed meanwhile
            else:
                tree.entry = entry
                tree.is_whole = tree.is_whole or before is None
                if before is None or _place(before.value) != _place(head):
                    if not tree.is_whole:
                        await self.read(key)
                    self.stored.keep_soon(tree)
        self._unsaved.pop(key, None)

    def is_due(self, tree: SessionTree) -> bool:
        """Whether it is to be stored that it is used here."""
        return tree.is_due(self._head(tree))

    def _head(self, tree: SessionTree) -> SessionHead:
        return tree.head(self._gateway, self._keep_s)

    def _evicted(self, tree: SessionTree) -> None:
        """Have the store forget it too, if nobody else uses it."""

        async def forget() -> None:
            with suppress(Unavailable):
                entry = await self.stored.head(tree.key, tree.entry)
                if entry is not None and entry.value.gateway == self._gateway:
                    await self.stored.delete(tree)

        if tree.entry is not None and tree.entry.value.gateway == self._gateway:
            self.tasks.spawn(forget())


def _place(head: SessionHead) -> tuple[float, str]:
    """All that lies beside a head is put anew when this changes."""
    return head.kept, head.parent
