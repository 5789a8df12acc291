"""Sessions in the gateways' store: of each a head, the nodes of its tree, and the names of those below it.

Nodes and names lie in parts of the scope, beside the heads: they only grow, so no gateway has to look before
it puts one, and a list of sessions reads no tree. A session that is closed leaves its end for a while, for
gateways that can't be asked.
"""

from collections.abc import Container
from contextlib import suppress
from typing import Final, TypeVar

from mallee.gateway.sessions.trees import SessionKey, SessionTree
from mallee.gateway.store.store import Bucket, Entry, Store
from mallee.protocol.errors import StoreAway
from mallee.protocol.gateways.session_notes import NodeNote, SessionEnd, SessionHead
from mallee.protocol.ids import Scope, private_part

T = TypeVar("T")

ENDS_S: Final = 600.0  # for which an end is known
ENDS_NBYTES: Final = 16 << 20
NODE_NBYTES: Final = 4096  # of room, for each node that one gateway may have
LAYOUT: Final = 1


class StoredSessions:
    """The sessions of all gateways. Methods that wait raise StoreAway and OtherLayout."""

    def __init__(self, store: Store, *, max_nodes: int, ttl_s: float) -> None:
        """They are stored for `ttl_s` after they, or their nodes, were put."""

        def bucket(kind: type[T]) -> Bucket[T]:
            return store.bucket(
                "sessions",
                kind,
                version=LAYOUT,
                ttl_s=ttl_s,
                max_nbytes=max_nodes * NODE_NBYTES,
            )

        self._heads, self._nodes, self._below = bucket(SessionHead), bucket(NodeNote), bucket(bool)
        self._ends = store.bucket(
            "sessions_closed", SessionEnd, version=LAYOUT, ttl_s=ENDS_S, max_nbytes=ENDS_NBYTES
        )

    async def names(self, scope: Scope) -> list[str]:
        return await self._heads.names(scope)

    async def head(
        self, key: SessionKey, known: Entry[SessionHead] | None = None
    ) -> Entry[SessionHead] | None:
        """As it is now: `known` itself, if that is it still."""
        return await self._heads.get(*key, known)

    async def put(self, key: SessionKey, head: SessionHead, at: int) -> Entry[SessionHead] | None:
        """As `Bucket.put`."""
        return await self._heads.put(*key, head, at=at)

    def keep_soon(self, tree: SessionTree) -> None:
        """Put all nodes, and that it is below another, anew."""
        for node in tree.nodes.values():
            self.add_soon(tree.key, node)
        if tree.parent:
            self._below.append_soon(_below(tree.key.scope), tree.parent, tree.key.name, True)

    async def keep(self, tree: SessionTree) -> None:
        """As `keep_soon`, of a new session with one node, which is there then if the store is."""
        self.keep_soon(tree)
        for node in tree.nodes.values():
            with suppress(StoreAway):
                await self._nodes.append(_nodes(tree.key.scope), tree.key.name, node.capsule, node)

    # Nodes

    async def nodes(self, key: SessionKey, known: Container[str]) -> list[NodeNote]:
        """But for those of the capsules that are `known`."""
        return list((await self._nodes.all_below(_nodes(key.scope), key.name, known)).values())

    async def capsules(self, key: SessionKey) -> list[str]:
        return await self._nodes.names_below(_nodes(key.scope), key.name)

    def add_soon(self, key: SessionKey, node: NodeNote) -> None:
        self._nodes.append_soon(_nodes(key.scope), key.name, node.capsule, node)

    def remove_soon(self, key: SessionKey, capsule: str) -> None:
        self._nodes.remove_soon(_nodes(key.scope), key.name, capsule)

    def take_back(self, tree: SessionTree, *, only_waiting: bool) -> None:
        """The session is over: what was put into it here is not to come after its end."""
        scope, name = _nodes(tree.key.scope), tree.key.name
        for capsule in tree.own:
            if not only_waiting or self._nodes.is_waiting(scope, name, capsule):
                self._nodes.remove_soon(scope, name, capsule)

    async def children(self, key: SessionKey) -> list[str]:
        """Sessions below it."""
        return await self._below.names_below(_below(key.scope), key.name)

    # Ends

    async def end(self, key: SessionKey, closed: float) -> None:
        """Have all that was created until then be over, for every gateway that looks."""
        await self._ends.put(*key, SessionEnd(closed))

    async def ended(self, key: SessionKey) -> float:
        """The time at which the last session of that name was closed, if that is not long ago; else 0."""
        entry = await self._ends.get(*key)
        return 0.0 if entry is None else entry.value.closed

    async def delete(self, tree: SessionTree) -> None:
        """At once, if the store is there."""
        try:
            await self._heads.delete(*tree.key)
            await self._nodes.delete(_nodes(tree.key.scope), tree.key.name)
        except StoreAway:
            self.delete_soon(tree)
        else:
            self._leave(tree)

    def delete_soon(self, tree: SessionTree) -> None:
        self._leave(tree)
        if tree.entry is not None:
            self._heads.delete_soon(*tree.key)
        self._nodes.delete_soon(_nodes(tree.key.scope), tree.key.name)

    def end_soon(self, tree: SessionTree, closed: float) -> None:
        """As `end` and `delete`, once the store can be reached."""
        self._ends.put_soon(*tree.key, SessionEnd(closed))
        self.delete_soon(tree)

    def _leave(self, tree: SessionTree) -> None:
        if tree.parent:
            self._below.remove_soon(_below(tree.key.scope), tree.parent, tree.key.name)


def _nodes(scope: Scope) -> Scope:
    return private_part(scope, "nodes")


def _below(scope: Scope) -> Scope:
    return private_part(scope, "below")
