"""Bookings of the other gateways: taken in, kept true, given up when a gateway is gone.

Each gateway broadcasts what it books, frees and finishes prefilling, as one numbered stream
(`protocol.bookings`), put in order by `router.sync.streams`. The bookings of each other gateway are kept
here as that gateway means them, and offered to the `Ledger`. One whose worker is unknown there, or in
another life, waits here and is offered again when that life joins (`worker_joined`). A snapshot heals
gaps; bookings of a gateway that fell silent are dropped after `lease_s`. The same streams tell of tenants
that wait there, and what was served of them, which the `Room` takes in. A gap loses what was served in it:
so all gateways take over the lags of the one that runs longest, of those whose heartbeats have any.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from mallee.protocol.bookings import (
    Booked,
    BookingBatch,
    BookingOp,
    BookingSnapshot,
    Freed,
    Lag,
    PrefillDone,
    Queued,
)
from mallee.protocol.ids import Incarnation, RequestId, WorkerId
from mallee.router.sync.streams import StreamSync, StreamTodo


class Ledger(Protocol):
    """The loads that bookings count in. Has local ones too; these calls never touch those."""

    def book_remote(self, booking: Booked) -> bool:
        """Count a booking. False, and nothing changes, if that life of its worker is not known.

        A request that is booked already is True and changes nothing.
        """
        ...

    def prefill_done_remote(self, request: RequestId) -> bool:
        """End a booking's outstanding prefill. False if it is not booked."""
        ...

    def free_remote(self, request: RequestId) -> bool:
        """End a booking. False if there was none."""
        ...


class Room(Protocol):
    """The waiting room of this gateway, which shares workers with those of the others."""

    def queued_elsewhere(self, gateway: str, tenant: str, cost: float, *, waits: bool) -> None:
        """Take in what of a tenant's was served there, and whether more of it waits."""
        ...

    def left(self, gateway: str) -> None:
        """Nobody waits there any more."""
        ...

    def lags(self) -> tuple[Lag, ...]:
        """The lags of tenants that wait, if some wait at other gateways."""
        ...

    def adopt(self, lags: Iterable[Lag]) -> None:
        """Take over how far tenants that wait are ahead of each other."""
        ...


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """State now, and counts since birth."""

    gateways: int
    incomplete: int  # gateways with operations known to be missing
    bookings: int
    waiting: int  # bookings whose worker's life was unknown when they were last offered
    own_messages: int
    stale_messages: int  # of past lives, or older than what is known
    gaps: int
    expired_gateways: int
    refused: int  # bookings beyond max_bookings of a gateway
    strangers: int  # messages of gateways beyond max_gateways


NO_REPLICAS = ReplicaStats(
    gateways=0,
    incomplete=0,
    bookings=0,
    waiting=0,
    own_messages=0,
    stale_messages=0,
    gaps=0,
    expired_gateways=0,
    refused=0,
    strangers=0,
)

_Life = tuple[WorkerId, Incarnation]


class _Key(NamedTuple):
    gateway: str
    request: str


@dataclass(slots=True)
class _Peer:
    """One other gateway: its bookings, and the time at which they expire."""

    sync: StreamSync[BookingSnapshot, BookingOp]
    expires_at: float
    bookings: dict[str, Booked]
    has_lags: bool = False  # its heartbeats; those of pickers have none


class Replicas:
    """The other gateways, by their last messages. `clock` gives monotonic seconds."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        gateway: str,
        clock: Callable[[], float],
        lease_s: float = 3.0,
        max_gateways: int = 256,
        max_bookings: int = 65_536,
        room: Room | None = None,
        incarnation: int = 0,
    ) -> None:
        """`gateway`: our own name, `incarnation` our life. At most `max_bookings` are kept for each other."""
        if not lease_s > 0.0:
            raise ValueError(f"lease_s={lease_s}: must be above 0")
        self._ledger = ledger
        self._gateway = gateway
        self._clock = clock
        self._lease_s = lease_s
        self._max_gateways = max_gateways
        self._max_bookings = max_bookings
        self._room = room
        self._since = (incarnation, gateway)
        self._peers: dict[str, _Peer] = {}
        self._on_life: dict[_Life, set[_Key]] = {}  # every booking, by the life it is on
        self._waiting: set[_Key] = set()
        self._own = self._strangers = self._refused = self._expired = 0
        self._past_stale = self._past_gaps = 0  # of gateways that were forgotten

    def on_batch(self, batch: BookingBatch) -> bool:
        """Take in what is new in `batch`. True: ask that gateway for a snapshot."""
        peer = self._hear(batch.gateway)
        if peer is None:
            return False
        if batch.ops:
            todo = peer.sync.on_batch(batch)
        else:
            todo = peer.sync.on_mention(batch.incarnation, batch.next_seq)
            peer.has_lags = bool(batch.lags)
        needs_snapshot = self._do(batch.gateway, peer, todo, batch.incarnation)
        if batch.lags and self._room is not None and self._runs_longest(batch):
            self._room.adopt(batch.lags)
        return needs_snapshot

    def on_snapshot(self, snapshot: BookingSnapshot) -> bool:
        """Replace what is known of that gateway. True: it was too old, ask for another."""
        peer = self._hear(snapshot.gateway)
        if peer is None:
            return False
        todo = peer.sync.on_snapshot(snapshot)
        return self._do(snapshot.gateway, peer, todo, snapshot.incarnation)

    def worker_joined(self, worker: WorkerId, incarnation: Incarnation) -> int:
        """Offer this life's bookings to the ledger, which knows it now; returns how many it took."""
        taken = 0
        for key in sorted(self._on_life.get((worker, incarnation), ())):
            taken += self._offer(key, self._peers[key.gateway].bookings[key.request])
        return taken

    def expire(self) -> list[str]:
        """Forget gateways that were silent for `lease_s`, with their bookings; returns their names.

        Also if the broker is down: what they free meanwhile can't arrive, and load that is long gone
        would keep requests waiting. The first message afterwards brings a snapshot.
        """
        now = self._clock()
        silent = [name for name, peer in self._peers.items() if peer.expires_at <= now]
        for name in silent:
            peer = self._peers[name]
            self._clear(name, peer)
            self._past_stale += peer.sync.stale_messages
            self._past_gaps += peer.sync.gaps
            del self._peers[name]
        self._expired += len(silent)
        return silent

    @property
    def names(self) -> Collection[str]:
        return self._peers.keys()

    def check(self) -> None:
        """Raises AssertionError unless the indexes follow from the gateways' bookings."""
        on_life: dict[_Life, set[_Key]] = {}
        for name, peer in self._peers.items():
            peer.sync.check()
            assert name != self._gateway, "our own bookings came back"
            assert len(peer.bookings) <= self._max_bookings, f"{name}: too many bookings"
            for request, booking in peer.bookings.items():
                assert request == booking.request, f"{request} is misfiled"
                on_life.setdefault(_life(booking), set()).add(_Key(name, request))
        assert on_life == self._on_life, "bookings by life differ from those by gateway"
        assert self._waiting <= set().union(*on_life.values()), "a forgotten booking waits"
        assert len(self._peers) <= self._max_gateways, "too many gateways"

    def stats(self) -> ReplicaStats:
        syncs = [peer.sync for peer in self._peers.values()]
        return ReplicaStats(
            gateways=len(self._peers),
            incomplete=sum(not sync.is_whole for sync in syncs),
            bookings=sum(len(peer.bookings) for peer in self._peers.values()),
            waiting=len(self._waiting),
            own_messages=self._own,
            stale_messages=self._past_stale + sum(sync.stale_messages for sync in syncs),
            gaps=self._past_gaps + sum(sync.gaps for sync in syncs),
            expired_gateways=self._expired,
            refused=self._refused,
            strangers=self._strangers,
        )

    def _runs_longest(self, batch: BookingBatch) -> bool:
        lives = [
            (peer.sync.incarnation or 0, name)
            for name, peer in self._peers.items()
            if peer.has_lags
        ]
        return (batch.incarnation, batch.gateway) == min(*lives, self._since)

    def _hear(self, gateway: str) -> _Peer | None:
        if gateway == self._gateway:
            self._own += 1
            return None
        peer = self._peers.get(gateway)
        if peer is None:
            if len(self._peers) >= self._max_gateways:
                self._strangers += 1
                return None
            peer = self._peers[gateway] = _Peer(StreamSync(), self._clock() + self._lease_s, {})
        return peer

    def _do(
        self,
        name: str,
        peer: _Peer,
        todo: StreamTodo[BookingSnapshot, BookingOp],
        incarnation: int,
    ) -> bool:
        if incarnation == peer.sync.incarnation:  # echoes of a past life prove nothing
            peer.expires_at = self._clock() + self._lease_s
        if todo.clear:
            self._clear(name, peer)
        if todo.snapshot is not None:
            self._replace(name, peer, todo.snapshot)
        for op in todo.events:
            match op:
                case Booked():
                    self._book(name, peer, op)
                case PrefillDone():
                    self._prefill_done(name, peer, op.request)
                case Freed():
                    self._free(name, peer, op.request)
                case Queued() if self._room is not None:
                    self._room.queued_elsewhere(name, op.tenant, op.cost, waits=op.waits)
        return todo.needs_snapshot

    def _replace(self, name: str, peer: _Peer, snapshot: BookingSnapshot) -> None:
        if self._room is not None:
            self._room.left(name)
            for tenant in snapshot.waits:
                self._room.queued_elsewhere(name, tenant, 0, waits=True)
        new = {booking.request: booking for booking in snapshot.bookings}
        for request, old in list(peer.bookings.items()):
            said = new.get(request)
            if said is None or not _is_same(old, said):
                self._free(name, peer, request)
        for request, booking in new.items():
            if request not in peer.bookings:
                self._book(name, peer, booking)
            elif not booking.prefill_tokens:
                self._prefill_done(name, peer, request)

    def _book(self, name: str, peer: _Peer, booking: Booked) -> None:
        self._free(name, peer, booking.request)
        if len(peer.bookings) >= self._max_bookings:
            self._refused += 1
            return
        key = _Key(name, booking.request)
        peer.bookings[booking.request] = booking
        self._on_life.setdefault(_life(booking), set()).add(key)
        self._offer(key, booking)

    def _offer(self, key: _Key, booking: Booked) -> bool:
        is_taken = self._ledger.book_remote(booking)
        if is_taken:
            self._waiting.discard(key)
        else:
            self._waiting.add(key)
        return is_taken

    def _prefill_done(self, name: str, peer: _Peer, request: str) -> None:
        booking = peer.bookings.get(request)
        if booking is None or not booking.prefill_tokens:
            return
        peer.bookings[request] = msgspec.structs.replace(booking, prefill_tokens=0)
        if _Key(name, request) not in self._waiting:
            self._ledger.prefill_done_remote(RequestId(request))

    def _free(self, name: str, peer: _Peer, request: str) -> None:
        booking = peer.bookings.pop(request, None)
        if booking is None:
            return
        key, life = _Key(name, request), _life(booking)
        keys = self._on_life[life]
        keys.remove(key)
        if not keys:
            del self._on_life[life]
        if key in self._waiting:
            self._waiting.remove(key)
        else:
            self._ledger.free_remote(RequestId(request))

    def _clear(self, name: str, peer: _Peer) -> None:
        if self._room is not None:
            self._room.left(name)
        for request in list(peer.bookings):
            self._free(name, peer, request)


def _life(booking: Booked) -> _Life:
    return WorkerId(booking.worker), Incarnation(booking.incarnation)


def _is_same(old: Booked, new: Booked) -> bool:
    """Whether `old` became `new` at most by finishing its prefill."""
    return new == old or new == msgspec.structs.replace(old, prefill_tokens=0)
