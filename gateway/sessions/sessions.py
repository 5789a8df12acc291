"""A gateway's sessions: kept in the gateways' store, with a copy of those that are used here."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

from mallee.gateway.capsules.capsules import Capsules
from mallee.gateway.peers import Peers
from mallee.gateway.requests.deltas import Delta
from mallee.gateway.requests.lives import BranchLife
from mallee.gateway.requests.observers import Observer
from mallee.gateway.sessions.copies import SessionCopies, SessionLimits
from mallee.gateway.sessions.trees import TICK_S, LeftNode, SessionKey, SessionTree
from mallee.gateway.shell import GatewayContext, Shell
from mallee.gateway.store.store import Store
from mallee.protocol.codec import encode
from mallee.protocol.errors import (
    InvalidParameter,
    MalleeError,
    NotFound,
    SessionClosed,
    SessionTaken,
    StoreAway,
    Unavailable,
)
from mallee.protocol.gateways.session_notes import (
    Derived,
    EndedRequests,
    NodeNote,
    SessionHead,
    decode_derived,
    decode_ended_requests,
)
from mallee.protocol.hashing import NO_HASHES, Hashes, Tokens
from mallee.protocol.ids import CapsuleId, RequestId, Scope, request_of
from mallee.router.dispatch.jobs import Job
from mallee.router.dispatch.shards import Shard
from mallee.router.placement.placer import Placement

log = logging.getLogger(__name__)

NUM_RELEASED: Final = 64  # capsules at once
MAX_READ: Final = 32  # sessions above one that is bounded by one of them
CLOSE_S: Final = 30.0  # for the workers of all capsules of a session
_CLOSE: Final = "session.close"
_DERIVE: Final = "session.derive"


class SessionView(NamedTuple):
    """A session as it is now; times are seconds since the epoch."""

    name: str
    parent: str
    created: float
    used: float
    num_capsules: int
    num_running: int  # at this gateway
    nodes: Sequence[NodeNote] = ()
    budget: str = ""  # names the account that bounds it; "": it has none of its own
    children: Sequence[str] = ()


class Closed(NamedTuple):
    """A session's end. `num_left` capsules could not be released: their workers are silent, or refuse."""

    released: tuple[CapsuleId, ...]
    num_left: int
    num_cancelled: int  # requests


class GatewaySessions:
    """The sessions of one gateway. Belongs to one event loop.

    What another gateway has put into a session is read in the background where a request runs in it, and
    before a client that asks for it is answered. `trees` are the copies that are here. Methods that wait
    raise StoreAway and OtherLayout.
    """

    def __init__(
        self,
        context: GatewayContext,
        shell: Shell,
        capsules: Capsules,
        store: Store,
        peers: Peers,
        limits: SessionLimits,
    ) -> None:
        self._gateway = context.gateway
        self._clock = context.wall_clock
        self._shell = shell
        self._capsules = capsules
        self._peers = peers
        self._copies = SessionCopies(context, store, peers, limits, self._over)
        self._stored = self._copies.stored
        self.trees = self._copies.trees
        self.tasks = self._copies.tasks
        self._catching_up: dict[RequestId, list[Callable[[], None]]] = {}  # what waits for it
        peers.share(_CLOSE, self._closed_elsewhere)
        peers.share(_DERIVE, self._derived_elsewhere)
        capsules.watch(self)

    async def start_up(self) -> None:
        """Hear of what was closed meanwhile, and store what could not be, whenever the broker is back."""
        await self._copies.start_up()

    async def close_up(self) -> None:
        await self.tasks.close()

    # Requests

    def begin(self, request: RequestId, job: Job) -> "SessionRequest":
        """A job of a session was accepted. Returns what has to see it."""
        terms = job.terms
        tree = self.trees.begin(
            request,
            SessionKey(job.scope, terms.session),
            parent=terms.parent_session,
            tenant=terms.tenant,
            capsule=job.capsule,
            prompt_tokens=job.prompt_tokens,
            is_last=terms.ends_session,
        )
        line = [tree.key]
        if tree.parent:
            line.append(SessionKey(job.scope, tree.parent))
        if self._news(line) or self._copies.is_due(tree):
            self._catching_up[request] = []
            self.tasks.spawn(self._catch_up(request, line))
        return SessionRequest(self, request)

    def left(self, request: RequestId, capsule: CapsuleId, tokens: int, hashes: Hashes) -> None:
        """A branch left a capsule, after a prompt of these blocks."""
        hashes_of = self._capsules.hashes
        self._note(request, partial(self.trees.left, request, capsule, tokens, hashes, hashes_of))

    def cut(self, request: RequestId, capsule: CapsuleId, tokens: int) -> None:
        self._note(request, partial(self.trees.cut, request, capsule, tokens))

    def rewound(self, scope: Scope, source: CapsuleId, capsule: CapsuleId, boundary: int) -> None:
        derived = Derived(capsule, boundary)

        def note() -> None:
            if not self._derive(source, derived) and self._peers.others:
                self.tasks.spawn(ask())

        async def ask() -> None:
            await self._peers.ask_all(_DERIVE, source, scope, given=encode(derived))

        self._once_read(request_of(source), note)

    def ended(self, request: RequestId) -> None:
        """Nothing of the request runs any more; the last one of a session closes that."""
        self._once_read(request, partial(self._end, request))

    def _end(self, request: RequestId) -> None:
        key = self.trees.ended(request)
        if key is not None:
            self.tasks.spawn(self._close_after(key))

    async def _close_after(self, key: SessionKey) -> None:
        try:
            await self.close(key.name, key.scope)
        except NotFound:
            pass
        except Unavailable as error:
            log.info("a session's last request closes it here, and elsewhere later: %s", error)
            tree = self.trees.close(key)
            if tree is not None:
                self._stored.end_soon(tree, max(self._clock(), tree.created))
                self._end_requests(tree)
                await self._release_all(tree.own, key.scope)

    def _note(self, request: RequestId, change: Callable[[], LeftNode | None]) -> None:
        """Make a change of a tree, and store it."""

        def note() -> None:
            if (left := change()) is not None:
                self._stored.add_soon(*left)

        self._once_read(request, note)

    def _once_read(self, request: RequestId, call: Callable[[], None]) -> None:
        """Call it once the sessions that `request` needs are here; at once, if they are."""
        waiting = self._catching_up.get(request)
        if waiting is None:
            call()
        else:
            waiting.append(call)

    async def _catch_up(self, request: RequestId, line: Sequence[SessionKey]) -> None:
        """Read what others have put into a request's session and the one above it; store that it is used."""
        try:
            await self._copies.save(line[0])
            for key in self._news(line):
                await self._copies.read(key)
            self.trees.caught_up(request)
        except Unavailable as error:
            log.info("a session is stored later: %s", error)
            self._copies.save_soon(line[0])
        finally:
            for call in self._catching_up.pop(request):
                call()

    def _news(self, line: Sequence[SessionKey]) -> list[SessionKey]:
        """Those to be read for a request of the first, whose head was read for its budget."""
        return [key for key in line if self._copies.may_have_news(key, was_read=key is line[0])]

    def _derive(self, source: CapsuleId, derived: Derived) -> bool:
        """Whether a session here has `source`, and now the other one."""
        left = self.trees.derived(CapsuleId(derived.capsule), source, derived.tokens)
        if left is not None:
            self._stored.add_soon(*left)
        return left is not None

    async def _derived_elsewhere(self, name: str, _: Scope, given: bytes) -> bytes | None:
        self._derive(CapsuleId(name), decode_derived(given))
        return None

    # Clients

    async def page(self, scope: Scope, after: str, most: int) -> list[SessionView]:
        """The first `most` sessions of `scope` whose names come after `after`, in order."""
        names = set(await self._stored.names(scope))
        names |= {tree.key.name for tree in self.trees.of(scope) if tree.entry is None}
        rest = sorted(name for name in names if name > after)
        found: list[SessionView] = []
        while rest and len(found) < most:
            part, rest = rest[: most - len(found)], rest[most - len(found) :]
            views = await asyncio.gather(*(self._listed(SessionKey(scope, name)) for name in part))
            found += [view for view in views if view is not None]
        return found

    async def _listed(self, key: SessionKey) -> SessionView | None:
        """Without its nodes; None: it is gone."""
        tree = await self._copies.read_head(key)
        if tree is None:
            return None
        capsules = {*await self._stored.capsules(key), *tree.nodes}
        return _view(tree)._replace(num_capsules=len(capsules))

    async def show(self, name: str, scope: Scope) -> SessionView:
        """As it is known here, if the store is away. Raises NotFound, also for one of another scope."""
        key = SessionKey(scope, name)
        try:
            tree, children = (
                await self._copies.read(key, is_anew=True),
                await self._stored.children(key),
            )
            below = [SessionKey(scope, child) for child in self.trees.children(key)]
            await self._copies.each(below, self._copies.read_head)
        except StoreAway:
            tree, children = self.trees.get(key), []
            if tree is None or not tree.is_whole:
                raise
        children = sorted({*children, *self.trees.children(key)})
        return _view(_found(tree))._replace(children=children)

    async def recall(self, scope: Scope, tenant: str, most: int) -> None:
        """Have a copy of the sessions of `scope`, which is one of `tenant`, that were used last."""
        known = {tree.key.name for tree in self.trees.of(scope)}
        new = [name for name in await self._stored.names(scope) if name not in known]
        await self._copies.each([SessionKey(scope, name) for name in new], self._copies.read_head)
        await self.look(tree.key for tree in self.trees.newest(scope, tenant, most))

    async def look(self, keys: Iterable[SessionKey]) -> None:
        """Read the trees of sessions."""
        await self._copies.each(keys, self._copies.read)

    async def budget(self, name: str, scope: Scope, parent: str = "") -> str:
        """The name of the budget that bounds a session, its own or of one above; "" if none does.

        It names the account: `account_of`. `parent`: above the session, if that is new. While the store is
        away, as far as is known here.
        """
        return await self.own_budget(name, scope) or await self.budget_above(name, scope, parent)

    async def own_budget(self, name: str, scope: Scope) -> str:
        """The name of the session's own budget; "" if it has none, or there is no such session."""
        tree = await self._copies.fresh(SessionKey(scope, name))
        return "" if tree is None else tree.budget

    async def budget_above(self, name: str, scope: Scope, parent: str = "") -> str:
        """As `budget`, but for the session's own, which has been read."""
        key = SessionKey(scope, name)
        own = last = self.trees.get(key)
        seen = {key}  # clients may name parents in a circle
        above = parent if own is None else own.parent or parent
        while above and len(seen) <= MAX_READ:  # those beyond: as the last one knows
            key = SessionKey(scope, above)
            over = None if key in seen else await self._copies.fresh(key)
            if over is None:
                break
            seen.add(key)
            last, above = over, "" if over.budget else over.parent
        if last is None:
            return ""
        bound = last.above if last is own else last.bound
        if own is not None and bound:
            own.above = bound
        return bound

    async def give(self, name: str, scope: Scope, budget: str, *, parent: str, tenant: str) -> None:
        """Have a session, which may be new, bounded by `budget`; every gateway that looks sees it then.

        Raises StoreFull.
        """
        key = SessionKey(scope, name)
        self.trees.give(key, budget, parent=parent, tenant=tenant)
        await self._copies.save(key)

    async def root_of_fork(
        self, name: str, scope: Scope, new: str, capsule: str | None
    ) -> NodeNote:
        """The capsule that a fork `new` of this session would begin with. Raises as `fork`."""
        tree = _found(await self._copies.read(SessionKey(scope, name)))
        if await self._copies.read_head(SessionKey(scope, new)) is not None:
            raise SessionTaken(new)
        node = tree.last if capsule is None else tree.nodes.get(capsule)
        if node is None and capsule is not None:
            raise InvalidParameter("capsule", capsule, "it is none of this session's")
        if node is None:
            raise InvalidParameter("session", name, "it has left no capsule yet")
        return node

    async def fork(
        self, name: str, scope: Scope, new: str, capsule: str | None, *, budget: str = ""
    ) -> SessionView:
        """A session `new` that begins with a capsule of this one; None: with the newest.

        Raises NotFound, InvalidParameter, SessionTaken, StoreFull.
        """
        node = await self.root_of_fork(name, scope, new, capsule)
        source = _found(self.trees.get(SessionKey(scope, name)))
        key = SessionKey(scope, new)
        now = max(self._clock(), await self._stored.ended(key) + TICK_S)
        head = SessionHead(
            parent=name,
            tenant=source.tenant,
            created=now,
            used=now,
            gateway=self._gateway,
            kept=now,
            budget=budget,
            given=now if budget else 0.0,
        )
        entry = await self._stored.put(key, head, 0)
        if entry is None:
            raise SessionTaken(new)
        tree = self.trees.fork(key, entry, node)
        await self._stored.keep(tree)
        return _view(tree)

    async def close(self, name: str, scope: Scope) -> Closed:
        """End a session: its running requests end with SessionClosed, its capsules are released.

        Sessions below it stay. Raises NotFound.
        """
        key = SessionKey(scope, name)
        tree = _found(await self._copies.read(key))
        await self._stored.end(key, max(self._clock(), tree.created))
        self.trees.close(key)
        self._stored.take_back(tree, only_waiting=True)
        ended = [EndedRequests(self._end_requests(tree), tuple(tree.own))]
        told, _ = await self._peers.ask_all(_CLOSE, name, scope)
        ended += map(decode_ended_requests, told)
        await self._stored.delete(tree)
        if tree.bound:
            await self._bind(key, tree.bound)
        own = dict.fromkeys(capsule for each in ended for capsule in each.capsules)
        released, num_left = await self._release_all([*map(CapsuleId, own)], scope)
        return Closed(released, num_left, sum(each.num_cancelled for each in ended))

    async def _bind(self, over: SessionKey, bound: str) -> None:
        """Have the sessions below one that is over bounded by its budget still."""

        async def bind(key: SessionKey) -> None:
            if (tree := await self._copies.read_head(key)) is not None:
                tree.above = bound
                await self._copies.save(key)

        with suppress(StoreAway):
            names = await self._stored.children(over)
            await self._copies.each([SessionKey(over.scope, name) for name in names], bind)

    async def _closed_elsewhere(self, name: str, scope: Scope, _: bytes) -> bytes | None:
        tree = self.trees.close(SessionKey(scope, name))
        if tree is None:
            return None
        self._stored.take_back(tree, only_waiting=True)
        return encode(EndedRequests(self._end_requests(tree), tuple(tree.own)))

    def _over(self, tree: SessionTree) -> None:
        """It was closed while this gateway could not be asked, and may have left more than was released."""
        self._stored.take_back(tree, only_waiting=False)
        self._end_requests(tree)

        async def release() -> None:
            await self._release_all(tree.own, tree.key.scope)

        self.tasks.spawn(release())

    def _end_requests(self, tree: SessionTree) -> int:
        running = sorted(tree.running)
        for request in running:
            self._shell.give_up(request, SessionClosed())
        return len(running)

    async def _release_all(
        self, capsules: Sequence[CapsuleId], scope: Scope
    ) -> tuple[tuple[CapsuleId, ...], int]:
        """Those that were released, and the number of those that may be there still."""
        turns = asyncio.Semaphore(NUM_RELEASED)
        released: set[CapsuleId] = set()
        gone: set[CapsuleId] = set()

        async def release(capsule: CapsuleId) -> None:
            async with turns:
                try:
                    await self._capsules.release(capsule, scope)
                except NotFound:
                    gone.add(capsule)  # it went before
                except MalleeError as error:
                    log.warning("a capsule of a closed session was not released: %s", error)
                else:
                    released.add(capsule)

        try:
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*map(release, capsules))
        except TimeoutError:
            log.warning("workers did not release the capsules of a session in %g s", CLOSE_S)
        num_left = len(capsules) - len(released) - len(gone)
        return tuple(capsule for capsule in capsules if capsule in released), num_left


class SessionRequest(Observer):
    """Notes the capsules that a request of a session leaves."""

    __slots__ = ("_hashes", "_request", "_sessions")

    def __init__(self, sessions: GatewaySessions, request: RequestId) -> None:
        self._sessions = sessions
        self._request = request
        self._hashes: dict[int, Hashes] = {}  # of the prompts that branches run with

    def placed(self, shard: Shard, placement: Placement, at_s: float) -> None:
        self._hashes.update(dict.fromkeys(shard.branches, shard.dispatch.hashes))

    def delivered(self, branch: BranchLife, delta: Delta) -> None:
        if delta.capsule is not None:
            self.captured(branch.index, delta.capsule, delta.boundary)

    def cut(self, branch: BranchLife, at: int, residue: Tokens) -> None:
        if branch.capsule is not None:
            self.captured(branch.index, branch.capsule, at + len(residue))

    def shortened(
        self, branch: BranchLife, at: int, residue: Tokens, capsule: CapsuleId | None
    ) -> None:
        if capsule is not None:
            self._sessions.cut(request_of(capsule), capsule, at + len(residue))

    def captured(self, branch: int, capsule: CapsuleId, boundary: int) -> None:
        hashes = self._hashes.get(branch, NO_HASHES)
        self._sessions.left(self._request, capsule, boundary, hashes)

    def ended(self, branches: Sequence[BranchLife], error: MalleeError | None) -> None:
        self._sessions.ended(self._request)


def _view(tree: SessionTree) -> SessionView:
    nodes = [*tree.nodes.values()]
    return SessionView(
        name=tree.key.name,
        parent=tree.parent,
        created=tree.created,
        used=tree.used,
        num_capsules=len(nodes),
        num_running=len(tree.running),
        nodes=nodes,
        budget=tree.budget,
    )


def _found(tree: SessionTree | None) -> SessionTree:
    """Raises NotFound."""
    if tree is None:
        raise NotFound("no session of that name is here", param="session")
    return tree
