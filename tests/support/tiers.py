"""Tiers for tests: a disk that is a dict, and a mover that is as late as a test wants."""

from collections.abc import Callable, Sequence
from typing import Any

from mallee.protocol.errors import DeviceMemoryExhausted, MalleeError
from mallee.worker.engine import MakeTiers
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.watch import KVMemory
from mallee.worker.storage.volume import Lost, Read, Record
from mallee.worker.transfer.disk import DiskStore
from mallee.worker.transfer.lower import LowerTiers
from mallee.worker.transfer.movers import Carrier, Mover
from mallee.worker.transfer.prices import MeasuredPrices
from mallee.worker.transfer.values import DISK, Lender, Move, Moved, Transfer


class DictDisk:
    """A `DiskStore` in memory. `max_blocks`: beyond it the oldest that no record names goes.

    `broken`: keys of blocks that turn out damaged when they are read.
    """

    def __init__(self, max_blocks: int = 1 << 30) -> None:
        self.blocks: dict[int, bytes] = {}
        self.named: dict[str, tuple[bytes, tuple[int, ...]]] = {}
        self.max_blocks = max_blocks
        self.broken: set[int] = set()
        self.gone: list[int] = []

    @property
    def budget_nbytes(self) -> int:
        return self.max_blocks << 10

    def put(self, keys: Sequence[int], rows: Sequence[memoryview]) -> int:
        for key, row in zip(keys, rows, strict=True):
            self.blocks.setdefault(key, row.tobytes())
        used = {key for _, named in self.named.values() for key in named} | set(keys)
        for key in list(self.blocks):
            if len(self.blocks) <= self.max_blocks:
                break
            if key not in used:
                del self.blocks[key]
                self.gone.append(key)
        return len(keys)

    def get(self, keys: Sequence[int], rows: Sequence[memoryview]) -> Read:
        for i, (key, row) in enumerate(zip(keys, rows, strict=True)):
            if key in self.broken or key not in self.blocks:
                self.broken.discard(key)
                self.blocks.pop(key, None)
                self.gone.append(key)
                return Read(i, None)
            row[:] = self.blocks[key]
        return Read(len(keys), None)

    def commit(
        self, capsule: str, payload: bytes, keys: Sequence[int], *, owner: str, is_kept: bool
    ) -> None:
        assert all(key in self.blocks for key in keys), "a record of blocks that are not there"
        self.named[capsule] = (payload, tuple(keys))

    def drop(self, capsule: str) -> bool:
        return self.named.pop(capsule, None) is not None

    def capsules(self) -> Sequence[str]:
        return list(self.named)

    def unreadable(self) -> Sequence[MalleeError]:
        return ()

    def take(self, other: Any, capsule: str) -> None:
        raise AssertionError("no worker's capsules are adopted here")

    def clear(self) -> None:
        raise AssertionError("no worker's capsules are adopted here")

    def load(self, capsule: str) -> Record:
        payload, keys = self.named[capsule]
        return Record(capsule, payload, list(keys), "", True)

    def take_lost(self) -> Lost:
        gone, self.gone = self.gone, []
        return Lost(gone, [])

    def keys(self) -> Sequence[int]:
        return list(self.blocks)

    def close(self) -> None:
        pass


class ShortMemory:
    """Device memory that has no room, now and then, for what its copies gather."""

    def __init__(self) -> None:
        self.inner: Any = None
        self.num_failing = 0  # of the next copies

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def over(self, inner: KVMemory) -> "ShortMemory":
        """The same, of `inner`."""
        self.inner = inner
        return self

    def read(self, *given: Any) -> None:
        self._fail()
        self.inner.read(*given)

    def write(self, *given: Any) -> None:
        self._fail()
        self.inner.write(*given)

    def _fail(self) -> None:
        if self.num_failing:
            self.num_failing -= 1
            raise DeviceMemoryExhausted("tried to allocate 32.00 MiB")


class LateMover(Mover):
    """A mover whose moves begin and end when a test says so: `advance`. In order."""

    is_beside = True

    def __init__(self, carrier: Carrier) -> None:
        super().__init__(carrier)
        self._begun: list[Move] = []

    def start(self, move: Move) -> None:
        self._begun.append(move)

    def advance(self, n: int = 1) -> None:
        """The next n moves are carried out."""
        now, self._begun = self._begun[:n], self._begun[n:]
        self._done += map(self._carrier.carry_out, now)

    @property
    def num_under_way(self) -> int:
        return len(self._begun) + len(self._done)


def make_tiers(
    host_blocks: int = 0,
    *,
    disk: DiskStore | None = None,
    movers: list[LateMover] | None = None,
    clock: Callable[[], float] = lambda: 0.0,
    peers: Lender | None = None,
    prices: MeasuredPrices | None = None,
    failures: list[MalleeError] | None = None,
    pause: Callable[[int], None] = lambda nbytes: None,
    short: ShortMemory | None = None,
) -> MakeTiers:
    """Tiers that always fetch, unless `prices` say what is cheaper; with `movers` by a mover that is added
    there. `failures` gets what failed. Copies go over `short`."""

    def make(journal: Journal, memory: KVMemory) -> LowerTiers:
        if short is not None:
            memory = short.over(memory)
        arena = memory.new_rows(host_blocks)
        carrier = Carrier(memory, arena, disk, clock, pause, peers)
        mover = None
        if movers is not None:
            mover = LateMover(carrier)
            movers.append(mover)
        return LowerTiers(
            journal,
            carrier,
            prices=prices or MeasuredPrices(memory.block_nbytes),
            mover=mover,
            always_fetches=prices is None,
            report=[].append if failures is None else failures.append,
        )

    return make


class LooseMover(Mover):
    """A mover whose lanes go on by themselves, each in order, and whose ends are told in any order."""

    is_beside = True

    def __init__(self, carrier: Carrier) -> None:
        super().__init__(carrier)
        self._lanes: dict[object, list[Move]] = {}
        self._ended: list[Moved] = []  # and not told

    def start(self, move: Move) -> None:
        self._lanes.setdefault(move.tier if isinstance(move, Transfer) else DISK, []).append(move)

    @property
    def lanes(self) -> list[object]:
        """Those in which something waits."""
        return [lane for lane, moves in self._lanes.items() if moves]

    @property
    def num_untold(self) -> int:
        return len(self._ended)

    def advance(self, lane: object) -> None:
        """The next move of `lane` is carried out."""
        self._ended.append(self._carrier.carry_out(self._lanes[lane].pop(0)))

    def tell(self, i: int) -> None:
        """That one of the moves that have ended is told."""
        self._done.append(self._ended.pop(i))
