"""The recorder of a gateway: entries of sessions' records, written by one task while requests go on.

Recording never holds a request up, and never fails one: what can't be written ends the record, which says so
where it still can, and is counted. `sessions.record` says what is recorded, and why by gateways.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Literal, TypeAlias, TypeVar

from msgspec import structs

from mallee.gateway.recording.files import RecordFolder, append
from mallee.gateway.requests.deltas import Delta
from mallee.gateway.requests.lives import BranchLife
from mallee.gateway.requests.observers import Observer
from mallee.protocol.errors import ConfigError, StorageFailed
from mallee.protocol.hashing import Tokens
from mallee.protocol.ids import CapsuleId, RequestId, Scope, WorkerId
from mallee.protocol.messages import Fork, Generate, Prefill, Share, pack_tokens
from mallee.protocol.model import ModelSpec, WeightVersion
from mallee.router.dispatch.jobs import Job
from mallee.router.dispatch.shards import Shard
from mallee.router.dispatch.token_memory import CapsuleTokens
from mallee.router.placement.placer import Placement
from mallee.runtime.tasks import Tasks
from mallee.sessions.record import (
    FORMAT,
    Asked,
    Captured,
    CutShort,
    Entry,
    GivenUp,
    Got,
    Manifest,
    Opened,
    Placed,
    Rewound,
    Stopped,
    frame,
)

log = logging.getLogger(__name__)

FLUSH_S: Final = (
    0.05  # that entries wait for others: what a kill costs, at most, on a disk that keeps up
)
CLOSE_S: Final = 5.0  # for the last of them to be written
MAX_PENDING: Final = 32 << 20  # bytes of all sessions that wait for the disk

T = TypeVar("T")
StopReason: TypeAlias = Literal["session_bytes", "sessions", "tenant_sessions", "disk", "disk_slow"]


class SessionTape:
    """The record of one session, as far as this gateway sees it. Belongs to the recorder's loop."""

    __slots__ = (
        *(
            "_began",
            "_known",
            "_labels",
            "_num_requests",
            "_recorder",
            "is_stopped",
            "key",
            "nbytes",
        ),
        *("part", "pending", "tenant"),
    )

    def __init__(
        self, recorder: "Recorder", key: tuple[Scope, str], tenant: str, began: float
    ) -> None:
        self._recorder = recorder
        self._began = began
        self._known: set[str] = set()  # capsules whose making is in the record
        self._labels: dict[WorkerId, str] = {}
        self._num_requests = 0
        self.key = key
        self.tenant = tenant
        self.part = ""  # its file's path, once that is there
        self.pending: list[bytes] = []
        self.nbytes = 0
        self.is_stopped = False

    def knows(self, capsule: CapsuleId) -> bool:
        """Whether the record says where `capsule` came from."""
        return capsule in self._known

    def label(self, worker: WorkerId) -> str:
        """A name for `worker` in this record: the record is a tenant's, names of workers the operator's."""
        return self._labels.setdefault(worker, f"worker {len(self._labels) + 1}")

    def at_s(self) -> float:
        return self._recorder.clock() - self._began

    def add(self, entry: Entry, *, capsule: str | None = None) -> None:
        """Append `entry`, which says where `capsule` came from."""
        if self.is_stopped:
            return
        raw = frame(entry)
        if self.nbytes + len(raw) > self._recorder.max_nbytes:
            self._recorder.stop(self, "session_bytes")
            return
        if capsule is not None:
            self._known.add(capsule)
        self.nbytes += len(raw)
        self._recorder.wrote(self, raw)

    def begin(
        self, request: RequestId, job: Job, weights: WeightVersion, text: CapsuleTokens | None
    ) -> "RequestTape":
        """A request that was accepted; `text` is that of its capsule, if that is known."""
        if job.capsule is not None and job.capsule not in self._known:
            self._add_manifest(job.capsule, text)
        command = job.command(request)
        assert isinstance(command, Generate | Fork | Prefill), "jobs are one of three"
        command = structs.replace(command, share=Share())
        if not isinstance(command, Fork):
            command = structs.replace(command, salt="")
        number = self._num_requests
        self._num_requests += 1
        self.add(Asked(number, self.at_s(), command, shown(weights)))
        return RequestTape(self, number)

    def _add_manifest(self, capsule: CapsuleId, text: CapsuleTokens | None) -> None:
        if text is None:
            self.add(Manifest(capsule, None))
            return
        tokens = pack_tokens(text.path.tokens())
        entry = Manifest(capsule, tokens, text.grammar, text.continuation)
        self.add(entry, capsule=capsule)


def shown(weights: WeightVersion) -> WeightVersion:
    """`weights` as tenants may see them: where they lie on the server's machines is the operator's."""
    return structs.replace(weights, path="")


class RequestTape(Observer):
    """The part of a session's record about one request."""

    __slots__ = ("_number", "_session")

    def __init__(self, session: SessionTape, number: int) -> None:
        self._session = session
        self._number = number

    def placed(self, shard: Shard, placement: Placement, at_s: float) -> None:
        session, branches = self._session, shard.branches
        session.add(
            Placed(
                number=self._number,
                at_s=session.at_s(),
                first=branches.start,
                count=len(branches),
                worker=session.label(shard.worker),
                weights=shown(shard.weights),
                is_moved=shard.dispatch.is_moved,
            )
        )

    def delivered(self, branch: BranchLife, delta: Delta) -> None:
        session, capsule = self._session, delta.capsule
        entry = Got(
            number=self._number,
            at_s=session.at_s(),
            branch=delta.branch,
            tokens=pack_tokens(delta.tokens),
            finish=delta.finish,
            capsule=capsule,
            boundary=delta.boundary,
            error=None if delta.error is None else delta.error.code,
            logprobs=delta.logprobs,
        )
        session.add(entry, capsule=capsule)

    def gave_up(self, branch: BranchLife) -> None:
        self._session.add(GivenUp(self._number, self._session.at_s(), branch.index))

    def cut(self, branch: BranchLife, at: int, residue: Tokens) -> None:
        self.shortened(branch, at, residue, branch.capsule)

    def shortened(
        self, branch: BranchLife, at: int, residue: Tokens, capsule: CapsuleId | None
    ) -> None:
        session, left = self._session, residue.tobytes()
        entry = CutShort(self._number, session.at_s(), branch.index, at, left, capsule)
        session.add(entry, capsule=capsule)

    def captured(self, branch: int, capsule: CapsuleId, boundary: int) -> None:
        session = self._session
        entry = Captured(self._number, session.at_s(), branch, capsule, boundary)
        session.add(entry, capsule=capsule)


class Recorder:
    """Writes the records of one gateway's sessions. Belongs to its event loop.

    `max_nbytes` of a session. `clock` and `wall_clock` are seconds, of this process and since the epoch.
    `count_stopped(reason)` and `count_nbytes(n)` are called as records end and grow.
    """

    def __init__(
        self,
        folder: RecordFolder,
        *,
        gateway: str,
        model: ModelSpec,
        max_nbytes: int,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        count_stopped: Callable[[StopReason], None],
        count_nbytes: Callable[[int], None],
    ) -> None:
        self._folder = folder
        self._gateway = gateway
        self._shown_model = structs.replace(model, weights=shown(model.weights))
        self.max_nbytes = max_nbytes
        self.clock = clock
        self._wall_clock = wall_clock
        self._count_stopped = count_stopped
        self._count_nbytes = count_nbytes
        self._sessions: dict[tuple[Scope, str], SessionTape] = {}
        self._written: dict[SessionTape, None] = {}  # that have something pending, in order
        self._num_pending = 0
        self._has_pending = asyncio.Event()
        self._is_closing = False
        self._disk = asyncio.Lock()  # around every use of the folder
        self.tasks = Tasks("the records of sessions")

    # Life

    async def start_up(self) -> None:
        """Begin to write. Raises ConfigError if there can be no such folder."""
        try:
            await asyncio.to_thread(self._folder.make)
        except OSError as error:
            raise ConfigError(f"recording.folder={error.filename}: {error.strerror}") from error
        self.tasks.spawn(self._write())

    async def close(self) -> None:
        """Write what is pending, as far as that is soon done."""
        self._is_closing = True
        self._has_pending.set()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self.tasks.finish()
        except TimeoutError:
            log.warning("the disk did not take the ends of sessions' records in %g s", CLOSE_S)
        await self.tasks.close()

    # Entries

    def session(self, scope: Scope, name: str, tenant: str = "") -> SessionTape:
        """The record of a session, begun if it has none here. `tenant`: its owner's, if a key says so."""
        key = scope, name
        found = self._sessions.get(key)
        if found is None:
            found = self._sessions[key] = SessionTape(self, key, tenant, self.clock())
            began = self._wall_clock()
            found.add(Opened(FORMAT, began, self._gateway, name, self._shown_model))
        return found

    def rewound(self, scope: Scope, source: CapsuleId, capsule: CapsuleId, boundary: int) -> None:
        """Note a rewind in the records of `scope` that say where `source` came from."""
        for (owner, _), session in self._sessions.items():
            if owner == scope and session.knows(source):
                entry = Rewound(session.at_s(), capsule, source, boundary)
                session.add(entry, capsule=capsule)

    def wrote(self, session: SessionTape, raw: bytes) -> None:
        """Append `raw` to the file of `session`, soon."""
        session.pending.append(raw)
        self._num_pending += len(raw)
        self._written[session] = None
        self._has_pending.set()
        if self._num_pending > MAX_PENDING:
            self.stop(session, "disk_slow")

    def stop(self, session: SessionTape, reason: StopReason) -> None:
        """End the record of `session`; it says so, if that can be written."""
        if session.is_stopped:
            return
        log.warning("the record of a session ends: %s", reason)
        session.is_stopped = True
        self._count_stopped(reason)
        if reason != "session_bytes":
            self._drop_pending(session)
        if session.part or session.pending:
            if reason != "disk":  # else its last frame may be torn
                self.wrote(session, frame(Stopped(session.at_s(), reason)))
        else:  # there is no file: its next request may begin one
            self._sessions.pop(session.key, None)

    def _drop_pending(self, session: SessionTape) -> None:
        self._num_pending -= sum(map(len, session.pending))
        session.pending = []
        self._written.pop(session, None)

    # Files

    async def _write(self) -> None:
        while not self._is_closing:
            await self._has_pending.wait()
            if not self._is_closing:
                await asyncio.sleep(FLUSH_S)
            await self._flush()

    async def _flush(self) -> None:
        """Write what is pending now."""
        async with self._disk:
            self._has_pending.clear()
            for session in list(self._written):
                raw = b"".join(session.pending)
                self._drop_pending(session)
                await self._append(session, raw)

    async def _append(self, session: SessionTape, raw: bytes) -> None:
        try:
            if not session.part:
                full = await asyncio.to_thread(self._folder.is_full_for, session.tenant)
                if full is not None:
                    self.stop(session, full)
                    return
                part = await asyncio.to_thread(self._folder.new_part, *session.key, session.tenant)
                session.part = str(part)
            await asyncio.to_thread(append, session.part, raw)
        except OSError as error:
            if session.part and isinstance(error, FileNotFoundError):
                log.info("the record of a session was deleted, by another gateway it seems")
                self._forget(session)
                return
            log.warning("the record of a session can't be written: %s", error)
            self.stop(session, "disk")
        else:
            self._count_nbytes(len(raw))

    def _forget(self, session: SessionTape) -> None:
        """End a record that was deleted: the next request of its session begins another."""
        self._sessions.pop(session.key, None)
        session.is_stopped = True
        self._drop_pending(session)

    async def read(self, scope: Scope, name: str) -> bytes:
        """The record of a session so far, of all its parts in the folder; empty if there is none.

        Raises StorageFailed.
        """
        await self._flush()
        async with self._disk:
            return await _reading(self._folder.read, scope, name)

    async def delete(self, scope: Scope, name: str) -> bool:
        """Delete the record of a session; whether there was one. The next request begins another.

        Raises StorageFailed.
        """
        async with self._disk:
            session = self._sessions.get((scope, name))
            if session is not None:
                self._forget(session)
            num_parts = await _reading(self._folder.delete, scope, name)
        return session is not None or num_parts > 0


async def _reading(work: Callable[[Scope, str], T], scope: Scope, name: str) -> T:
    """The result of `work` on the folder. Raises StorageFailed."""
    try:
        return await asyncio.to_thread(work, scope, name)
    except OSError as error:
        told = (error.errno or 0, error.strerror or "")
        raise StorageFailed("use of", "the record of a session", *told) from error
