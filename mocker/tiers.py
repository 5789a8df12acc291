"""The tiers below a mocked device: books as a real engine keeps them, and moves that take time alone."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, NamedTuple, Protocol

import numpy as np

from mallee.protocol.errors import ConfigError, MalleeError, TierFull
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.tiers.host import HostSlots
from mallee.worker.kv.tiers.lower import LowerTiers
from mallee.worker.kv.tiers.moves import DISK, HOST, Copier, Move, Moved
from mallee.worker.kv.tiers.prices import LATENCY_S, MeasuredPrices
from mallee.worker.kv.watch import KVMemory

TOKEN_NBYTES: Final = (2 << 20) // 16  # 32 layers, 8 KV heads of 128, keys and values in bf16


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


class _Got(NamedTuple):
    num_blocks: int
    error: MalleeError | None = None


class _Record(NamedTuple):
    payload: bytes
    keys: tuple[int, ...]


class _Lost(NamedTuple):
    keys: list[int]
    capsules: tuple[str, ...] = ()


class DiskBooks:
    """A `DiskStore` of `num_blocks` without bytes. Blocks that a record names stay."""

    def __init__(self, num_blocks: int) -> None:
        self._slots = HostSlots(num_blocks)
        self._records: dict[str, _Record] = {}
        self._lost: list[int] = []

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

    def get(self, keys: Sequence[int], rows: Sequence[memoryview]) -> _Got:
        slots, num = self._slots, 0
        while num < len(keys) and keys[num] in slots:
            num += 1
        slots.use(reversed(keys[:num]))
        return _Got(num)

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

    def load(self, capsule: str) -> _Record | None:
        return self._records.get(capsule)

    def keys(self) -> Sequence[int]:
        return list(self._slots)

    def take_lost(self) -> _Lost:
        lost, self._lost = self._lost, []
        return _Lost(lost)

    def close(self) -> None:
        """Do nothing: it is gone with its engine."""


class TimedMover:
    """A mover whose moves end by the clock: those of a tier one after another, the tiers side by side."""

    def __init__(self, copier: Copier, config: TierConfig, block_size: int) -> None:
        self._copier = copier
        self._config = config
        self._block_s = {tier: config.block_s(tier, block_size) for tier in (HOST, DISK)}
        self._free_at = {HOST: 0.0, DISK: 0.0}
        self._under_way: list[tuple[float, int, Move, float]] = []  # by end, and number

    def start(self, move: Move) -> None:
        tier = move.tier
        seconds = self._config.latency_s(tier) + move.num_blocks * self._block_s[tier]
        end = max(self._copier.clock(), self._free_at[tier]) + seconds
        self._free_at[tier] = end
        heapq.heappush(self._under_way, (end, move.number, move, seconds))

    def done(self) -> Sequence[Moved]:
        done = []
        while self.has_done:
            _, _, move, seconds = heapq.heappop(self._under_way)
            done.append(self._copier.carry_out(move)._replace(seconds=seconds))
        return done

    @property
    def next_due(self) -> float:
        """The end of the next move; infinite if none is under way."""
        return self._under_way[0][0] if self._under_way else inf

    @property
    def has_done(self) -> bool:
        return self.next_due <= self._copier.clock()

    def notify(self, call: Callable[[], None]) -> None:
        """Do nothing: a driver knows from `next_due`."""

    def close(self) -> None:
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
        self, config: TierConfig, *, block_size: int, clock: Callable[[], float], timed: _Timed
    ) -> None:
        """Raises ConfigError."""
        self._config = config.validate()
        self._block_size = block_size
        self._clock = clock
        self._timed = timed
        self._mover: TimedMover | None = None

    def make(self, journal: Journal, memory: KVMemory) -> LowerTiers:
        """See `MakeTiers`."""
        config, size = self._config, self._block_size
        num_disk = config.disk_tokens // size
        arena = np.empty((config.host_tokens // size, memory.block_nbytes), np.uint8)
        disk = DiskBooks(num_disk) if num_disk else None
        copier = Copier(memory, arena, disk, self._clock)
        self._mover = TimedMover(copier, config, size)
        prices = _StepPrices(size * config.token_nbytes, self._timed)
        return LowerTiers(journal, copier, prices=prices, mover=self._mover)

    @property
    def next_due(self) -> float:
        """The end of the next move; infinite if none is under way."""
        assert self._mover is not None, "made first"
        return self._mover.next_due
