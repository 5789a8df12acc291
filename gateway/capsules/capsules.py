"""Capsules as clients name them: where each is, its text, and the verbs for it.

A capsule is known in four places, and `Capsules.find` asks them in this order: the router's directory (which
workers' events fill: what a worker has), the dispatcher's promises (a prefill of this gateway is to make
it), the memory of texts (what it takes to compute it again), and the gateway that made it; if that is gone,
the gateways' store of texts.
"""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final, NamedTuple, Protocol

from msgspec import structs

from mallee.gateway.capsules.files.exports import Export, Exports
from mallee.gateway.capsules.files.imports import Import, Imports
from mallee.gateway.capsules.lineage import Lineage
from mallee.gateway.capsules.promises import PromiseChanges
from mallee.gateway.capsules.texts import CapsuleTexts
from mallee.gateway.fleet.questions import MOVE_S
from mallee.gateway.peers import Peers
from mallee.gateway.shell import GatewayContext, Shell
from mallee.gateway.store.store import Store
from mallee.protocol.codec import encode
from mallee.protocol.errors import (
    BadRequest,
    CapsuleAbandoned,
    CapsuleComputing,
    CapsuleLost,
    InvalidParameter,
    LookupIncomplete,
    MalleeError,
    NotFound,
    Unavailable,
    UnknownCapsule,
    UnknownText,
    from_wire,
)
from mallee.protocol.gateways.capsule_texts import CapsuleState, decode_state
from mallee.protocol.hashing import NO_HASHES, Hashes, Tokens
from mallee.protocol.ids import CapsuleId, RequestId, Scope, WorkerId, account_of, request_of
from mallee.protocol.messages import (
    CapsuleStatus,
    Cut,
    Delete,
    Demote,
    Holder,
    Inspect,
    Pin,
    Promote,
    Rewind,
    Share,
)
from mallee.protocol.model import ModelSpec
from mallee.router.dispatch.token_memory import TokenMemory
from mallee.router.index.capsules import CapsuleEntry

INSPECT_S: Final = 2.0  # for a worker to tell of a capsule; later it is shown without
PROMISE_S: Final = 60.0  # for a worker to begin a capsule that another gateway has promised
ADOPT_S: Final = 2.0  # for the texts of a draining worker's capsules
CHANGE_S: Final = 5.0  # of them, in one question
_STATE: Final = "capsule"
_RELEASED: Final = "capsule.released"


class CapsuleFiles(NamedTuple):
    """Capsules that come and go as files."""

    exports: Exports
    imports: Imports


class CapsuleInfo(NamedTuple):
    """A capsule as the gateway knows it.

    Without a `worker` it went with its own, and is computed again by its next fork; or it is computing, and
    waits for a worker.
    """

    capsule: CapsuleId
    worker: WorkerId | None
    boundary: int  # committed tokens
    created: float  # seconds since the epoch, as this gateway learned of it
    is_stale: bool = False  # made by weights that have been replaced: it can't be forked
    status: CapsuleStatus | None = None  # by its worker, if it was asked and has answered
    is_computing: bool = False  # its prefill has not ended
    error: MalleeError | None = None  # by which its prefill has failed: there is no capsule

    def told(self, status: CapsuleStatus, **changes: Any) -> "CapsuleInfo":
        """With what its worker says of it."""
        return self._replace(status=status, boundary=status.boundary, **changes)


class Observer(Protocol):
    """Sees capsules that clients derive from others."""

    def rewound(
        self, scope: Scope, source: CapsuleId, capsule: CapsuleId, boundary: int
    ) -> None: ...


class Capsules:
    """The capsules that one gateway knows of, for clients. Belongs to one event loop.

    Methods that take a scope raise UnknownCapsule also for a capsule of another one; all that look one up
    raise CapsuleLost and LookupIncomplete, and all but `find` and `inspect` raise what its prefill failed by.
    """

    def __init__(
        self,
        context: GatewayContext,
        shell: Shell,
        store: Store,
        peers: Peers,
        memory: TokenMemory,
        files: CapsuleFiles | None,
    ) -> None:
        """Without `files` no capsule is exported or imported."""
        self.lineage = Lineage()
        self.changes = PromiseChanges()
        self.texts = CapsuleTexts(context, store, peers, memory, shell.tasks)
        self._context = context
        self._router = context.router
        self._shell = shell
        self._peers = peers
        self._dispatcher = shell.dispatcher
        self._memory = memory
        self._files = files
        self._observers: list[Observer] = []
        shell.keeper = self
        peers.share(_STATE, self._tell_state)
        peers.share(_RELEASED, self._hear_released)

    def watch(self, observer: Observer) -> None:
        """Have `observer` see what is derived from now on."""
        self._observers.append(observer)

    # Where it is

    async def show(self, capsule: CapsuleId, scope: Scope) -> CapsuleInfo:
        """A capsule as it is known here, or else at another gateway."""
        info = await self.find(capsule, scope)
        if info.error is not None:
            raise info.error
        return info

    async def find(self, capsule: CapsuleId, scope: Scope) -> CapsuleInfo:
        """As `show`; one whose prefill has failed has its `error`."""
        self.check_owner(capsule, scope)
        try:
            info = self._info(self._router.capsule(capsule))
        except UnknownCapsule:
            info = await self._find_elsewhere(capsule, scope)
        if info.worker is not None and not info.is_computing:
            self.texts.want(capsule, scope)
        return info

    async def inspect(self, capsule: CapsuleId, scope: Scope) -> CapsuleInfo:
        """As `find`, with what its worker says of it, if that answers soon."""
        info = await self.find(capsule, scope)
        if info.worker is None:
            return info
        question = Inspect(self._new_name(scope), capsule)
        try:
            status = await self._shell.questions.ask(info.worker, question, INSPECT_S)
        except Unavailable:
            return info
        except UnknownCapsule:
            if not info.is_computing:
                raise
            self._forget_promise(capsule)
            # Its prefill has ended, or runs elsewhere by now.
            return await self.find(capsule, scope)
        return info.told(status, is_computing=status.computed is not None)

    def of(self, scope: Scope, after: str) -> Iterator[CapsuleInfo]:
        """The capsules of `scope` whose names come after `after`, in order; not those that go meanwhile."""
        for name in self._router.capsules(scope, after):
            if self._context.ids.belongs(name, scope):
                yield self._info(self._router.capsule(name))

    def left_by(self, request: RequestId, scope: Scope) -> list[CapsuleId]:
        """The capsules that a request left, as far as they are known."""
        found = []
        for name in self._router.capsules(scope, request):
            if not name.startswith(request):
                break
            if name[len(request)] in ".-":
                found.append(name)
        return found

    def is_kept(self, capsule: CapsuleId) -> bool:
        """Whether a worker holds it, as far as is known here."""
        try:
            self._router.capsule(capsule)
        except UnknownCapsule:
            return False
        return True

    def hashes(self, capsule: CapsuleId) -> Hashes:
        """Of a capsule's full blocks, as far as they are known."""
        try:
            return self._router.capsule(capsule).hashes
        except UnknownCapsule:
            return NO_HASHES

    def check_owner(self, capsule: CapsuleId, scope: Scope) -> None:
        """Before anything is looked up: the refusal must not tell, or take longer, if the capsule exists."""
        if not self._context.ids.belongs(capsule, scope):
            raise UnknownCapsule(capsule)

    async def learn(self, capsule: CapsuleId, scope: Scope, *, is_kept: bool = False) -> None:
        """Return when forks of `capsule` can be placed here, if another gateway made or promised it.

        Of one whose forks are to be kept, the text is here then, if it can be had. Raises as `show`, and
        Unavailable.
        """
        self.check_owner(capsule, scope)
        if self._dispatcher.lacks(capsule):
            try:
                async with asyncio.timeout(PROMISE_S):
                    await self._await_worker(capsule, scope)
            except TimeoutError:
                raise Unavailable(
                    f"no worker has begun to compute the capsule for {PROMISE_S:g} s; retry later"
                ) from None
            if self._dispatcher.lacks(capsule):  # its worker may be leaving
                await self.texts.fetch(capsule, scope)
        self.texts.renew(capsule)  # not before: it may have been released elsewhere
        if is_kept:
            await self.remember(capsule, scope)

    async def _await_worker(self, capsule: CapsuleId, scope: Scope) -> None:
        """Return when a worker computes or has a capsule, or its text can be had."""
        while (info := await self.show(capsule, scope)).is_computing:
            if not self._dispatcher.lacks(capsule):
                return
            await self._change(info, scope)

    async def _find_elsewhere(self, capsule: CapsuleId, scope: Scope) -> CapsuleInfo:
        """A capsule that no worker has, as far as is known here."""
        own = self._dispatcher.promise(capsule)
        if own is not None:
            info = CapsuleInfo(capsule, own.worker, own.num_tokens, self._wall_time(own.since))
            return _promised(info, None if own.error is None else own.error.to_wire())
        try:
            info = self._lost_info(capsule)
        except (NotFound, LookupIncomplete):  # its worker's event may be under way
            raw = await self._peers.ask_maker(_STATE, capsule, scope)
        else:
            await self.texts.check(capsule, scope)
            return info
        if raw is None:
            return await self._find_stored(capsule, scope)
        state = decode_state(raw)
        if state.worker and state.error is None:
            worker, num_tokens = WorkerId(state.worker), state.num_tokens
            self._router.learn_capsule(
                capsule, worker, num_tokens, NO_HASHES, scope, is_computing=state.is_promised
            )
            with suppress(UnknownCapsule):  # of a worker that isn't known here
                return self._info(self._router.capsule(capsule))
            raise Unavailable("the capsule's worker is not known at this gateway yet; retry in 1 s")
        if not state.is_promised:
            self._router.note_lost(capsule)
            await self.texts.fetch(capsule, scope)
            return self._lost_info(capsule)
        info = CapsuleInfo(capsule, None, state.num_tokens, self._context.wall_clock())
        return _promised(info, state.error)

    async def _find_stored(self, capsule: CapsuleId, scope: Scope) -> CapsuleInfo:
        """A capsule of which the store alone may know: its gateway is gone, or has forgotten it."""
        text = await self.texts.read(capsule, scope)
        if not self._peers.knows_all:
            raise LookupIncomplete("not all other gateways are known yet")
        if not all(worker.is_whole for worker in self._router.all_workers()):
            raise LookupIncomplete("not all workers have told yet what they have")
        if text is not None and (
            not text.ttl_s or self._context.wall_clock() < text.made + text.ttl_s
        ):
            self._router.note_lost(capsule)  # else its time may be over
        return self._lost_info(capsule)

    async def _change(self, info: CapsuleInfo, scope: Scope) -> None:
        """Return when a promised capsule of another gateway is no more as `info` has it, or soon after."""
        known = CapsuleState(info.boundary, info.worker or "", is_promised=True)
        raw = await self._peers.ask_maker(
            _STATE, info.capsule, scope, given=encode(known), wait_s=CHANGE_S + INSPECT_S
        )
        if raw is None:
            self._forget_promise(info.capsule)

    def _lost_info(self, capsule: CapsuleId) -> CapsuleInfo:
        """A capsule that is gone, and whose text is known here.

        Raises UnknownCapsule, CapsuleLost; LookupIncomplete: it will be back, from disk.
        """
        boundary = self._dispatcher.lost_capsule(capsule)
        is_stale = not self._dispatcher.is_fresh(capsule)
        return CapsuleInfo(capsule, None, boundary, self._context.wall_clock(), is_stale)

    def _info(self, entry: CapsuleEntry) -> CapsuleInfo:
        return CapsuleInfo(
            capsule=entry.capsule,
            worker=entry.worker,
            boundary=entry.boundary,
            created=self._wall_time(entry.created),
            is_stale=not self._dispatcher.is_fresh(entry.capsule),
            is_computing=entry.is_computing,
        )

    def _wall_time(self, at: float) -> float:
        return self._context.wall_clock() - (self._context.clock() - at)

    def _new_name(self, scope: Scope, account: str = "") -> RequestId:
        return self._context.ids.new(scope, account)

    # Its text

    async def tokens(self, capsule: CapsuleId, scope: Scope) -> Tokens:
        """The tokens of a capsule, from the first one on. Raises UnknownText."""
        self.check_owner(capsule, scope)
        await self.texts.fetch(capsule, scope)
        if (text := self._memory.get(capsule)) is None:
            await self.find(capsule, scope)
            raise UnknownText(capsule)
        return text.path.tokens()

    def shorten(self, capsule: CapsuleId, at: int, residue: Tokens) -> None:
        """The client saw the first `at` tokens of its text and `residue`, and no more."""
        if (text := self._memory.get(capsule)) is not None and at <= text.path.length:
            self._memory.keep(capsule, text.cut(at, residue))
        try:
            entry = self._router.capsule(capsule)
        except UnknownCapsule:
            return
        branch = int(capsule.rpartition(".")[2])
        cut = Cut(request_of(capsule), branch, at, residue.tobytes())
        self._shell.links.send(entry.worker, cut)
        hashes = entry.hashes[: at // self._router.config.block_size]
        self._router.learn_capsule(capsule, entry.worker, at + len(residue), hashes)

    # Verbs

    async def rewind(self, capsule: CapsuleId, to: int, ttl_s: float, scope: Scope) -> CapsuleInfo:
        """A capsule of the first `to` tokens of another. Raises CapsulesFull."""
        worker = await self._holder(capsule, scope)
        await self.remember(capsule, scope)
        question = Rewind(self._new_name(scope, account_of(capsule)), capsule, to, ttl_s)
        status = await self._shell.questions.ask(worker, question)
        left = CapsuleId(status.capsule)
        self.lineage.add(request_of(left), capsule)
        if (text := self._memory.get(capsule)) is not None and to <= text.path.length:
            self._memory.keep(left, text.first(to)._replace(ttl_s=ttl_s, is_own=True))
        self._router.learn_capsule(left, worker, status.boundary, NO_HASHES, scope)
        for observer in self._observers:
            observer.rewound(scope, capsule, left, status.boundary)
        now = self._context.wall_clock()
        return CapsuleInfo(left, worker, status.boundary, now, status=status)

    async def pin(self, capsule: CapsuleId, ttl_s: float | None, scope: Scope) -> CapsuleInfo:
        """Keep a capsule until deleted or unused for `ttl_s` (0: no limit); None: no more."""
        worker = await self._holder(capsule, scope)
        await self.remember(capsule, scope)
        question = Pin(self._new_name(scope), capsule, ttl_s is not None, ttl_s or 0.0)
        status = await self._shell.questions.ask(worker, question)
        if (text := self._memory.get(capsule)) is not None:
            self._memory.keep(capsule, text._replace(ttl_s=ttl_s))
        return (await self.show(capsule, scope)).told(status)

    async def demote(self, capsule: CapsuleId, tier: int, scope: Scope) -> CapsuleInfo:
        """Move a capsule to host memory (1) or disk (2); returns once it is there, on disk once durable.

        Raises InvalidParameter, TierFull, StorageError, Unavailable.
        """
        worker = await self._holder(capsule, scope)
        return await self._moved(worker, Demote(self._new_name(scope), capsule, tier), scope)

    async def promote(self, capsule: CapsuleId, share: Share, scope: Scope) -> CapsuleInfo:
        """Bring a capsule back to the device; returns once it is there. Raises as `demote`."""
        worker = await self._holder(capsule, scope)
        return await self._moved(worker, Promote(self._new_name(scope), capsule, share), scope)

    async def _moved(
        self, worker: WorkerId, question: Demote | Promote, scope: Scope
    ) -> CapsuleInfo:
        """The capsule of `question` once `worker` says that it is there."""
        status = await self._shell.questions.ask(worker, question, MOVE_S)
        return (await self.show(CapsuleId(question.capsule), scope)).told(status)

    async def release(self, capsule: CapsuleId, scope: Scope) -> None:
        """Delete a capsule, everywhere."""
        info = await self.find(capsule, scope)
        await self.texts.release(capsule, scope)  # first: no gateway computes it again meanwhile
        self._abandon(capsule)
        with suppress(Unavailable):  # it is told by the store then
            await self._peers.ask_maker(_RELEASED, capsule, scope)
        if info.worker is not None:
            with suppress(UnknownCapsule):  # it went by itself: its event is under way
                delete = Delete(self._new_name(scope), capsule)
                await self._shell.questions.ask(info.worker, delete)
        self._router.forget_capsule(capsule)
        await self.texts.released(capsule, scope)

    async def remember(self, capsule: CapsuleId, scope: Scope) -> None:
        """Have the text of a capsule here, if it can be had: what is kept of it is stored."""
        with suppress(Unavailable):
            await self.texts.fetch(capsule, scope)

    async def _holder(self, capsule: CapsuleId, scope: Scope) -> WorkerId:
        """The worker of a capsule. Raises CapsuleComputing; CapsuleLost where it has none."""
        info = await self.show(capsule, scope)
        if info.is_computing:
            raise CapsuleComputing(capsule)
        if info.worker is None:
            raise CapsuleLost(capsule, "its worker is gone; its next fork computes it again")
        return info.worker

    # As files

    async def export(self, capsule: CapsuleId, scope: Scope) -> Export:
        """A capsule as the bytes of a file; must be closed.

        Raises CapsuleStale, InvalidParameter: its worker lends no KV; Unavailable.
        """
        worker = await self._holder(capsule, scope)
        self._dispatcher.check_fresh(capsule)
        view = self._router.worker(worker)
        if self._files is None:
            raise BadRequest("this gateway exports no capsules")
        if view is None or not view.lends_at:
            reason = "its worker lends no KV: its engine is mocked or vLLM's, or it is too old"
            raise InvalidParameter("capsule", capsule, reason)
        holder = Holder(worker, view.incarnation, view.lends_at, 0, capsule)
        return await self._files.exports.begin(
            holder, self._served(), self._router.config.block_size
        )

    @property
    def max_import_nbytes(self) -> int:
        """Bytes of an imported file, at most; 0: nothing is imported here."""
        return 0 if self._files is None else self._files.imports.max_nbytes

    async def begin_import(self) -> Import:
        """Take in a capsule; must be closed.

        Raises BadRequest, InvalidParameter, Unavailable, StorageError.
        """
        if self._files is None or not self._files.imports.max_nbytes:
            raise BadRequest("this server imports no capsules: imports.max_gib is 0")
        return await self._files.imports.begin(self._served(), self._router.config.block_size)

    def _served(self) -> ModelSpec:
        """The model with the weights that serve now."""
        return structs.replace(self._context.model, weights=self._router.weights)

    # What outlives its gateway: `shell.Keeper`

    async def check(self, capsule: CapsuleId, scope: Scope) -> None:
        await self.texts.check(capsule, scope)

    async def adopt(self, worker: WorkerId) -> None:
        own, others = self._context.gateway, self._peers.others
        if not self._peers.knows_all or own > min(others, default=own):
            return
        made_at = self._context.ids.made_at
        left = [
            self._router.capsule(capsule)
            for capsule in self._router.capsules_of(worker)
            if not any(made_at(capsule, other) for other in others)
        ]
        with suppress(TimeoutError):
            async with asyncio.timeout(ADOPT_S):
                for entry in left:
                    with suppress(MalleeError):
                        await self.texts.adopt(entry.capsule, entry.scope)

    # Other gateways

    async def _tell_state(self, name: str, scope: Scope, given: bytes) -> bytes | None:
        """The state of a capsule; of one that is promised once it is not as `given`, or soon."""
        capsule, known = CapsuleId(name), decode_state(given) if given else None
        with suppress(TimeoutError):
            async with asyncio.timeout(CHANGE_S):
                while known is not None and self._state(capsule) == known:
                    await self.changes.wait(capsule)
        self._shell.check_open()
        state = self._state(capsule)
        if state is None and known is not None:
            raise CapsuleAbandoned(capsule)
        return None if state is None else encode(state)

    async def _hear_released(self, name: str, scope: Scope, _: bytes) -> bytes | None:
        """A client released a capsule at another gateway."""
        self._abandon(CapsuleId(name))
        return b""

    def _state(self, capsule: CapsuleId) -> CapsuleState | None:
        promise = self._dispatcher.promise(capsule)
        if promise is not None:
            error = None if promise.error is None else promise.error.to_wire()
            return CapsuleState(
                promise.num_tokens, promise.worker or "", is_promised=True, error=error
            )
        try:
            entry = self._router.capsule(capsule)
        except UnknownCapsule:
            text = self._memory.get(capsule) if self._router.was_lost(capsule) else None
            return None if text is None else CapsuleState(text.path.length)
        return None if entry.is_computing else CapsuleState(entry.boundary, entry.worker)

    def _abandon(self, capsule: CapsuleId) -> None:
        """Compute a released capsule no more, for the first time or again."""
        self._memory.forget(capsule)
        promise = self._dispatcher.promise(capsule)
        if promise is not None and promise.error is None:
            self._shell.give_up(request_of(capsule), CapsuleAbandoned(capsule))
        self._dispatcher.forget_capsule(capsule)
        self._shell.carry_out()

    def _forget_promise(self, capsule: CapsuleId) -> None:
        """The worker that was to compute `capsule` does not, or not any more."""
        with suppress(UnknownCapsule):
            if self._router.capsule(capsule).is_computing:
                self._router.forget_capsule(capsule)


def _promised(info: CapsuleInfo, error: tuple[str, str, dict[str, Any]] | None) -> CapsuleInfo:
    """A capsule that is not there yet, or with `error` won't be."""
    if error is not None:
        return info._replace(worker=None, error=from_wire(error))
    return info._replace(is_computing=True)
