"""The books of the tiers below the device: what is there, what goes down, what comes back up.

Blocks are known by chain hash, the partial last block of a capsule by a key of its own, so a block that
many texts share is stored once. What the device evicts goes to host memory, and from there, ahead of need, to
disk; what is fetched stays below too. Capsules hold their blocks: those are never evicted.
A transfer that fails is no error of a request: its books are as before, and what did not arrive is computed.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from mallee.protocol.errors import IncompatibleCapsule, MalleeError, TierFull
from mallee.protocol.events import FetchPrices, TierUse
from mallee.protocol.hashing import Hashes
from mallee.protocol.ids import Scope
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.watch import Row
from mallee.worker.transfer.disk import DiskStore
from mallee.worker.transfer.host import HostSlots
from mallee.worker.transfer.movers import Carrier, Mover
from mallee.worker.transfer.prices import MeasuredPrices
from mallee.worker.transfer.values import (
    DEVICE,
    DISK,
    HOST,
    PEER,
    TIER_NAMES,
    Adopt,
    Ask,
    Forget,
    Move,
    Moved,
    Place,
    Question,
    Record,
    Transfer,
)

MAX_FETCH_BLOCKS = 256
"""Blocks of one fetch; a longer text is fetched in several, so that waiters follow."""
_TRY_AGAIN = 64
"""Of fetches that are dearer than computing, one in so many is done: the tier may be faster by now."""
_SPILL_BLOCKS = 32
_MAX_SPILLS = 2  # under way at once


class Part(NamedTuple):
    """Blocks of one tier, by key, or of a loan: which ones they are of all that is wanted."""

    source: Place
    at: Sequence[int]


class _UnderWay(NamedTuple):
    """A move with the blocks that it brings down, but for a fetch; no event names the `private` ones."""

    move: Move
    end: Callable[[Moved], None]
    keys: Sequence[int] = ()
    private: Collection[int] = ()


class LowerTiers:
    """Owner of the books of host memory and disk. One thread; the mover copies beside it.

    `take_ended` takes in what has moved, and calls the `end` of each move.
    """

    def __init__(
        self,
        journal: Journal,
        carrier: Carrier,
        *,
        prices: MeasuredPrices,
        mover: Mover | None = None,
        always_fetches: bool = False,
        report: Callable[[MalleeError], None] = lambda error: None,
        report_unreadable: Callable[[Sequence[MalleeError]], None] = lambda errors: None,
        is_ours: Callable[[str, Scope], bool] = lambda capsule, owner: True,
    ) -> None:
        """`always_fetches`: whatever computing would cost. `report` gets what moves failed of.

        `report_unreadable` gets the reason for each capsule on disk that is not taken in, all of a start
        together. `is_ours`: whether the app's secret tagged a capsule's id for its owner; without it nobody
        could name the capsule.
        """
        self.prices = prices
        self.under_way: dict[int, _UnderWay] = {}
        """Moves that have not been taken in, by number; to be read only."""
        self.has_host = len(carrier.arena) > 0
        self.is_empty = not self.has_host and carrier.disk is None
        """Whether nothing can lie below the device here."""
        self.gives_way = False
        self._report = report
        self._report_unreadable = report_unreadable
        self._is_ours = is_ours
        self._unreadable: list[MalleeError] = []  # not reported yet
        self._adopted: list[DiskStore] = []  # whose capsules are under way
        self._journal = journal
        self._carrier = carrier
        self._mover = mover or Mover(carrier)
        self.evicts_beside = self.has_host and self._mover.is_beside
        """Whether what the device evicts takes its time beside the steps."""
        self._always_fetches = always_fetches
        self._host = HostSlots(len(carrier.arena))
        self._published: set[int] = set()  # of its blocks those that an event named
        disk = carrier.disk
        self._disk = dict.fromkeys(() if disk is None else disk.keys(), True)  # whether published
        self._num_spills = 0
        # Fetches that would have been dearer than computing.
        self._num_dear = {HOST: 0, DISK: 0, PEER: 0}
        self._next_number = 0
        self._counts = Counter[str]()  # those of `TierUse` that only grow
        self._fetched_peer_s = 0.0
        self._lost: list[str] = []

    def announce(self, private: Iterable[int]) -> None:
        """Publish the blocks that were on disk from the start, but for those that no event names."""
        self._disk.update((key, False) for key in private if key in self._disk)
        self._publish(self.keys(DISK), DISK)
        self._report_refused()

    def _report_refused(self) -> None:
        if self._unreadable:
            self._report_unreadable(self._unreadable)
            self._unreadable = []

    # What goes down

    def offload(
        self,
        keys: Sequence[int],
        blocks: Sequence[int],
        end: Callable[[], None],
        *,
        are_private: bool = False,
    ) -> None:
        """The device gives up `blocks`, the first of a text first: have them copied to host memory.

        `end` is called when their bytes are needed no longer: now, or from `take_ended`. Those that are below
        already are only used. Without room they are gone. `are_private`: they are no full blocks.
        """
        host = self._host
        if not self.has_host:
            end()
            return
        here = [key for key in keys if host.is_coming(key)]
        host.hold(here)  # the new ones must not take their room
        new = [i for i, key in enumerate(keys) if not host.is_coming(key)]
        self._counts["num_dropped"] += max(0, len(new) - host.num_room)
        # Of a text as many as have room from its beginning on, which counts most, the last one first.
        new = new[: host.num_room][::-1]
        copied = tuple(keys[i] for i in new)

        def ended(moved: Moved | None) -> None:
            if moved is not None and moved.error is None:
                self._counts["num_offloaded"] += len(copied)
            end()
            host.release(here)
            used = {*here, *copied}
            host.use([key for key in reversed(keys) if key in used])
            self._spill()

        if not new:
            ended(None)
            return
        self._start(
            Place(DEVICE, tuple(blocks[i] for i in new)),
            Place(HOST, copied),
            ended,
            private=copied if are_private else (),
            is_eviction=True,
        )

    def park(
        self,
        keys: Sequence[int],
        blocks: Sequence[int],
        end: Callable[[Moved], None],
        *,
        num_private: int,
    ) -> None:
        """Copy what is not in host memory of `keys` there, and hold all of them.

        `num_private`: the number of the last ones that no event names. `end` is called when all are there,
        or with the error for which none of them is held. Raises TierFull, with nothing changed.
        """
        host = self._host
        here = host.known(keys)
        host.hold(here)  # the new ones must not take their room
        num_missing, room = len(keys) - len(here), host.num_room
        if num_missing > room:
            host.release(here)
            raise TierFull("host", num_missing, room, host.num_slots)
        there, whole = set(here), set(host.whole(keys))
        missing = [key for key in keys if key not in there]
        new = [i for i, key in enumerate(keys) if key not in whole]
        self._counts["num_parked"] += num_missing

        def ended(moved: Moved) -> None:
            if moved.error is not None:
                host.release(keys)
            end(moved)

        self._start(
            Place(DEVICE, tuple([blocks[i] for i in new])),
            Place(HOST, tuple([keys[i] for i in new])),
            ended,
            private=keys[len(keys) - num_private :],
        )
        host.hold(missing)

    def commit(
        self,
        name: str,
        payload: bytes,
        keys: Sequence[int],
        blocks: Sequence[int] | None,
        end: Callable[[Moved], None],
        *,
        num_private: int,
        owner: str = "",
        is_kept: bool = True,
    ) -> None:
        """Make the capsule `name` durable: its blocks, then its record. `end` is called after that.

        `blocks`: those on the device, if it has them, all of which are offered: the disk may give up cached
        ones until it comes to them. Else all lie in host memory or on disk already.
        """
        here = tuple(keys)
        source = Place(DEVICE, tuple(blocks or ()))
        if blocks is None:
            here = tuple(key for key in keys if key not in self._disk)
            source = Place(HOST, here)
        record = Record(name, payload, tuple(keys), owner, is_kept)
        private = keys[len(keys) - num_private :]
        self._start(source, Place(DISK, here), end, record=record, private=private)

    def _spill(self) -> None:
        """Write to disk, ahead of need, what gives way next in host memory."""
        host = self._host
        if self._carrier.disk is None or self._num_spills >= _MAX_SPILLS:
            return
        if host.num_free >= host.num_slots // 8:
            return
        oldest = [key for key in host.oldest(2 * _SPILL_BLOCKS) if key not in self._disk]
        keys = tuple(oldest[:_SPILL_BLOCKS])
        if len(keys) < min(_SPILL_BLOCKS, host.num_slots // 8):
            return
        host.hold(keys)
        self._num_spills += 1

        def ended(moved: Moved) -> None:
            self._num_spills -= 1
            host.release(keys, are_oldest=True)

        private = [key for key in keys if key not in self._published]
        self._start(Place(HOST, keys), Place(DISK, keys), ended, private=private)

    def forget(self, name: str, end: Callable[[Moved], None] = lambda moved: None) -> None:
        """Drop the record of capsule `name` from disk, also one that is on its way; then call `end`."""
        self._begin(Forget(self._next_number, name), end)

    def adopt(
        self,
        other: DiskStore,
        took: Callable[[bytes], Iterable[int]],
        end: Callable[[Sequence[MalleeError]], None],
    ) -> None:
        """Move the capsules of `other` to the disk, one at a time, and close it then.

        `took` gets the record of each, and returns those of its keys that no event names; `end` the reasons
        for those that stay.
        """
        self._adopted.append(other)
        left = list(other.unreadable())
        names = iter(other.capsules())

        def go_on() -> None:
            if (name := next(names, None)) is not None:
                self._begin(Adopt(self._next_number, other, name), ended)
                return
            if not left:
                try:
                    other.clear()
                except MalleeError as error:
                    left.append(error)
            self._adopted.remove(other)
            other.close()
            self._report_refused()
            end(left)

        def ended(moved: Moved) -> None:
            if moved.error is not None:
                left.append(moved.error)
            elif (record := moved.record) is not None:
                self._on_disk(record.keys, frozenset(took(record.payload)))
            go_on()

        go_on()

    def is_recording(self, name: str) -> bool:
        """Whether a record of capsule `name` is on its way to disk, or out of it."""
        for move, *_ in self.under_way.values():
            match move:
                case Forget(name=other) | Transfer(record=Record(name=other)):
                    if other == name:
                        return True
        return False

    def hold(self, keys: Sequence[int]) -> bool:
        """Hold `keys` in host memory, if all are there."""
        if self.num_leading(keys) < len(keys):
            return False
        self._host.hold(keys)
        return True

    def release(self, keys: Sequence[int]) -> None:
        """Let go of keys that `park` or `hold` held in host memory."""
        self._host.release(keys)

    # What comes back

    def find(self, keys: Hashes | Sequence[int], begin: int) -> Part | None:
        """The next run of one tier of `keys` from the one at `begin` on; None if that is on none."""
        tier = self.tier(int(keys[begin])) if begin < len(keys) else None
        if tier is None:
            return None
        found = [int(key) for key in keys[begin : begin + MAX_FETCH_BLOCKS]]
        num = next((i for i, key in enumerate(found) if self.tier(key) != tier), len(found))
        return Part(Place(tier, tuple(found[:num])), range(num))

    def parts(self, keys: Sequence[int]) -> list[Part]:
        """Those of `keys` that are here, by the tier that each lies in."""
        tiers = [self.tier(key) for key in keys]
        places = {tier: [i for i, own in enumerate(tiers) if own == tier] for tier in (HOST, DISK)}
        return [
            Part(Place(tier, tuple(keys[i] for i in at)), at) for tier, at in places.items() if at
        ]

    def is_cheaper(self, parts: Sequence[Part], num_tokens: int) -> bool:
        """Whether to fetch all of `parts`, which have `num_tokens`, instead of computing them."""
        if self._always_fetches:
            return True
        compute_s = self.prices.compute_s(num_tokens)
        fetch_s = 0.0
        for (tier, ids, *_), _ in parts:
            fetch_s += self.prices.fetch_s(tier, self._num_under_way(tier) + len(ids))
        if not compute_s or fetch_s <= compute_s:
            return True
        slowest = parts[-1].source.tier
        self._num_dear[slowest] += 1
        if self._num_dear[slowest] % _TRY_AGAIN == 0:
            return True
        self._counts["num_declined"] += sum(len(part.source.ids) for part in parts)
        return False

    def fetch_prices(self, state_rows: int = 0) -> FetchPrices:
        """The prices of fetches that begin now, and of computing; with each text come `state_rows`."""
        prices = self.prices
        seconds = [prices.compute_s(1)]
        for tier in (HOST, DISK, PEER):
            num, none_s = self._num_under_way(tier), prices.fetch_s(tier, 0)
            seconds += [prices.fetch_s(tier, num + state_rows), prices.fetch_s(tier, 1) - none_s]
        return FetchPrices(*seconds)

    def fetch(
        self,
        parts: Sequence[Part],
        room: Callable[[], Sequence[int] | None],
        end: Callable[[int], None],
    ) -> bool:
        """Bring `parts` to the device blocks that `room` makes; whether it made any.

        It may be made at their expense: they stay where they are meanwhile. `end` gets the number of
        leading blocks that have come.
        """
        claimed = [key for part in parts if part.source.tier == HOST for key in part.source.ids]
        self._host.hold(claimed)
        try:
            if (blocks := room()) is None:
                return False
            num_left, num_come = len(parts), len(blocks)

            def ended(part: Part, moved: Moved) -> None:
                nonlocal num_left, num_come
                num_left -= 1
                if moved.num_blocks < len(part.at):
                    num_come = min(num_come, part.at[moved.num_blocks])
                self._fetched(part.source.tier, moved)
                if not num_left:
                    end(num_come)

            for part in parts:
                target = Place(DEVICE, tuple(blocks[i] for i in part.at))
                self._start(part.source, target, partial(ended, part))
            return True
        finally:
            self._host.release(claimed)

    def _fetched(self, tier: int, moved: Moved) -> None:
        self._counts[f"num_fetched_{TIER_NAMES[tier]}"] += moved.num_blocks
        if tier == PEER:
            self._fetched_peer_s += moved.seconds
        if moved.error is None:
            self.prices.moved(tier, moved.num_blocks, moved.seconds)

    def ask(self, ask: Ask, end: Callable[[Moved], None]) -> None:
        """Ask a peer for a loan, which is in the outcome, for its receiver to close."""
        self._begin(Question(self._next_number, ask), end)

    # Moves

    def _start(
        self,
        source: Place,
        target: Place,
        end: Callable[[Moved], None],
        *,
        record: Record | None = None,
        private: Collection[int] = (),
        is_eviction: bool = False,
    ) -> None:
        """Begin a transfer, of keys in host memory, which holds them until the end.

        If it ends well they are known at the target: then an event names them, but for those `private`.
        """
        host, keys = self._host, (source if target.tier == DEVICE else target).ids
        if target.tier == HOST:
            for gone in host.expect(keys):
                if gone in self._published:
                    self._published.remove(gone)
                    self._journal.removed(gone, tier=HOST)
            target = Place(HOST, host.slots(keys))
        elif source.tier == HOST:
            host.hold(keys)
            source = Place(HOST, host.slots(keys))
        after = self._carrier.memory.mark()
        move = Transfer(self._next_number, source, target, record, after, is_eviction)
        self._begin(move, end, keys, frozenset(private))

    def _begin(
        self,
        move: Move,
        end: Callable[[Moved], None],
        keys: Sequence[int] = (),
        private: Collection[int] = (),
    ) -> None:
        self._next_number += 1
        self.under_way[move.number] = _UnderWay(move, end, keys, private)
        if (moved := self._mover.start(move)) is not None:
            self._end(moved)

    def take_ended(self) -> None:
        """Take in the moves that have ended."""
        for moved in self._mover.done():
            self._end(moved)

    def _end(self, moved: Moved) -> None:
        """The books after a move: as before it, if it failed."""
        move, end, keys, private = self.under_way.pop(moved.move.number)
        if moved.error is not None:
            self.failed(moved.error)
        self._lost += moved.lost
        if isinstance(move, Transfer):
            self._end_transfer(move, keys, private, is_whole=moved.error is None)
        end(moved)
        for key in moved.evicted:  # after it: what the move wrote may be among them
            if self._disk.pop(key, False):
                self._journal.removed(key, tier=DISK)

    def _end_transfer(
        self, move: Transfer, keys: Sequence[int], private: Collection[int], *, is_whole: bool
    ) -> None:
        host = self._host
        if move.target.tier == HOST:
            if is_whole:
                new = [key for key in host.came(keys) if key not in private]
                self._published.update(new)
                self._publish(new, HOST)
            else:
                host.failed(keys)
        if HOST in (move.source.tier, move.target.tier):
            host.release(keys)
        if move.target.tier == DISK and is_whole:
            self._on_disk(keys, private)

    def _on_disk(self, keys: Iterable[int], private: Collection[int]) -> None:
        new = {key: key not in private for key in keys if key not in self._disk}
        self._counts["num_spilled"] += len(new)
        self._disk.update(new)
        self._publish([key for key, is_public in new.items() if is_public], DISK)

    def _publish(self, stored: list[int], tier: int) -> None:
        if stored:
            self._journal.stored(stored, tier=tier)

    def failed(self, error: MalleeError) -> None:
        """A move, or what it brought, was of no use."""
        self._counts["num_failed"] += 1
        self._report(error)

    def take_lost(self) -> list[str]:
        """Capsules whose records the disk gave up or found damaged, since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def give_way(self, is_decoding: bool) -> None:
        """Bound the bandwidth of moves while answers are drawn, and only then."""
        self.gives_way = self._carrier.gives_way = is_decoding

    def notify(self, call: Callable[[], None]) -> None:
        """Have `call` made, from any thread, whenever `has_ended` may have become true."""
        self._mover.notify(call)

    @property
    def has_ended(self) -> bool:
        """Whether `take_ended` has something to take in."""
        return self._mover.has_done

    def close(self) -> None:
        """The loans that were taken are ended before: so pulls end."""
        self._mover.close()
        for disk in (self._carrier.disk, *self._adopted):
            if disk is not None:
                disk.close()

    # Reading

    def tier(self, key: int) -> int | None:
        """The highest tier in which the block lies, or will when its copy has come."""
        if self._host.is_coming(key):
            return HOST
        return DISK if key in self._disk else None

    def tier_of(self, keys: Iterable[int]) -> int | None:
        """The tier where the last of `keys` lie, as far as is known; None if some are gone."""
        tiers = [self.tier(key) for key in keys]
        return None if None in tiers else max(each for each in tiers if each is not None)

    def missing(self, keys: Iterable[int]) -> list[int]:
        """Those of `keys` that are in no tier, as far as is known."""
        return [key for key in keys if not self._host.is_whole(key) and key not in self._disk]

    def num_leading(self, keys: Sequence[int]) -> int:
        """The number of leading blocks of `keys` in host memory."""
        is_whole = self._host.is_whole
        return next((i for i, key in enumerate(keys) if not is_whole(key)), len(keys))

    def rows(self, keys: Sequence[int]) -> list[Row]:
        """The bytes of `keys`, which are held in host memory."""
        return [self._carrier.arena[slot] for slot in self._host.slots(keys)]

    def has(self, tier: int) -> bool:
        """Whether there is such a tier."""
        return self.has_host if tier == HOST else tier == DISK and self._carrier.disk is not None

    def records(self) -> Iterator[bytes]:
        """The capsules that are durable, of this worker's earlier lives; the others are `refuse`d.

        One at a time: they may have more bytes than memory.
        """
        disk = self._carrier.disk
        if disk is None:
            return
        for error in disk.unreadable():
            self.refuse(error)
        for name in disk.capsules():
            try:
                record = disk.load(name)
            except MalleeError as error:
                self.refuse(error)
                continue
            if record is None:
                continue
            if self._is_ours(name, Scope(record.owner)):
                yield record.payload
            else:
                ours = "that of links.secret_file, or beside the disk"
                self.refuse(IncompatibleCapsule(name, [("secret", "another one", ours)]))

    def refuse(self, error: MalleeError) -> None:
        """Count a capsule that is on disk and can't be taken in; all of a start are reported together."""
        self._counts["num_unreadable"] += 1
        self._unreadable.append(error)

    def keys(self, tier: int) -> list[int]:
        """Every full block that lies in `tier`."""
        if tier == DISK:
            return [key for key, is_public in self._disk.items() if is_public]
        return [key for key in self._host if key in self._published]

    def stats(self) -> TierUse:
        disk = self._carrier.disk
        return TierUse(
            host_blocks=len(self._host),
            host_room=self._host.num_room,
            host_held=self._host.num_held,
            disk_blocks=len(self._disk),
            block_nbytes=self._carrier.memory.block_nbytes,
            disk_limit_nbytes=0 if disk is None else disk.budget_nbytes,
            fetched_peer_s=self._fetched_peer_s,
            **self._counts,
        )

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        self._host.check()
        assert all(map(self._host.is_whole, self._published)), "published, and not there"

    def _num_under_way(self, tier: int) -> int:
        """Blocks on their way to or from `tier`, whose moves are done in order."""
        return sum(
            each.move.num_blocks for each in self.under_way.values() if each.move.tier == tier
        )
