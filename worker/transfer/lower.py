"""The books of the tiers below the device: what is there, what goes down, what comes back up.

Blocks are known by chain hash, the partial last block of a capsule by a key of its own, so a block that
many texts share is stored once. What the device evicts goes to host memory, and from there, ahead of need, to
disk; what is fetched stays below too. Capsules hold their blocks: those are never evicted.
A transfer that fails is no error of a request: its books are as before, and what did not arrive is computed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from mallee.protocol.errors import IncompatibleCapsule, MalleeError, TierFull
from mallee.protocol.events import FetchPrices
from mallee.protocol.hashing import Hashes
from mallee.protocol.ids import Scope
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.watch import Row
from mallee.worker.transfer.carrier import Carrier
from mallee.worker.transfer.disk import DiskStore
from mallee.worker.transfer.host import HostSlots
from mallee.worker.transfer.movers import InlineMover, Mover
from mallee.worker.transfer.peers import Ask, Loan
from mallee.worker.transfer.prices import Prices
from mallee.worker.transfer.values import (
    DISK,
    HOST,
    PEER,
    Adopt,
    Device,
    Disk,
    Forget,
    Host,
    Move,
    Moved,
    Peer,
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


class Found(NamedTuple):
    """The next `num_blocks` of a text lie in `tier`."""

    tier: int
    num_blocks: int


class Part(NamedTuple):
    """Blocks of one tier, `keys`, that are to come to device `blocks`; of a `loan` they are places in it."""

    found: Found
    keys: tuple[int, ...]
    blocks: tuple[int, ...]
    loan: Loan | None = None
    is_foreign: bool = False  # as in `Peer`


class TierStats(NamedTuple):
    """Blocks that lie in each tier, and counts since the start. A row of a window block counts as a block."""

    host_blocks: int
    host_room: int  # slots that could be had
    host_held: int
    disk_blocks: int
    num_offloaded: int  # blocks written to host memory as the device evicted them
    num_dropped: int  # that found no room there
    num_parked: int  # blocks copied down for capsules
    num_spilled: int  # blocks written to disk
    num_fetched_host: int
    num_fetched_disk: int
    num_declined: int  # blocks that were there, and cheaper to compute
    num_failed: int  # moves that ended by an error
    block_nbytes: int
    num_fetched_peer: int = 0
    fetched_peer_s: float = 0.0  # that pulls from peers took
    disk_limit_nbytes: int = 0  # 0: there is no disk
    num_unreadable: int = 0  # capsules that were found on disk and could not be taken in


@dataclass(slots=True)
class _Counts:
    """Those of `TierStats` that only grow."""

    num_offloaded: int = 0
    num_dropped: int = 0
    num_parked: int = 0
    num_spilled: int = 0
    num_fetched_host: int = 0
    num_fetched_disk: int = 0
    num_declined: int = 0
    num_failed: int = 0
    num_fetched_peer: int = 0
    fetched_peer_s: float = 0.0
    num_unreadable: int = 0


class LowerTiers:
    """Owner of the books of host memory and disk. One thread; the mover copies beside it.

    `settle` takes in what has moved, and calls the `end` of each move.
    """

    def __init__(
        self,
        journal: Journal,
        carrier: Carrier,
        *,
        prices: Prices,
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
        self._report = report
        self._report_unreadable = report_unreadable
        self._is_ours = is_ours
        self._unreadable: list[MalleeError] = []  # not reported yet
        self._adopted: list[DiskStore] = []  # whose capsules are under way
        self.prices = prices
        self._journal = journal
        self._carrier = carrier
        self._mover = mover or InlineMover(carrier)
        self._always_fetches = always_fetches
        self._host = HostSlots(len(carrier.arena))
        self._disk = dict.fromkeys(carrier.disk.keys() if carrier.disk is not None else ())
        # Partial blocks and rows of windows: no event is told of them.
        self._untold: set[int] = set()
        self._num_spills = 0
        # Fetches that would have been dearer than computing.
        self._num_dear = {HOST: 0, DISK: 0, PEER: 0}
        self._next_number = 0
        self._ends: dict[int, tuple[Move, Callable[[Moved], None]]] = {}  # under way
        self._moved: list[Moved] = []  # since the last `settle`, but for evictions
        self._counts = _Counts()
        self._lost: list[str] = []

    def announce(self, untold: Iterable[int]) -> None:
        """Tell of the blocks that were on disk from the start, but for those of which no event is told."""
        self._untold.update(key for key in untold if key in self._disk)
        self._tell((), self._disk, DISK)
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
        are_untold: bool = False,
    ) -> None:
        """The device gives up `blocks`, the first of a text first: have them copied to host memory.

        `end` is called when their bytes are needed no longer: now, or from `settle`. Those that are below
        already are only used. Without room they are gone. `are_untold`: they are no full blocks.
        """
        host = self._host
        if not host.num_slots:
            end()
            return
        here = [key for key in keys if host.is_coming(key)]
        host.hold(here)  # the new ones must not take their room
        new = [i for i, key in enumerate(keys) if not host.is_coming(key)]
        self._counts.num_dropped += max(0, len(new) - host.num_room)
        # Of a text as many as have room from its beginning on, which counts most, the last one first.
        new = new[: host.num_room][::-1]
        copied = [keys[i] for i in new]
        if are_untold:
            self._untold.update((*here, *copied))
        used = {*here, *copied}

        def ended(moved: Moved | None) -> None:
            if moved is not None and moved.error is None:
                self._counts.num_offloaded += len(copied)
            end()
            self.release([key for key in reversed(keys) if key in used])
            self._spill_oldest()

        if not new:
            ended(None)
            return
        number = self._copy_down(copied, [blocks[i] for i in new], ended, is_eviction=True)
        for moved in self._mover.done():  # inline it has ended: room for the next is there at once
            if moved.move.number == number:
                self._end(moved)
            else:
                self._moved.append(moved)

    def park(
        self,
        keys: Sequence[int],
        blocks: Sequence[int],
        end: Callable[[Moved], None],
        *,
        num_untold: int,
    ) -> None:
        """Copy what is not in host memory of `keys` there, and hold all of them.

        `num_untold`: so many of them, the last ones, are no full blocks. `end` is called when all are there,
        or with the error for which none of them is held. Raises TierFull, with nothing changed.
        """
        host = self._host
        here = [key for key in keys if key in host]
        host.hold(here)  # the new ones must not take their room
        num_missing, room = len(keys) - len(here), host.num_room
        if num_missing > room:
            self.release(here)
            raise TierFull("host", num_missing, room, host.num_slots)
        new = [i for i, key in enumerate(keys) if not host.is_whole(key)]
        coming = [key for key in here if not host.is_whole(key)]
        self._untold.update(keys[len(keys) - num_untold :])
        self._counts.num_parked += num_missing

        def ended(moved: Moved) -> None:
            if moved.error is not None:
                self.release(keys)
            end(moved)

        self._copy_down([keys[i] for i in new], [blocks[i] for i in new], ended)
        host.release(coming)  # this copy holds them too

    def _copy_down(
        self,
        keys: Sequence[int],
        blocks: Sequence[int],
        end: Callable[[Moved], None],
        *,
        is_eviction: bool = False,
    ) -> int:
        """Begin a copy of `blocks` to host memory, where `keys` are held from now on; the move's number."""
        removed: list[int] = []
        for key in keys:
            gone = self._host.expect(key)
            if gone is not None:
                if gone not in self._untold:
                    removed.append(gone)
                self._forget_untold(gone)
        self._tell(removed, ())

        def ended(moved: Moved) -> None:
            if moved.error is None:
                self._tell((), self._host.came(keys))
            else:
                self._host.failed(keys)
            end(moved)

        slots = tuple(map(self._host.slot, keys))
        return self._start(Device(tuple(blocks)), Host(slots), ended, is_eviction=is_eviction)

    def has(self, tier: int) -> bool:
        """Whether there is such a tier."""
        return self.has_host if tier == HOST else tier == DISK and self._carrier.disk is not None

    @property
    def evicts_beside(self) -> bool:
        """Whether what the device evicts takes its time beside the steps."""
        return self.has_host and self._mover.is_beside

    @property
    def has_host(self) -> bool:
        """Whether there is host memory."""
        return self._host.num_slots > 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing can lie below the device here."""
        return not self._host.num_slots and self._carrier.disk is None

    def tier_of(self, keys: Iterable[int]) -> int | None:
        """The tier where the last of `keys` lie, as far as is known; None if some are gone."""
        tiers = [self._tier(key) for key in keys]
        return None if None in tiers else max(each for each in tiers if each is not None)

    def missing(self, keys: Iterable[int]) -> list[int]:
        """Those of `keys` that are in no tier, as far as is known."""
        return [key for key in keys if not self._host.is_whole(key) and key not in self._disk]

    def commit(
        self,
        name: str,
        payload: bytes,
        keys: Sequence[int],
        blocks: Sequence[int] | None,
        end: Callable[[Moved], None],
        *,
        num_untold: int,
        owner: str = "",
        is_kept: bool = True,
    ) -> None:
        """Make the capsule `name` durable: its blocks, then its record. `end` is called after that.

        `blocks`: those on the device, if it has them, all of which are offered: the disk may give up cached
        ones until it comes to them. Else all lie in host memory or on disk already.
        """
        untold = keys[len(keys) - num_untold :]
        self._untold.update(untold)
        here: Sequence[int] = keys
        if blocks is None:
            here = [key for key in keys if key not in self._disk]
            self._host.hold(here)
        slots = () if blocks is not None else tuple(map(self._host.slot, here))
        source = Device(tuple(blocks)) if blocks is not None else Host(slots)
        record = Record(name, payload, tuple(keys), owner, is_kept)

        def ended(moved: Moved) -> None:
            if blocks is None:
                self.release(here)
            if moved.error is None:
                self._on_disk(here)
            for key in untold:
                self._forget_untold(key)
            end(moved)

        self._start(source, Disk(tuple(here), record), ended)

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

        `took` gets the record of each, and returns those of its keys of which no event is told; `end` the
        reasons for those that stay.
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
                self._untold.update(took(record.payload))
                self._on_disk(record.keys)
            go_on()

        go_on()

    def is_recording(self, name: str) -> bool:
        """Whether a record of capsule `name` is on its way to disk, or out of it."""
        for move, _ in self._ends.values():
            match move:
                case Forget(name=other) | Transfer(target=Disk(record=Record(name=other))):
                    if other == name:
                        return True
        return False

    def hold(self, keys: Sequence[int]) -> bool:
        """Hold `keys` in host memory, if all are there."""
        if not all(map(self._host.is_whole, keys)):
            return False
        self._host.hold(keys)
        return True

    def release(self, keys: Sequence[int]) -> None:
        """Let go of keys that `park`, `hold` or `lend` held in host memory."""
        for key in self._host.release(keys):
            self._forget_untold(key)

    # What comes back

    def find(self, keys: Hashes | Sequence[int], begin: int) -> Found | None:
        """The next run of one tier of `keys` from the one at `begin` on; None if that is on none."""
        end = min(len(keys), begin + MAX_FETCH_BLOCKS)
        if begin >= end:
            return None
        tier = self._tier(int(keys[begin]))
        if tier is None:
            return None
        num = 1
        while begin + num < end and self._tier(int(keys[begin + num])) == tier:
            num += 1
        return Found(tier, num)

    def find_resumable(
        self,
        keys: Hashes | Sequence[int],
        begin: int,
        num_held: int,
        read_after: Callable[[int], Iterable[int]],
    ) -> int:
        """The most of `keys`, from the one at `begin` on, in any tiers, after which a text can go on.

        The first `num_held` are on the device. `read_after`: the keys of all else that must be here for
        that, after so many.
        """
        end = max(begin, num_held)
        while end < len(keys) and self._tier(int(keys[end])) is not None:
            end += 1
        while end > begin and any(self._tier(key) is None for key in read_after(end)):
            end -= 1
        return end - begin

    def parts(self, keys: Sequence[int], blocks: Sequence[int]) -> list[Part]:
        """Those of `keys` that are here, by the tier that each lies in."""
        tiers = [self._tier(key) for key in keys]
        parts = []
        for tier in (HOST, DISK):
            own = [i for i, each in enumerate(tiers) if each == tier]
            if own:
                found = Found(tier, len(own))
                there = tuple(keys[i] for i in own)
                parts.append(Part(found, there, tuple(blocks[i] for i in own)))
        return parts

    def is_cheaper(self, found: Sequence[Found], num_tokens: int) -> bool:
        """Whether to fetch all of `found`, which has `num_tokens`, instead of computing them."""
        if self._always_fetches:
            return True
        compute_s = self.prices.compute_s(num_tokens)
        fetch_s = 0.0
        for tier, num_blocks in found:
            fetch_s += self.prices.fetch_s(tier, self._num_under_way(tier) + num_blocks)
        if not compute_s or fetch_s <= compute_s:
            return True
        slowest = found[-1].tier
        self._num_dear[slowest] += 1
        if self._num_dear[slowest] % _TRY_AGAIN == 0:
            return True
        self._counts.num_declined += sum(each.num_blocks for each in found)
        return False

    def fetch_prices(self) -> FetchPrices:
        """The prices of fetches that begin now, and of computing."""
        prices = self.prices
        seconds = [prices.compute_s(1)]
        for tier in (HOST, DISK, PEER):
            num, none_s = self._num_under_way(tier), prices.fetch_s(tier, 0)
            seconds += [prices.fetch_s(tier, num), prices.fetch_s(tier, 1) - none_s]
        return FetchPrices(*seconds)

    def claim(self, found: Found, keys: Sequence[int]) -> None:
        """`found`, which is `keys`, stays where it is until it is fetched, or not wanted (`unclaim`)."""
        if found.tier == HOST:
            self._host.use(reversed(keys))
            self._host.hold(keys)

    def unclaim(self, found: Found, keys: Sequence[int]) -> None:
        """Nothing is wanted of `found`."""
        if found.tier == HOST:
            self.release(keys)

    def fetch(self, part: Part, end: Callable[[Moved], None]) -> None:
        """Bring `part`, which is claimed, to its device blocks; `end` is told how many arrived."""
        found, keys, blocks, loan, is_foreign = part

        def ended(moved: Moved) -> None:
            counts, num = self._counts, moved.num_blocks
            self.unclaim(found, keys)
            if found.tier == HOST:
                counts.num_fetched_host += num
            elif found.tier == DISK:
                counts.num_fetched_disk += num
            else:
                counts.num_fetched_peer += num
                counts.fetched_peer_s += moved.seconds
            if moved.error is None:
                self.prices.moved(found.tier, num, moved.seconds)
            end(moved)

        source: Host | Disk | Peer = Disk(keys)
        if loan is not None:
            source = Peer(keys, loan, is_foreign)
        elif found.tier == HOST:
            source = Host(tuple(map(self._host.slot, keys)))
        self._start(source, Device(blocks), ended)

    def fetch_all(self, parts: Sequence[Part], end: Callable[[bool], None]) -> None:
        """Bring all of `parts`, which are claimed; `end` is told whether all of them arrived."""
        num_left, is_whole = len(parts), True

        def ended(moved: Moved) -> None:
            nonlocal num_left, is_whole
            num_left -= 1
            is_whole = is_whole and moved.num_blocks == moved.move.num_blocks
            if not num_left:
                end(is_whole)

        for part in parts:
            self.fetch(part, ended)

    def ask(self, ask: Ask, end: Callable[[Moved], None]) -> None:
        """Ask a peer for a loan, which is in the outcome, until `end_loan`."""
        self._begin(Question(self._next_number, ask), end)

    def end_loan(self, loan: Loan) -> None:
        """Nothing more is read of `loan`."""
        self._carrier.end_loan(loan)

    # What others read

    def lend(self, keys: Sequence[int]) -> list[Row] | None:
        """The bytes of `keys` in host memory, held there until `release`; None unless all have arrived."""
        if self.num_leading(keys) < len(keys):
            return None
        self._host.hold(keys)
        return [self._carrier.arena[self._host.slot(key)] for key in keys]

    def num_leading(self, keys: Sequence[int]) -> int:
        """The number of leading blocks of `keys` in host memory."""
        num = 0
        while num < len(keys) and self._host.is_whole(keys[num]):
            num += 1
        return num

    # Moves

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step of prompts alone computed so many tokens."""
        self.prices.computed(num_tokens, seconds)

    def give_way(self, is_decoding: bool) -> None:
        """Bound the bandwidth of moves while answers are drawn, and only then."""
        self._carrier.gives_way = is_decoding

    def settle(self) -> None:
        """Take in the moves that have ended."""
        moved, self._moved = self._moved, []
        for each in (*moved, *self._mover.done()):
            self._end(each)

    def _end(self, moved: Moved) -> None:
        _, end = self._ends.pop(moved.move.number)
        if moved.error is not None:
            self.failed(moved.error)
        self._lost += moved.lost
        end(moved)
        self._off_disk(moved.evicted)  # after it: what the move wrote may be among them

    def failed(self, error: MalleeError) -> None:
        """A move, or what it brought, was of no use."""
        self._counts.num_failed += 1
        self._report(error)

    def take_lost(self) -> list[str]:
        """Capsules whose records the disk gave up or found damaged, since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def notify(self, call: Callable[[], None]) -> None:
        """Have `call` made, from any thread, whenever there may be news."""
        self._mover.notify(call)

    @property
    def has_news(self) -> bool:
        """Whether `settle` has something to take in."""
        return bool(self._moved) or self._mover.has_done

    @property
    def num_moving(self) -> int:
        """Moves under way."""
        return len(self._ends)

    def close(self) -> None:
        self._carrier.close()  # so that pulls end
        self._mover.close()
        self._carrier.close()
        for disk in (self._carrier.disk, *self._adopted):
            if disk is not None:
                disk.close()

    # Reading

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
        self._counts.num_unreadable += 1
        self._unreadable.append(error)

    def keys(self, tier: int) -> list[int]:
        """Every full block that lies in `tier`."""
        if tier == DISK:
            return [key for key in self._disk if key not in self._untold]
        return [k for k in self._host if k not in self._untold and self._host.is_whole(k)]

    def stats(self) -> TierStats:
        disk = self._carrier.disk
        return TierStats(
            host_blocks=len(self._host),
            host_room=self._host.num_room,
            host_held=self._host.num_held,
            disk_blocks=len(self._disk),
            block_nbytes=self._carrier.memory.block_nbytes,
            disk_limit_nbytes=0 if disk is None else disk.budget_nbytes,
            **asdict(self._counts),
        )

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        self._host.check()
        lying = {*self._host, *self._disk}
        for move, _ in self._ends.values():
            match move:
                case Transfer(target=Disk(keys)):
                    lying.update(keys)
        assert self._untold <= lying, "a partial block that is gone"

    # Inside

    def _num_under_way(self, tier: int) -> int:
        """Blocks on their way to or from `tier`, whose moves are done in order."""
        return sum(move.num_blocks for move, _ in self._ends.values() if move.tier == tier)

    def _tier(self, key: int) -> int | None:
        """The highest tier in which the block lies, or will when its copy has come."""
        if self._host.is_coming(key):
            return HOST
        return DISK if key in self._disk else None

    def _tell(self, removed: Sequence[int], stored: Iterable[int], tier: int = HOST) -> None:
        for key in removed:
            self._journal.removed(key, tier=tier)
        told = [key for key in stored if key not in self._untold]
        if told:
            self._journal.stored(told, tier=tier)

    def _spill_oldest(self) -> None:
        """Write to disk, ahead of need, what gives way next in host memory."""
        host = self._host
        if self._carrier.disk is None or self._num_spills >= _MAX_SPILLS:
            return
        if host.num_free >= host.num_slots // 8:
            return
        keys = [key for key in host.oldest(2 * _SPILL_BLOCKS) if key not in self._disk]
        keys = keys[:_SPILL_BLOCKS]
        if len(keys) < min(_SPILL_BLOCKS, host.num_slots // 8):
            return
        host.hold(keys)
        self._num_spills += 1

        def ended(moved: Moved) -> None:
            self._num_spills -= 1
            host.release(keys, are_oldest=True)
            if moved.error is None:
                self._on_disk(keys)

        self._start(Host(tuple(map(host.slot, keys))), Disk(tuple(keys)), ended)

    def _on_disk(self, keys: Iterable[int]) -> None:
        new = [key for key in keys if key not in self._disk]
        self._counts.num_spilled += len(new)
        self._disk.update(dict.fromkeys(new))
        self._tell((), new, DISK)

    def _off_disk(self, keys: Iterable[int]) -> None:
        for key in keys:
            if key not in self._disk:
                continue
            del self._disk[key]
            if key not in self._untold:
                self._journal.removed(key, tier=DISK)
            self._forget_untold(key)

    def _forget_untold(self, key: int) -> None:
        """If `key` lies nowhere any more, its events need not be held back."""
        if key not in self._host and key not in self._disk:
            self._untold.discard(key)

    def _start(
        self,
        source: Device | Host | Disk | Peer,
        target: Device | Host | Disk,
        end: Callable[[Moved], None],
        *,
        is_eviction: bool = False,
    ) -> int:
        """Begin a transfer; its number."""
        after = self._carrier.memory.mark()
        return self._begin(Transfer(self._next_number, source, target, after, is_eviction), end)

    def _begin(self, move: Move, end: Callable[[Moved], None]) -> int:
        self._next_number += 1
        self._ends[move.number] = (move, end)
        self._mover.start(move)
        return move.number
