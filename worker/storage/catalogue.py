"""The contents of a volume, in memory: which file has a block, who pins it, what is given up next.

Files are in order of use, the least recently used first; the order is lost with the process, and begins
anew with the order in which they were written. A run is given up whole, and only if no record pins a
block of it. Runs and records of another identity serve nobody: they go before all others.
"""

from collections import Counter, OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, repeat


@dataclass(slots=True, eq=False)
class Run:
    """A file of blocks. `offset`: of its first block. One of another identity has no `keys`.

    `verified`: 1 for each block that this process wrote, or has read and found right.
    """

    name: str
    nbytes: int
    offset: int = 0
    keys: Sequence[int] = ()
    checksums: Sequence[int] = ()
    verified: bytearray = field(default_factory=bytearray)
    is_durable: bool = False
    num_live: int = 0  # blocks that are found here
    num_pinned: int = 0  # those of them that records name


@dataclass(slots=True, eq=False)
class Entry:
    """A record's file. `offset`: of its payload, which has `checksum`."""

    capsule: str
    name: str
    nbytes: int
    offset: int
    checksum: int
    owner: str
    is_kept: bool
    keys: Sequence[int]
    identity: dict[str, str] | None = None  # another one than the volume's


Place = tuple[Run, int]  # and the block's slot in it


@dataclass(slots=True)
class Holding:
    """An owner's records: their bytes, and how many of them name each block."""

    nbytes: int = 0
    blocks: Counter[int] = field(default_factory=Counter)


class Catalogue:
    """Runs, blocks and records of one volume. Does no I/O."""

    def __init__(self, block_nbytes: int) -> None:
        self._block_nbytes = block_nbytes
        self.nbytes = 0  # of all files
        self._runs: OrderedDict[Run, None] = OrderedDict()
        self._stale: OrderedDict[Run, None] = OrderedDict()
        self._places: dict[int, Place] = {}
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._pins: Counter[int] = Counter()  # records by block
        self._holdings: dict[str, Holding] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._places

    def keys(self) -> Iterable[int]:
        return self._places.keys()

    def place(self, key: int) -> Place | None:
        return self._places.get(key)

    def is_verified(self, key: int) -> bool:
        """Whether the bytes of a block are known to be right; also if it is not stored."""
        place = self._places.get(key)
        return place is None or bool(place[0].verified[place[1]])

    def is_pinned(self, key: int) -> bool:
        """Whether a record names the block; it may not be stored any more."""
        return key in self._pins

    def runs_of(self, keys: Iterable[int]) -> dict[Run, None]:
        """The runs that have any of `keys`, each once, in order."""
        found = (self._places.get(key) for key in keys)
        return dict.fromkeys(place[0] for place in found if place is not None)

    def add(self, run: Run) -> None:
        """`run` is the most recently used. Blocks that were elsewhere are found here from now on."""
        self.nbytes += run.nbytes
        if not run.keys:
            self._stale[run] = None
            return
        self._runs[run] = None
        if not self._places.keys().isdisjoint(run.keys):
            for key in run.keys:
                self.forget(key)
        self._places.update(zip(run.keys, zip(repeat(run), count()), strict=False))
        run.num_live = len(run.keys)
        run.num_pinned = sum(key in self._pins for key in run.keys) if self._pins else 0

    def forget(self, key: int) -> Run | None:
        """The block is not found any more; the run that had it."""
        place = self._places.pop(key, None)
        if place is None:
            return None
        run, _ = place
        run.num_live -= 1
        run.num_pinned -= key in self._pins
        return run

    def remove(self, run: Run) -> list[int]:
        """The file is gone; the blocks that were found in it."""
        self.nbytes -= run.nbytes
        self._stale.pop(run, None)
        self._runs.pop(run, None)
        gone = [key for i, key in enumerate(run.keys) if self._places.get(key) == (run, i)]
        for key in gone:
            self.forget(key)
        return gone

    def use(self, runs: Iterable[Run]) -> None:
        for run in runs:
            self._runs.move_to_end(run)

    def runs(self) -> Iterator[Run]:
        yield from self._stale
        yield from self._runs

    def empty_runs(self) -> list[Run]:
        return [run for run in self._runs if not run.num_live]

    def evictable(self, spared: Container[Run]) -> list[Run]:
        """Runs that may be given up, in that order."""
        free = (run for run in self._runs if not run.num_pinned and run not in spared)
        return [*self._stale, *free]

    # Records.

    def record(self, capsule: str) -> Entry | None:
        return self._entries.get(capsule)

    def records(self) -> Iterable[Entry]:
        return self._entries.values()

    def put(self, entry: Entry) -> None:
        """`entry`, the most recently used, takes the place of one of the same capsule."""
        if entry.capsule in self._entries:
            self.drop(entry.capsule)
        self._entries[entry.capsule] = entry
        self.nbytes += entry.nbytes
        if entry.identity is not None:
            return
        holding = self._holdings.setdefault(entry.owner, Holding())
        holding.nbytes += entry.nbytes
        for key in set(entry.keys):
            holding.blocks[key] += 1
            self._pins[key] += 1
            if self._pins[key] == 1 and key in self._places:
                self._places[key][0].num_pinned += 1

    def drop(self, capsule: str) -> Entry:
        entry = self._entries.pop(capsule)
        self.nbytes -= entry.nbytes
        if entry.identity is not None:
            return entry
        holding = self._holdings[entry.owner]
        holding.nbytes -= entry.nbytes
        for key in set(entry.keys):
            _take(holding.blocks, key)
            if _take(self._pins, key) and key in self._places:
                self._places[key][0].num_pinned -= 1
        if not holding.nbytes:
            del self._holdings[entry.owner]
        return entry

    def touch(self, capsule: str) -> None:
        self._entries.move_to_end(capsule)

    def owner_nbytes_with(self, entry: Entry) -> int:
        """Bytes of the records of the owner of `entry`, with it, and of their blocks, each once."""
        holding = self._holdings.get(entry.owner, Holding())
        new = set(entry.keys)
        nbytes = holding.nbytes + entry.nbytes
        num_blocks = len(holding.blocks) + len(new - holding.blocks.keys())
        old = self._entries.get(entry.capsule)
        if old is not None and old.owner == entry.owner and old.identity is None:
            nbytes -= old.nbytes
            num_blocks -= sum(holding.blocks[key] == 1 for key in set(old.keys) - new)
        return nbytes + num_blocks * self._block_nbytes

    def owner_nbytes_kept(self, entry: Entry) -> int:
        """The same, if every record that may go went. O(blocks of the owner's records)."""
        going = {entry.capsule, *(e.capsule for e in self.replaceable(entry.capsule, entry.owner))}
        ours = [e for e in self._entries.values() if e.owner == entry.owner and not e.identity]
        stay = [entry, *(e for e in ours if e.capsule not in going)]
        num_blocks = len({key for each in stay for key in each.keys})
        return sum(each.nbytes for each in stay) + num_blocks * self._block_nbytes

    def replaceable(self, spared: str, owner: str | None = None) -> list[Entry]:
        """Records that may be given up, in that order: those of another identity first."""
        found = [each for each in self._entries.values() if each.capsule != spared]
        if owner is not None:
            return [e for e in found if e.owner == owner and e.identity is None and not e.is_kept]
        stale = [each for each in found if each.identity is not None]
        return stale + [each for each in found if each.identity is None and not each.is_kept]

    def kept_nbytes(self, capsule: str, spared: Iterable[Run]) -> int:
        """Bytes that stay if all went that may go, but for `spared` runs and the record of `capsule`."""
        ours = [each for each in self._entries.values() if each.identity is None]
        stay = [each for each in ours if each.is_kept or each.capsule == capsule]
        runs = self.runs_of(key for entry in stay for key in entry.keys)
        runs.update(dict.fromkeys(spared))
        return sum(entry.nbytes for entry in stay) + sum(run.nbytes for run in runs)

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        files: list[Run | Entry] = [*self.runs(), *self._entries.values()]
        assert self.nbytes == sum(each.nbytes for each in files), "bytes miscounted"
        ours = [entry for entry in self._entries.values() if entry.identity is None]
        pins = Counter(key for entry in ours for key in set(entry.keys))
        assert pins == self._pins, "pins miscounted"
        for run in self._runs:
            live = [k for i, k in enumerate(run.keys) if self._places.get(k) == (run, i)]
            assert run.num_live == len(live), f"{run.name} has {len(live)} blocks"
            assert run.num_pinned == sum(key in pins for key in live), f"{run.name}: pins"
        assert sum(run.num_live for run in self._runs) == len(self._places), "blocks of no run"
        for owner, holding in self._holdings.items():
            theirs = [entry for entry in ours if entry.owner == owner]
            assert holding.nbytes == sum(entry.nbytes for entry in theirs), "records miscounted"
            blocks = Counter(key for entry in theirs for key in set(entry.keys))
            assert holding.blocks == blocks, "an owner's blocks miscounted"


def _take(counts: Counter[int], key: int) -> bool:
    """Count `key` down; whether that was the last."""
    counts[key] -= 1
    if counts[key]:
        return False
    del counts[key]
    return True
