"""The tiers below a mocked device, and its peers: an engine's own books, and moves that take time alone."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, NamedTuple, Protocol

from mallee.mocker.links import TOKEN_NBYTES, Peers
from mallee.protocol.errors import ConfigError, MalleeError, TierFull, WorkerLost
from mallee.protocol.messages import Holder
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.watch import KVMemory, Rows
from mallee.worker.transfer.host import HostSlots
from mallee.worker.transfer.lower import LowerTiers
from mallee.worker.transfer.movers import Carrier, Mover
from mallee.worker.transfer.prices import LATENCY_S, MeasuredPrices
from mallee.worker.transfer.values import (
    DISK,
    HOST,
    PEER,
    Ask,
    Loan,
    Move,
    Moved,
    Place,
    Question,
    Transfer,
)


@dataclass(frozen=True, slots=True)
class TierConfig:
    """Tokens that each tier holds, bytes per second to and from it, bytes of KV of a token.

    0 tokens: no such tier; only whole blocks count. A move takes the latency, then its bytes' time.

    The bandwidths are the router's (`router.placement.pricing`): 2 MiB for 16 tokens over 25 and 4 GB/s.
    """

    host_tokens: int = 0
    disk_tokens: int = 0
    host_bytes_s: float = 25e9
    disk_bytes_s: float = 4e9
    host_latency_s: float = LATENCY_S[HOST]
    disk_latency_s: float = LATENCY_S[DISK]
    token_nbytes: int = TOKEN_NBYTES

    def validate(self) -> "TierConfig":
        """Itself. Raises ConfigError naming what is out of range."""
        for name in ("host_tokens", "disk_tokens", "host_latency_s", "disk_latency_s"):
            if not 0 <= getattr(self, name) < inf:
                raise ConfigError(f"{name}={getattr(self, name)}: give 0 (none) or more")
        for name in ("host_bytes_s", "disk_bytes_s"):
            if not 0.0 < getattr(self, name) < inf:
                raise ConfigError(f"{name}={getattr(self, name)}: give bytes per second above 0")
        if self.token_nbytes < 1:
            raise ConfigError(f"token_nbytes={self.token_nbytes}: give at least 1")
        if self.disk_tokens and not self.host_tokens:
            raise ConfigError(
                f"disk_tokens={self.disk_tokens} without host_tokens: what the device evicts goes to disk by"
                " way of host memory; give host_tokens too"
            )
        return self

    def latency_s(self, tier: int) -> float:
        """Seconds until the first byte of a move."""
        return self.host_latency_s if tier == HOST else self.disk_latency_s

    def block_s(self, tier: int, block_size: int) -> float:
        """Seconds for the bytes of one block."""
        bytes_s = self.host_bytes_s if tier == HOST else self.disk_bytes_s
        return block_size * self.token_nbytes / bytes_s


class _Record(NamedTuple):
    payload: bytes
    keys: tuple[int, ...]
    owner: str = ""


class DiskBooks:
    """A `DiskStore` of `num_blocks` without bytes. Blocks that a record names stay."""

    def __init__(self, num_blocks: int) -> None:
        self._slots = HostSlots(num_blocks)
        self._records: dict[str, _Record] = {}
        self._lost: list[int] = []

    @property
    def budget_nbytes(self) -> int:
        return 0

    def put(self, keys: Sequence[int], rows: Sequence[memoryview]) -> int:
        slots = self._slots
        known = [key for key in keys if key in slots]
        slots.hold(known)  # the new ones must not take their room
        new = [key for key in keys if key not in slots]
        try:
            if len(new) > slots.num_room:
                raise TierFull("disk", len(new), slots.num_room, slots.num_slots)
            for key in new:
                got = slots.put(key)
                assert got is not None, "there was room"
                if got[1] is not None:
                    self._lost.append(got[1])
        finally:
            slots.release(known)
        slots.use(keys)
        return len(new)

    def get(self, keys: Sequence[int], rows: Sequence[memoryview]) -> tuple[int, None]:
        slots, num = self._slots, 0
        while num < len(keys) and keys[num] in slots:
            num += 1
        slots.use(reversed(keys[:num]))
        return num, None

    def commit(
        self, capsule: str, payload: bytes, keys: Sequence[int], *, owner: str, is_kept: bool
    ) -> None:
        missing = sum(key not in self._slots for key in keys)
        if missing:
            raise TierFull("disk", missing, self._slots.num_room, self._slots.num_slots)
        self.drop(capsule)
        self._slots.hold(keys)
        self._records[capsule] = _Record(payload, tuple(keys))

    def drop(self, capsule: str) -> bool:
        record = self._records.pop(capsule, None)
        if record is not None:
            self._slots.release(record.keys)
        return record is not None

    def capsules(self) -> Sequence[str]:
        return list(self._records)

    def unreadable(self) -> Sequence[MalleeError]:
        return ()

    def take(self, other: Any, capsule: str) -> None:
        raise AssertionError("no worker's capsules are adopted here")

    def clear(self) -> None:
        raise AssertionError("no worker's capsules are adopted here")

    def load(self, capsule: str) -> _Record | None:
        return self._records.get(capsule)

    def keys(self) -> Sequence[int]:
        return list(self._slots)

    def take_lost(self) -> tuple[list[int], tuple[str, ...]]:
        lost, self._lost = self._lost, []
        return lost, ()

    def close(self) -> None:
        """Do nothing: it is gone with its engine."""


class _Answer:
    """The lender of a `Carrier` whose question was put, and answered, before."""

    def __init__(self) -> None:
        self.next: Loan | MalleeError | None = None

    def lend(self, ask: Ask) -> Loan:
        answer, self.next = self.next, None
        assert answer is not None, "carried out before it was answered"
        if isinstance(answer, MalleeError):
            raise answer
        return answer


class _Borrowed:
    """A loan with its holder, and whether something of it came."""

    __slots__ = ("_inner", "has_come", "holder")

    def __init__(self, inner: Loan, holder: Holder) -> None:
        self._inner = inner
        self.holder = holder
        self.has_come = False

    @property
    def record(self) -> bytes:
        return self._inner.record

    @property
    def num_blocks(self) -> int:
        return self._inner.num_blocks

    @property
    def block_nbytes(self) -> int:
        return self._inner.block_nbytes

    def read(self, places: Sequence[int], rows: Rows) -> None:
        self._inner.read(places, rows)

    def close(self) -> None:
        self._inner.close()


class TimedMover(Mover):
    """A mover whose moves end by the clock: those of a tier one after another, the tiers side by side.

    The link to each peer is a tier of its own. Evictions take no time. Questions end when they are answered.
    What has not come of a pull when its lender is lost never does; its borrower learns that when all should
    have been there.
    """

    def __init__(
        self, carrier: Carrier, config: TierConfig, block_size: int, peers: Peers | None = None
    ) -> None:
        super().__init__(carrier)
        self._config = config
        self._peers = peers
        self._block_s = {tier: config.block_s(tier, block_size) for tier in (HOST, DISK)}
        if peers is not None:
            self._block_s[PEER] = block_size * peers.link.token_s
        self._answer = carrier.peers = _Answer()
        self._free_at: dict[int | str, float] = {}  # by tier, or by peer
        # By end, and number, with their time; pulls with what is known of their loan.
        self._under_way: list[tuple[float, int, Move, float, _Borrowed | None]] = []
        self._answered: list[tuple[Question, float, Loan | MalleeError]] = []
        self._is_closed = False

    def start(self, move: Move) -> Moved | None:
        if isinstance(move, Transfer) and move.is_eviction:
            return self._carrier.carry_out(move)
        tier, now = move.tier, self._carrier.clock()
        if isinstance(move, Question):
            assert self._peers is not None, "there are no peers"
            self._peers.ask(move.ask, partial(self._told, move, now))
            return None
        seconds = move.num_blocks * self._block_s[tier]
        road: int | str = tier
        borrowed: _Borrowed | None = None
        match move:
            case Transfer(source=Place(loan=_Borrowed() as loan)):
                borrowed, road = loan, loan.holder.worker
            case _:
                seconds += self._config.latency_s(tier)
        self._free_at[road] = end = max(now, self._free_at.get(road, 0.0)) + seconds
        heapq.heappush(self._under_way, (end, move.number, move, seconds, borrowed))
        return None

    def _told(self, move: Question, begun: float, answer: Loan | MalleeError) -> None:
        """A peer has answered."""
        if self._is_closed:
            if not isinstance(answer, MalleeError):
                answer.close()
            return
        if not isinstance(answer, MalleeError):
            answer = _Borrowed(answer, move.ask.holder)
        self._answered.append((move, self._carrier.clock() - begun, answer))
        self._notify()

    def done(self) -> Sequence[Moved]:
        done = []
        for move, seconds, answer in self._answered:
            self._answer.next = answer
            done.append(self._carrier.carry_out(move)._replace(seconds=seconds))
        self._answered.clear()
        while self._under_way and self.next_due <= self._carrier.clock():
            end, _, each, seconds, borrowed = heapq.heappop(self._under_way)
            if borrowed is None:
                moved = self._carrier.carry_out(each)
            else:
                moved = self._pulled(each, borrowed, begin=end - seconds, end=end)
            done.append(moved._replace(seconds=seconds))
        return done

    def _pulled(self, move: Move, borrowed: _Borrowed, *, begin: float, end: float) -> Moved:
        """The end of a pull: as much of it as came while its lender was there."""
        peers, holder = self._peers, borrowed.holder
        assert peers is not None, "there are no peers"
        left_at = peers.left_at(holder)
        if left_at < end:
            num = int(max(0.0, left_at - begin) / self._block_s[PEER])
            moved = Moved(
                move, min(num, move.num_blocks), 0.0, WorkerLost(holder.worker, "it is gone")
            )
        else:
            moved = self._carrier.carry_out(move)
        is_first = moved.num_blocks > 0 and not borrowed.has_come
        peers.pulled(moved.num_blocks, is_first=is_first, is_broken=left_at < end)
        borrowed.has_come = borrowed.has_come or moved.num_blocks > 0
        return moved

    @property
    def next_due(self) -> float:
        """The end of the next move but questions; infinite if none is under way."""
        return self._under_way[0][0] if self._under_way else inf

    @property
    def has_done(self) -> bool:
        return bool(self._answered) or self.next_due <= self._carrier.clock()

    def close(self) -> None:
        self._is_closed = True
        for _, _, answer in self._answered:
            if not isinstance(answer, MalleeError):
                answer.close()
        self._answered.clear()
        self._under_way.clear()


class _Timed(Protocol):
    """A pass over a model that takes time alone."""

    @property
    def step_s(self) -> float:
        """Seconds that the last step takes."""
        ...


class _StepPrices(MeasuredPrices):
    """Prices by what steps and moves take in the model, not by the clock, which knows nothing of it."""

    __slots__ = ("_timed",)

    def __init__(self, block_nbytes: int, timed: _Timed) -> None:
        super().__init__(block_nbytes)
        self._timed = timed

    def computed(self, num_tokens: int, seconds: float) -> None:
        super().computed(num_tokens, self._timed.step_s)


class MockedTiers:
    """Makes the tiers below one mocked engine, and knows when a move ends. `timed` computes its steps."""

    def __init__(
        self,
        config: TierConfig,
        *,
        block_size: int,
        clock: Callable[[], float],
        timed: _Timed,
        peers: Peers | None = None,
    ) -> None:
        """Raises ConfigError."""
        self._config = config.validate()
        self._peers = peers
        self._block_size = block_size
        self._clock = clock
        self._timed = timed
        self._mover: TimedMover | None = None

    def make(self, journal: Journal, memory: KVMemory) -> LowerTiers:
        """See `MakeTiers`."""
        config, size = self._config, self._block_size
        num_disk = config.disk_tokens // size
        arena = memory.new_rows(config.host_tokens // size)
        disk = DiskBooks(num_disk) if num_disk else None
        carrier = Carrier(memory, arena, disk, self._clock)
        self._mover = TimedMover(carrier, config, size, self._peers)
        prices = _StepPrices(size * config.token_nbytes, self._timed)
        return LowerTiers(journal, carrier, prices=prices, mover=self._mover)

    @property
    def next_due(self) -> float:
        """The end of the next move; infinite if none is under way."""
        assert self._mover is not None, "made first"
        return self._mover.next_due
