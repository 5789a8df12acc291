"""The tiers below the device: what is there, what goes down, what comes back up.

Blocks are known by chain hash, the partial last block of a capsule by a key of its own, so a block that
many texts share is stored once. What the device evicts goes to host memory, and from there, ahead of need, to
disk; what is fetched stays below too. Capsules hold their blocks: those are never evicted.
A move that fails is no error of a request: what did not arrive is computed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mallee.protocol.errors import MalleeError, TierFull
from mallee.protocol.events import FetchPrices
from mallee.protocol.hashing import Hashes
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.tiers.host import HostSlots
from mallee.worker.kv.tiers.moves import (
    DISK,
    HOST,
    PEER,
    Copier,
    Forget,
    InlineMover,
    Move,
    Moved,
    Mover,
    Park,
    Pull,
    Recall,
    Repay,
    Restore,
    Source,
    Spill,
)
from mallee.worker.kv.tiers.peers import Ask
from mallee.worker.kv.tiers.prices import Prices
from mallee.worker.kv.watch import Row

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
    loan: int = 0
    is_foreign: bool = False  # as in `Pull`


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


@dataclass(slots=True)
class _Counts:
    offloaded: int = 0
    dropped: int = 0
    parked: int = 0
    spilled: int = 0
    fetched_host: int = 0
    fetched_disk: int = 0
    declined: int = 0
    failed: int = 0
    fetched_peer: int = 0
    fetched_peer_s: float = 0.0


class LowerTiers:
    """Owner of the books of host memory and disk. One thread; the mover copies beside it.

    `settle` takes in what has moved; whoever started a move gets its end from there by number.
    """

    def __init__(
        self,
        journal: Journal,
        copier: Copier,
        *,
        prices: Prices,
        mover: Mover | None = None,
        always_fetches: bool = False,
        report: Callable[[MalleeError], None] = lambda error: None,
    ) -> None:
        """`always_fetches`: whatever computing would cost. `report` gets what moves failed of."""
        self._report = report
        self.prices = prices
        self._journal = journal
        self._copier = copier
        self._mover = mover or InlineMover(copier)
        self._always_fetches = always_fetches
        self._host = HostSlots(len(copier.arena))
        self._disk: dict[int, None] = {}
        self._untold: set[int] = (
            set()
        )  # partial blocks and rows of windows: no event is told of them
        # On their way to host memory, of which no event is told yet, and by how many moves.
        self._arriving: dict[int, int] = {}
        self._num_spills = 0
        self._num_dear = {
            HOST: 0,
            DISK: 0,
            PEER: 0,
        }  # fetches that would have been dearer than computing
        self._next_number = 0
        self._ends: dict[int, tuple[Move, Callable[[Moved], None]]] = {}  # under way
        self._counts = _Counts()
        self._lost: list[str] = []
        if copier.disk is not None:
            self._disk = dict.fromkeys(copier.disk.keys())

    def announce(self, untold: Iterable[int]) -> None:
        """Tell of the blocks that were on disk from the start, but for those of which no event is told."""
        self._untold.update(key for key in untold if key in self._disk)
        self._tell((), self._disk, DISK)

    # What goes down

    def offload(self, keys: Sequence[int], blocks: Sequence[int]) -> None:
        """The device gives up `blocks`, the first of a text first: copy them to host memory, now.

        Those that are below already are only used. Without room they are gone.
        """
        host = self._host
        if not host.num_slots:
            return
        new: dict[int, None] = {}
        removed: list[int] = []
        failure: MalleeError | None = None
        for key, block in zip(reversed(keys), reversed(blocks), strict=True):
            if key in host:
                host.use((key,))
                continue
            got = host.put(key)
            if got is None:
                self._counts.dropped += 1
                continue
            slot, gone = got
            if gone is not None and gone in new:  # there is less room than comes down at once
                del new[gone]
                self._forget_untold(gone)
            elif gone is not None:
                self._gone(gone, removed)
            try:
                self._copier.memory.read([block], self._copier.arena[slot : slot + 1])
            except MalleeError as error:  # of the tier's: the step that makes room goes on
                failure = error
                self._host.drop(key)
                self._counts.dropped += 1
                continue
            new[key] = None
        if failure is not None:
            self.failed(failure)
        self._counts.offloaded += len(new)
        self._tell(removed, list(new))
        self._spill_oldest()

    def has(self, tier: int) -> bool:
        """Whether there is such a tier."""
        return self.has_host if tier == HOST else tier == DISK and self._copier.disk is not None

    @property
    def has_host(self) -> bool:
        """Whether there is host memory."""
        return self._host.num_slots > 0

    def tier_of(self, keys: Iterable[int]) -> int | None:
        """The tier where the last of `keys` lie, as far as is known; None if some are gone."""
        tiers = [self._tier(key) for key in keys]
        return None if None in tiers else max(each for each in tiers if each is not None)

    def missing(self, keys: Iterable[int]) -> list[int]:
        """Those of `keys` that are in no tier, as far as is known."""
        return [key for key in keys if self._tier(key) is None]

    @property
    def is_empty(self) -> bool:
        """Whether nothing can lie below the device here."""
        return not self._host.num_slots and self._copier.disk is None

    def offload_untold(self, keys: Sequence[int], blocks: Sequence[int]) -> None:
        """The same of partial blocks and rows of windows."""
        self._untold.update(keys)
        self.offload(keys, blocks)
        for key in keys:
            self._forget_untold(key)

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
        copied = [i for i, key in enumerate(keys) if key not in host or key in self._arriving]
        num_missing = len(keys) - len(here)
        host.hold(here)
        if num_missing > host.num_room:
            host.release(here)
            raise TierFull("host", num_missing, host.num_room, host.num_slots)
        self._untold.update(keys[len(keys) - num_untold :])
        removed: list[int] = []
        new = tuple(keys[i] for i in copied)
        for key in new:
            self._arriving[key] = self._arriving.get(key, 0) + 1
            if key in host:
                continue
            got = host.put(key)
            assert got is not None, "there was room"
            host.hold((key,))
            if got[1] is not None:
                self._gone(got[1], removed)
        self._tell(removed, ())
        self._counts.parked += num_missing
        slots = tuple(map(host.slot, new))
        move = Park(self._number(), new, tuple(blocks[i] for i in copied), slots)

        def ended(moved: Moved) -> None:
            if moved.error is None:
                self._tell((), [key for key in new if self._arriving.pop(key, 0)])
            else:
                host.release(keys)
                self._did_not_arrive(new)
            end(moved)

        self._start(move, ended)

    def _did_not_arrive(self, keys: Iterable[int]) -> None:
        """A copy of `keys` to host memory failed: none is there, unless another copy brought it or will."""
        for key in keys:
            if key not in self._arriving:
                continue
            self._arriving[key] -= 1
            if not self._arriving[key]:
                del self._arriving[key]
                self._host.drop(key)
                self._forget_untold(key)

    def commit(
        self,
        name: str,
        record: bytes,
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
        sources = []
        held = []
        for i, key in enumerate(keys):
            if blocks is None and key in self._disk:
                continue
            if blocks is None:
                sources.append(Source(key, -1, self._host.slot(key)))
                held.append(key)
            else:
                sources.append(Source(key, blocks[i]))
        self._host.hold(held)
        move = Spill(self._number(), tuple(sources), name, record, tuple(keys), owner, is_kept)

        def ended(moved: Moved) -> None:
            self._host.release(held)
            if moved.error is None:
                self._on_disk(source.key for source in move.sources)
            for key in untold:
                self._forget_untold(key)
            end(moved)

        self._start(move, ended)

    def forget(self, name: str, end: Callable[[Moved], None] = lambda moved: None) -> None:
        """Drop the record of capsule `name` from disk, also one that is on its way; then call `end`."""
        self._start(Forget(self._number(), name), end)

    def is_recording(self, name: str) -> bool:
        """Whether a record of capsule `name` is on its way to disk, or out of it."""
        moves = (move for move, _ in self._ends.values())
        return any(move.name == name for move in moves if isinstance(move, Spill | Forget))

    def hold(self, keys: Sequence[int]) -> bool:
        """Hold `keys` in host memory, if all are there."""
        if any(key not in self._host for key in keys):
            return False
        self._host.hold(keys)
        return True

    def release(self, keys: Sequence[int]) -> None:
        """Let go of keys that `park`, `hold` or `lend` held in host memory."""
        self._host.release(keys)

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
        self._counts.declined += sum(each.num_blocks for each in found)
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
            self._host.release(keys)

    def fetch(
        self,
        part: Part,
        end: Callable[[Moved], None],
    ) -> None:
        """Bring `part`, which is claimed, to its device blocks; `end` is told how many arrived."""
        found, keys, blocks, loan, is_foreign = part
        counts = self._counts

        def ended(moved: Moved) -> None:
            self.unclaim(found, keys)
            if found.tier == HOST:
                counts.fetched_host += moved.num_blocks
            elif found.tier == DISK:
                counts.fetched_disk += moved.num_blocks
            else:
                counts.fetched_peer += moved.num_blocks
                counts.fetched_peer_s += moved.seconds
            end(moved)

        if found.tier == PEER:
            self._start(Pull(self._number(), loan, keys, blocks, is_foreign), ended)
            return
        slots = tuple(map(self._host.slot, keys)) if found.tier == HOST else ()
        self._start(Restore(self._number(), keys, blocks, slots), ended)

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

    def recall(self, ask: Ask, end: Callable[[Moved], None]) -> None:
        """Ask a peer for a loan; it goes by the number of the move that `end` gets, until it is repaid."""
        self._start(Recall(self._number(), ask), end)

    def repay(self, loan: int) -> None:
        """End a loan."""
        self._start(Repay(self._number(), loan), lambda moved: None)

    # What others read

    def lend(self, keys: Sequence[int]) -> list[Row] | None:
        """The bytes of `keys` in host memory, held there until `release`; None unless all have arrived."""
        if self.num_leading(keys) < len(keys):
            return None
        self._host.hold(keys)
        return [self._copier.arena[self._host.slot(key)] for key in keys]

    def num_leading(self, keys: Sequence[int]) -> int:
        """The number of leading blocks of `keys` in host memory."""
        num = 0
        while num < len(keys) and self._tier(keys[num]) == HOST:
            num += 1
        return num

    # Moves

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step of prompts alone computed so many tokens."""
        self.prices.computed(num_tokens, seconds)

    def give_way(self, is_decoding: bool) -> None:
        """Bound the bandwidth of moves while answers are drawn, and only then."""
        self._copier.gives_way = is_decoding

    def settle(self) -> None:
        """Take in the moves that have ended."""
        for moved in self._mover.done():
            _, end = self._ends.pop(moved.move.number)
            if isinstance(moved.move, Restore | Pull) and moved.error is None:
                self.prices.moved(moved.move.tier, moved.num_blocks, moved.seconds)
            if moved.error is not None:
                self.failed(moved.error)
            self._lost += moved.lost
            end(moved)
            self._off_disk(moved.evicted)  # after it: what the move wrote may be among them

    def failed(self, error: MalleeError) -> None:
        """A move, or what it brought, was of no use."""
        self._counts.failed += 1
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
        return self._mover.has_done

    @property
    def num_moving(self) -> int:
        """Moves under way."""
        return len(self._ends)

    def close(self) -> None:
        self._copier.close()  # so that pulls end
        self._mover.close()
        self._copier.close()
        if self._copier.disk is not None:
            self._copier.disk.close()

    # Reading

    def records(self) -> Iterator[bytes]:
        """The capsules that are durable, of this worker's earlier lives; without those that can't be read.

        One at a time: they may have more bytes than memory.
        """
        disk = self._copier.disk
        if disk is None:
            return
        for name in disk.capsules():
            try:
                record = disk.load(name)
            except MalleeError:
                self._counts.failed += 1
                continue
            if record is not None:
                yield record.payload

    def keys(self, tier: int) -> list[int]:
        """Every full block that lies in `tier`."""
        if tier == DISK:
            return [key for key in self._disk if key not in self._untold]
        return [k for k in self._host if k not in self._untold and k not in self._arriving]

    def stats(self) -> TierStats:
        counts = self._counts
        return TierStats(
            len(self._host),
            self._host.num_room,
            self._host.num_held,
            len(self._disk),
            counts.offloaded,
            counts.dropped,
            counts.parked,
            counts.spilled,
            counts.fetched_host,
            counts.fetched_disk,
            counts.declined,
            counts.failed,
            self._copier.memory.block_nbytes,
            counts.fetched_peer,
            counts.fetched_peer_s,
            0 if self._copier.disk is None else self._copier.disk.budget_nbytes,
        )

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        self._host.check()
        spilling = {
            s.key for m, _ in self._ends.values() if isinstance(m, Spill) for s in m.sources
        }
        lying = {*self._host, *self._disk, *spilling}
        assert self._untold <= lying, "a partial block that is gone"
        assert all(key in self._host for key in self._arriving), "a block arrives nowhere"

    # Inside

    def _num_under_way(self, tier: int) -> int:
        """Blocks on their way to or from `tier`, whose moves are done in order."""
        return sum(move.num_blocks for move, _ in self._ends.values() if move.tier == tier)

    def _tier(self, key: int) -> int | None:
        """The highest tier in which the block lies."""
        if key in self._host:
            return None if key in self._arriving else HOST
        return DISK if key in self._disk else None

    def _gone(self, key: int, removed: list[int]) -> None:
        """Host memory has given up `key`."""
        if key not in self._untold:
            removed.append(key)
        self._forget_untold(key)

    def _tell(self, removed: Sequence[int], stored: Iterable[int], tier: int = HOST) -> None:
        for key in removed:
            self._journal.removed(key, tier=tier)
        told = [key for key in stored if key not in self._untold]
        if told:
            self._journal.stored(told, tier=tier)

    def _spill_oldest(self) -> None:
        """Write to disk, ahead of need, what gives way next in host memory."""
        host = self._host
        if self._copier.disk is None or self._num_spills >= _MAX_SPILLS:
            return
        if host.num_free >= host.num_slots // 8:
            return
        keys = [key for key in host.oldest(2 * _SPILL_BLOCKS) if key not in self._disk]
        keys = keys[:_SPILL_BLOCKS]
        if len(keys) < min(_SPILL_BLOCKS, host.num_slots // 8):
            return
        host.hold(keys)
        sources = tuple(Source(key, -1, host.slot(key)) for key in keys)
        self._num_spills += 1

        def ended(moved: Moved) -> None:
            self._num_spills -= 1
            host.release(keys, are_oldest=True)
            if moved.error is None:
                self._on_disk(keys)

        self._start(Spill(self._number(), sources), ended)

    def _on_disk(self, keys: Iterable[int]) -> None:
        new = [key for key in keys if key not in self._disk]
        self._counts.spilled += len(new)
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

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number

    def _start(self, move: Move, end: Callable[[Moved], None]) -> None:
        self._ends[move.number] = (move, end)
        self._mover.start(move)
