"""Host memory and disk behind one worker's device: what is evicted goes there and comes back as bytes.

A block that the device evicts is written to host memory, if it is not there; what host memory has no
room for goes on to disk, and then is gone. Both forget the block that was used longest ago. A prompt
that finds its next blocks below the device fetches them: their bytes over the tier's bandwidth take the
place of compute, and the tier keeps its copy. Writing down is counted, but takes no time: it goes on
beside the steps. The router learns of all this by tier-tagged events, in one numbering with the
engine's own. Doesn't know engines: it gets their events.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from mallee.protocol.errors import ConfigError
from mallee.protocol.events import (
    Cleared,
    Event,
    EventBatch,
    Removed,
    Snapshot,
    Stored,
    pack_hashes,
    unpack_hashes,
)
from mallee.protocol.hashing import Hashes

HOST: Final = 1
DISK: Final = 2
TOKEN_NBYTES: Final = (2 << 20) // 16  # 32 layers, 8 KV heads of 128, keys and values in bf16


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """The link over which KV moves between workers; each pull has one of its own.

    The defaults are the router's (`router.placement.fanouts`): an 8B model with 8 KV heads in bf16, 25 GB/s.
    """

    bytes_s: float = 25e9
    latency_s: float = 2e-3
    token_nbytes: int = TOKEN_NBYTES

    def validate(self) -> "LinkConfig":
        """Itself. Raises ConfigError naming what is out of range."""
        if not 0.0 < self.bytes_s < float("inf"):
            raise ConfigError(f"bytes_s={self.bytes_s}: give bytes per second above 0")
        if not 0.0 <= self.latency_s < float("inf"):
            raise ConfigError(f"latency_s={self.latency_s}: give 0 or more seconds")
        if self.token_nbytes < 1:
            raise ConfigError(f"token_nbytes={self.token_nbytes}: give at least 1")
        return self

    @property
    def token_s(self) -> float:
        """Seconds for one token, once the first is there."""
        return self.token_nbytes / self.bytes_s

    def pull_s(self, num_tokens: int) -> float:
        """Seconds until so many tokens are there; none take none."""
        return self.latency_s + num_tokens * self.token_s if num_tokens else 0.0


@dataclass(frozen=True, slots=True)
class TierConfig:
    """Tokens that each tier holds, bytes per second to the device, bytes of KV of a token.

    0 tokens: no such tier; only whole blocks count.

    The defaults are the router's (`router.placement.pricing`): 2 MiB for 16 tokens over 25 and 4 GB/s.
    """

    host_tokens: int = 0
    disk_tokens: int = 0
    host_bytes_s: float = 25e9
    disk_bytes_s: float = 4e9
    token_nbytes: int = TOKEN_NBYTES

    def validate(self) -> "TierConfig":
        """Itself. Raises ConfigError naming what is out of range."""
        for name in ("host_tokens", "disk_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)}: give 0 (none) or more")
        for name in ("host_bytes_s", "disk_bytes_s"):
            if not 0.0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}={getattr(self, name)}: give bytes per second above 0")
        if self.token_nbytes < 1:
            raise ConfigError(f"token_nbytes={self.token_nbytes}: give at least 1")
        return self

    def host_block_s(self, block_size: int) -> float:
        """Seconds to fetch a block from host memory: what `CostModel.host_block_s` should say."""
        return block_size * self.token_nbytes / self.host_bytes_s

    def disk_block_s(self, block_size: int) -> float:
        return block_size * self.token_nbytes / self.disk_bytes_s


class Supply(NamedTuple):
    """The first `num_tokens` of a prompt are moved, not computed, in so many seconds each."""

    num_tokens: int
    seconds_per_token: float


NOTHING: Final = Supply(0, 0.0)


class TierStats(NamedTuple):
    """Counts since the worker's birth."""

    num_written: int  # to host memory
    num_spilled: int  # from there to disk
    num_fetched_host: int
    num_fetched_disk: int
    fetched_nbytes: int


class _Lru:
    """Hashes in the order of their last use."""

    __slots__ = ("_held", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._held: dict[int, None] = {}

    def __contains__(self, value: int) -> bool:
        return value in self._held

    def __len__(self) -> int:
        return len(self._held)

    def use(self, value: int) -> bool:
        """Make `value` the youngest. False if it is new."""
        is_known = value in self._held
        if is_known:
            del self._held[value]
        self._held[value] = None
        return is_known

    def surplus(self) -> int | None:
        """The oldest, taken out, if there are more than fit."""
        if len(self._held) <= self.size:
            return None
        oldest = next(iter(self._held))
        del self._held[oldest]
        return oldest

    def hashes(self) -> bytes:
        return pack_hashes(np.fromiter(self._held, dtype=np.uint64, count=len(self._held)))


class Tiers:
    """One worker's, for one life. Owns the numbering of that life's events: see `extend`."""

    def __init__(self, config: TierConfig, *, block_size: int) -> None:
        self.config = config.validate()
        self.next_seq = 0  # the number of the worker's next event, those of lower tiers counted
        self._block_size = block_size
        self._host_block_s = config.host_block_s(block_size)
        self._disk_block_s = config.disk_block_s(block_size)
        self._engine_seq = 0
        self._clear()
        self._num_written = self._num_spilled = 0
        self._num_fetched = [0, 0, 0]  # by tier

    def submitting(self, hashes: Hashes, device_blocks: int) -> Supply:
        """The supply of a prompt with these full blocks, the first `device_blocks` on the device.

        As far as the lower tiers go on without a gap. They count as used now. The last token of them is
        computed: it may be the prompt's, and KV alone has no logits for the next.
        """
        found: list[int] = []
        num_host = 0
        for value in hashes[device_blocks:].tolist():
            if value in self._host:
                num_host += 1
            elif value not in self._disk:
                break
            found.append(value)
        if not found:
            return NOTHING
        for value in reversed(found):  # the first of a text is the last to be forgotten
            (self._host if value in self._host else self._disk).use(value)
        num_disk = len(found) - num_host
        self._num_fetched[HOST] += num_host
        self._num_fetched[DISK] += num_disk
        seconds = num_host * self._host_block_s + num_disk * self._disk_block_s
        num_fetched = len(found) * self._block_size
        return Supply(device_blocks * self._block_size + num_fetched - 1, seconds / num_fetched)

    def extend(self, batch: EventBatch | None) -> EventBatch | None:
        """The engine's batch with what it means for the lower tiers, numbered anew. To be delivered.

        Every batch of the engine's life must pass here, in order.
        """
        if batch is None:
            return None
        assert batch.first_seq == self._engine_seq, "a batch was left out"
        self._engine_seq = batch.next_seq
        events: list[Event] = []
        for event in batch.events:
            events.append(event)
            if isinstance(event, Removed) and not event.tier:
                events += self._sink(unpack_hashes(event.hashes).tolist())
            elif isinstance(event, Cleared):
                self._clear()
        grown = EventBatch(batch.worker, batch.incarnation, self.next_seq, tuple(events))
        self.next_seq = grown.next_seq
        return grown

    def _clear(self) -> None:
        self._host = _Lru(self.config.host_tokens // self._block_size)
        self._disk = _Lru(self.config.disk_tokens // self._block_size)

    def snapshot(self, snapshot: Snapshot) -> Snapshot:
        """The engine's snapshot with what is below the device."""
        return Snapshot(
            snapshot.worker,
            snapshot.incarnation,
            self.next_seq,
            snapshot.hashes,
            snapshot.capsules,
            self._host.hashes(),
            self._disk.hashes(),
        )

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        for lru in (self._host, self._disk):
            assert len(lru) <= lru.size, f"{len(lru)} blocks of {lru.size}"
        assert self.next_seq >= self._engine_seq, "events got lost"

    def stats(self) -> TierStats:
        _, from_host, from_disk = self._num_fetched
        return TierStats(
            self._num_written,
            self._num_spilled,
            from_host,
            from_disk,
            (from_host + from_disk) * self._block_size * self.config.token_nbytes,
        )

    def _sink(self, evicted: Iterable[int]) -> list[Event]:
        """Write blocks that the device evicted, in this order, to the tiers below."""
        written: list[int] = []
        lost: list[int] = []
        for value in evicted:
            if self._host.size and not self._host.use(value):
                written.append(value)
            elif not self._host.size:
                lost.append(value)
        while (oldest := self._host.surplus()) is not None:
            lost.append(oldest)
        self._num_written += len(written)
        spilled: list[int] = []
        gone: list[int] = []
        if self._disk.size:
            spilled = [value for value in lost if not self._disk.use(value)]
            while (oldest := self._disk.surplus()) is not None:
                gone.append(oldest)
        self._num_spilled += len(spilled)
        dropped = lost if self._host.size else []
        events: list[Event] = []
        for tier, stored, removed in ((HOST, written, dropped), (DISK, spilled, gone)):
            if stored:
                events.append(Stored(_packed(stored), tier))
            if removed:
                events.append(Removed(_packed(removed), tier))
        return events


def _packed(values: list[int]) -> bytes:
    return pack_hashes(np.array(values, dtype=np.uint64))
