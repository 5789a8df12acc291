"""A gateway's sessions: its own requests' and those that other gateways tell of. Listed, forked, closed."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

from mallee.gateway.capsules.capsules import Capsules
from mallee.gateway.records import SharedRecords
from mallee.gateway.requests.deltas import Delta
from mallee.gateway.requests.lives import BranchLife
from mallee.gateway.requests.observers import Observer
from mallee.gateway.sessions.trees import LATE_S, SessionKey, SessionTree, SessionTrees
from mallee.gateway.shell import GatewayContext, Shell
from mallee.protocol.codec import encode
from mallee.protocol.errors import (
    InvalidParameter,
    LookupIncomplete,
    MalleeError,
    NotFound,
    SessionClosed,
)
from mallee.protocol.gateways.session_notes import (
    NodeNote,
    SessionNote,
    SessionNotes,
    SessionsAsk,
    decode_session_note,
    decode_session_notes,
    decode_sessions_ask,
)
from mallee.protocol.hashing import NO_HASHES, Hashes, Tokens
from mallee.protocol.ids import CapsuleId, RequestId, Scope, request_of
from mallee.protocol.subjects import Subjects
from mallee.router.dispatch.jobs import Job
from mallee.router.dispatch.shards import Shard
from mallee.router.placement.placer import Placement
from mallee.runtime.tasks import Tasks

log = logging.getLogger(__name__)

MAX_TOLD_NODES: Final = 2048  # of one message: a few hundred kilobytes
NUM_RELEASED: Final = 64  # capsules at once
_KIND: Final = "session"
CLOSE_S: Final = 30.0  # for the workers of all capsules of a session


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """`max_nodes` counts sessions and their capsules; a session is forgotten after `ttl_s` without use."""

    max_nodes: int = 65_536
    ttl_s: float = 86_400.0


class SessionView(NamedTuple):
    """A session as it is now; times are seconds since the epoch."""

    name: str
    parent: str
    created: float
    used: float
    nodes: Sequence[NodeNote]
    num_running: int  # at this gateway
    budget: str  # names the account that bounds it; "": it has none of its own
    children: Sequence[str] = ()


class Closed(NamedTuple):
    """A session's end. `num_left` capsules could not be released: their workers are silent, or refuse.

    `num_cancelled`: requests of this gateway.
    """

    released: tuple[CapsuleId, ...]
    num_left: int
    num_cancelled: int


class GatewaySessions:
    """The sessions of one gateway. Belongs to one event loop. `records` ask the others for theirs."""

    def __init__(
        self,
        context: GatewayContext,
        shell: Shell,
        capsules: Capsules,
        records: SharedRecords,
        limits: SessionLimits,
    ) -> None:
        self._bus = context.bus
        self._gateway = context.gateway
        self._subjects = Subjects.of(context.fleet)
        self._new_name = context.ids.new
        self._clock = context.wall_clock
        self._shell = shell
        self._capsules = capsules
        self._records = records
        self.trees = SessionTrees(
            max_nodes=limits.max_nodes,
            ttl_s=limits.ttl_s,
            block_size=context.router.config.block_size,
            clock=self._clock,
        )
        self.tasks = Tasks("the gateways' sessions")
        records.share(_KIND, self._tell_note)
        capsules.watch(self)

    async def start_up(self) -> None:
        """Hear of others' sessions from now on, and ask for those so far. Doesn't wait for the broker."""
        await self._bus.subscribe(self._subjects.sessions_told(), self._on_told)
        await self._bus.subscribe(self._subjects.sessions_asks(), self._on_ask)
        self._bus.on_state(self._on_state)
        self._on_state(is_up=True)

    def _on_state(self, is_up: bool) -> None:
        if is_up:  # what was told meanwhile was not heard
            self._bus.publish(self._subjects.sessions_asks(), encode(SessionsAsk(self._gateway)))

    async def close_up(self) -> None:
        await self.tasks.close()

    # Requests

    def begin(self, request: RequestId, job: Job) -> "SessionRequest":
        """A job of a session was accepted. Returns what has to see it."""
        terms = job.terms
        note = self.trees.begin(
            request,
            SessionKey(job.scope, terms.session),
            parent=terms.parent_session,
            tenant=terms.tenant,
            capsule=job.capsule,
            prompt_tokens=job.prompt_tokens,
            is_last=terms.ends_session,
        )
        self._tell(note)
        return SessionRequest(self, request)

    def left(self, request: RequestId, capsule: CapsuleId, tokens: int, hashes: Hashes) -> None:
        """A branch left a capsule, after a prompt of these blocks."""
        self._tell(self.trees.left(request, capsule, tokens, hashes, self._capsules.hashes))

    def cut(self, request: RequestId, capsule: CapsuleId, tokens: int) -> None:
        self._tell(self.trees.cut(request, capsule, tokens))

    def rewound(self, scope: Scope, source: CapsuleId, capsule: CapsuleId, boundary: int) -> None:
        self._tell(self.trees.derived(capsule, source, boundary))

    def ended(self, request: RequestId) -> None:
        """Nothing of the request runs any more; the last one of a session closes that."""
        key = self.trees.ended(request)
        if key is not None:
            self.tasks.spawn(self._close_after(key))

    async def _close_after(self, key: SessionKey) -> None:
        with suppress(NotFound):
            await self.close(key.name, key.scope)

    # Clients

    async def learn(self, name: str, scope: Scope, capsule: str | None = None) -> None:
        """Ask other gateways for a session that is not here, or has no such `capsule` (None: none at all).

        What they publish of it may be on its way. Raises LookupIncomplete.
        """
        key = SessionKey(scope, name)
        tree = self.trees.get(key)
        if tree is not None and (tree.nodes if capsule is None else capsule in tree.nodes):
            return
        asking = self._records.gather(_KIND, self._new_name(scope), scope, given=name.encode())
        notes, is_whole = await asking
        for note in notes:
            self.hear(decode_session_note(note))
        if not is_whole and self.trees.get(key) is None:
            raise LookupIncomplete("not every other gateway has answered")

    async def _tell_note(self, _: str, scope: Scope, name: bytes) -> bytes | None:
        tree = self.trees.get(SessionKey(scope, name.decode()))
        return None if tree is None else encode(tree.note())

    def page(self, scope: Scope, after: str, most: int) -> list[SessionView]:
        """The first `most` sessions of `scope` whose names come after `after`, in order."""
        return [_view(tree) for tree in self.trees.page(scope, after, most)]

    def show(self, name: str, scope: Scope) -> SessionView:
        """Raises NotFound, also for one of another scope."""
        tree = self._tree(name, scope)
        return _view(tree)._replace(children=self.trees.children(tree.key))

    def budget(self, name: str, scope: Scope, parent: str = "") -> str:
        """The name of the budget that bounds a session, its own or of one above; "" if none does.

        It names the account: `account_of`. `parent`: above the session, if that is new.
        """
        return self.trees.budget(SessionKey(scope, name), parent)

    def budget_above(self, name: str, scope: Scope, parent: str = "") -> str:
        """As `budget`, but for the session's own."""
        return self.trees.budget_above(SessionKey(scope, name), parent)

    def own_budget(self, name: str, scope: Scope) -> str:
        """The name of the session's own budget; "" if it has none, or there is no such session."""
        tree = self.trees.get(SessionKey(scope, name))
        return "" if tree is None else tree.budget

    def give(
        self, name: str, scope: Scope, budget: str, *, parent: str, tenant: str
    ) -> SessionNote:
        """Have a session, which may be new, bounded by `budget`; what other gateways are to know."""
        key = SessionKey(scope, name)
        note = self.trees.give(key, budget, parent=parent, tenant=tenant).told(())
        self._tell(note)
        return note

    def hear(self, note: SessionNote) -> None:
        """News of another gateway, which also come by broadcast."""
        closed = self.trees.merge(note)
        if closed is not None:
            self._end_requests(closed)
            self.tasks.spawn(self._release_news(closed))

    def root_of_fork(self, name: str, scope: Scope, new: str, capsule: str | None) -> NodeNote:
        """The capsule that a fork `new` of this session would begin with. Raises as `fork`."""
        tree = self._tree(name, scope)
        if self.trees.get(SessionKey(scope, new)) is not None:
            raise InvalidParameter("session", new, "there is a session of that name; give another")
        node = tree.last if capsule is None else tree.nodes.get(capsule)
        if node is None and capsule is not None:
            raise InvalidParameter("capsule", capsule, "it is none of this session's")
        if node is None:
            raise InvalidParameter("session", name, "it has left no capsule yet")
        return node

    def fork(
        self, name: str, scope: Scope, new: str, capsule: str | None, *, budget: str = ""
    ) -> tuple[SessionView, SessionNote]:
        """A session `new` that begins with a capsule of this one; None: with the newest.

        And what other gateways are to know. Raises NotFound, InvalidParameter.
        """
        node = self.root_of_fork(name, scope, new, capsule)
        forked = self.trees.fork(self._tree(name, scope), new, node, budget)
        note = forked.note()
        self._tell(note)
        return _view(forked), note

    async def close(self, name: str, scope: Scope) -> Closed:
        """End a session: its running requests end with SessionClosed, its capsules are released.

        Sessions below it stay. Raises NotFound.
        """
        tree = self._tree(name, scope)
        self.trees.close(tree.key)
        self._tell(SessionNote(scope, name, is_closed=True))
        num_cancelled = self._end_requests(tree)
        released, num_left = await self._release_all(tree.own, scope)
        return Closed(released, num_left, num_cancelled)

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

    def _end_requests(self, tree: SessionTree) -> int:
        running = sorted(tree.running)
        for request in running:
            self._shell.give_up(request, SessionClosed())
        return len(running)

    def _tree(self, name: str, scope: Scope) -> SessionTree:
        tree = self.trees.get(SessionKey(scope, name))
        if tree is None:
            raise NotFound("no session of that name is here", param="session")
        return tree

    # Other gateways

    def _tell(self, note: SessionNote | None) -> None:
        if note is not None:
            self._publish([note])

    def _publish(self, notes: Sequence[SessionNote]) -> None:
        raw = encode(SessionNotes(self._gateway, tuple(notes)))
        self._bus.publish(self._subjects.sessions_told(), raw)

    def _on_ask(self, raw: bytes) -> None:
        if decode_sessions_ask(raw).gateway == self._gateway:
            return
        batch: list[SessionNote] = []
        size = 0
        for note in self.trees.notes():
            batch.append(note)
            size += 1 + len(note.nodes)
            if size >= MAX_TOLD_NODES:
                self._publish(batch)
                batch, size = [], 0
        if batch:
            self._publish(batch)

    def _on_told(self, raw: bytes) -> None:
        told = decode_session_notes(raw)
        if told.gateway == self._gateway:
            return
        for note in told.notes:
            self.hear(note)

    async def _release_news(self, closed: SessionTree) -> None:
        """Release what the gateway that closed a session may not have heard of yet."""
        since = self._clock() - LATE_S
        own = [node for node in closed.nodes.values() if not node.is_root]
        news = [CapsuleId(node.capsule) for node in own if node.created > since]
        await self._release_all(news, closed.key.scope)


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
    nodes = list(tree.nodes.values())
    return SessionView(
        name=tree.key.name,
        parent=tree.parent,
        created=tree.created,
        used=tree.used,
        nodes=nodes,
        num_running=len(tree.running),
        budget=tree.budget,
    )
