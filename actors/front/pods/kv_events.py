"""KV events of vLLM and SGLang as ours: decoded, put in order, and named by our block hashes.

A message is `(topic, 8-byte big-endian number, msgpack)`. Batches and events are maps or arrays by version
and engine; both are read. Engines name blocks as they like; an event has the block's tokens, so each block
gets the chain hash that a prompt's would have (`protocol.hashing`), and its name is kept for its removal.
A block whose parent is not known is left out, and with it what follows on it: never re-rooted. So are blocks
with images in them, and those of layer groups other than full attention.
Source: vLLM vllm/distributed/kv_events.py, vllm/v1/core/kv_cache_utils.py (generate_block_hash_extra_keys).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from mallee.protocol.errors import CodecError
from mallee.protocol.events import Cleared, Event, Removed, Stored
from mallee.protocol.hashing import block_hashes
from mallee.protocol.ids import Incarnation

MAX_EVENTS: Final = 65_536  # of a message
MAX_WAITING: Final = 4096  # batches, while a replay is on its way

_EngineHash: TypeAlias = int | bytes
_STORED_FIELDS: Final = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    *("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
)
_REMOVED_FIELDS: Final = ("block_hashes", "medium", "group_idx")
_FIELDS: Final[Mapping[str, Sequence[str]]] = {
    "BlockStored": _STORED_FIELDS,
    "BlockRemoved": _REMOVED_FIELDS,
    "AllBlocksCleared": (),
}
_TIERS: Final = {"gpu": 0, "device": 0, "cpu": 1, "host": 1, "disk": 2, "storage": 2, "fs": 2}


class PodStored(NamedTuple):
    """An engine's BlockStored. `keys`: of each block, beside its tokens; () where the engine tells none."""

    hashes: tuple[_EngineHash, ...]
    parent: _EngineHash | None
    tokens: list[int]
    block_size: int
    tier: int
    adapter: str
    keys: tuple[tuple[Any, ...], ...]
    group: int


class PodRemoved(NamedTuple):
    """An engine's BlockRemoved."""

    hashes: tuple[_EngineHash, ...]
    tier: int
    group: int


class PodCleared(NamedTuple):
    """An engine's AllBlocksCleared."""


PodEvent: TypeAlias = PodStored | PodRemoved | PodCleared


def salt_of(adapter: str, cache_salt: str) -> str:
    """The salt of blocks computed with a LoRA adapter and for a cache salt; empty with neither."""
    return f"{adapter}\n{cache_salt}" if adapter or cache_salt else ""


def decode_batch(raw: bytes) -> list[PodEvent]:
    """The events of a message, but those of no use here. Raises CodecError."""
    try:
        batch: Any = msgspec.msgpack.decode(raw)
        events = batch["events"] if isinstance(batch, dict) else batch[1]
        if not isinstance(events, list) or len(events) > MAX_EVENTS:
            raise TypeError(f"no list of at most {MAX_EVENTS} events")
        found = [_event(event) for event in events]
    except (msgspec.DecodeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise CodecError(f"a message of {len(raw)} bytes has no KV events: {error!r}") from error
    return [event for event in found if event is not None]


def _event(event: Any) -> PodEvent | None:
    """None: of a kind, a medium or a group that is not followed."""
    if isinstance(event, dict):
        kind, fields = event["type"], event
    else:
        kind, fields = event[0], dict(zip(_FIELDS.get(event[0], ()), event[1:], strict=False))
    if kind == "AllBlocksCleared":
        return PodCleared()
    if kind not in _FIELDS:
        return None
    medium = fields.get("medium")
    tier = 0 if medium is None else _TIERS.get(str(medium).lower())
    if tier is None or fields.get("kv_cache_spec_kind") not in (None, "full_attention", "mla"):
        return None
    hashes = tuple(fields["block_hashes"])
    group = fields.get("group_idx") or 0
    if kind == "BlockRemoved":
        return PodRemoved(hashes, tier, group)
    adapter = fields.get("lora_name") or (
        str(fields["lora_id"]) if fields.get("lora_id") is not None else ""
    )
    return PodStored(
        hashes=hashes,
        parent=fields["parent_block_hash"],
        tokens=fields["token_ids"],
        block_size=int(fields["block_size"]),
        tier=tier,
        adapter=adapter,
        keys=tuple(tuple(each or ()) for each in fields.get("extra_keys") or ()),
        group=group,
    )


class _Block(NamedTuple):
    chain: int
    salt: str
    tiers: int  # a bit each


class BlockNames:
    """The blocks of one engine by its own names, and theirs in our index. At most `max_blocks` are known."""

    def __init__(
        self,
        block_size: int,
        *,
        max_blocks: int,
        salt_of: Callable[[str, str], str] = salt_of,
    ) -> None:
        """`salt_of` an adapter and a cache salt: that of our hashes."""
        self._block_size = block_size
        self._salt_of = salt_of
        self.max_blocks = max_blocks
        self._blocks: dict[tuple[int, _EngineHash], _Block] = {}
        self._holders: dict[tuple[int, int], int] = {}  # (chain hash, tier): engine's names for it
        self.adapters: set[str] = set()
        self.num_unknown = 0  # blocks that could not be named

    def __len__(self) -> int:
        return len(self._blocks)

    def translate(self, events: Sequence[PodEvent]) -> list[Event]:
        """The same as events of ours; those that change nothing are left out."""
        found: list[Event] = []
        for event in events:
            match event:
                case PodStored():
                    found += self._store(event)
                case PodRemoved():
                    found += self._remove(event)
                case PodCleared():
                    self.clear()
                    found.append(Cleared())
        return found

    def clear(self) -> None:
        """Forget all."""
        self._blocks.clear()
        self._holders.clear()

    def holds(self, chain: int) -> bool:
        """Whether a block is on the device."""
        return (chain, 0) in self._holders

    def held(self, tier: int) -> bytes:
        """The hashes of the blocks in `tier`, as messages have them."""
        return _packed([chain for chain, each in self._holders if each == tier])

    def contents(self) -> list[Event]:
        """All that the engine holds, as if it had just stored it."""
        by_tier: dict[int, list[int]] = {}
        for chain, tier in self._holders:
            by_tier.setdefault(tier, []).append(chain)
        return [_stored(chains, tier) for tier, chains in sorted(by_tier.items())]

    def check(self) -> None:
        """Raises AssertionError unless holders are counted as the blocks say."""
        counted: dict[tuple[int, int], int] = {}
        for block in self._blocks.values():
            for tier in _bits(block.tiers):
                key = (block.chain, tier)
                counted[key] = counted.get(key, 0) + 1
        assert counted == self._holders, "holders differ from blocks"

    def _store(self, event: PodStored) -> list[Event]:
        chains = self._chains(event)
        fresh: list[int] = []
        for name, (chain, salt) in zip(event.hashes, chains, strict=False):
            key = (event.group, name)
            known = self._blocks.pop(key, None)  # put again at the end: the youngest
            if known is not None and known.chain != chain:
                fresh_tiers = _bits(known.tiers)
                self._release(known.chain, fresh_tiers)
                known = None
            tiers = 0 if known is None else known.tiers
            self._blocks[key] = _Block(chain, salt, tiers | 1 << event.tier)
            if not tiers >> event.tier & 1:
                holder = (chain, event.tier)
                self._holders[holder] = self._holders.get(holder, 0) + 1
                if self._holders[holder] == 1:
                    fresh.append(chain)
        self.num_unknown += len(event.hashes) - len(chains)
        stored = [_stored(fresh, event.tier)] if fresh else []
        return [*stored, *self._trim()]

    def _chains(self, event: PodStored) -> list[tuple[int, str]]:
        """Our hash and the salt of each block, as far as they can be known."""
        size = self._block_size
        if event.block_size != size or len(event.tokens) != size * len(event.hashes):
            return []
        if event.parent is None:
            parent, salt = None, self._salt_of(event.adapter, _cache_salt(event))
        else:
            block = self._blocks.get((event.group, event.parent))
            if block is None:
                return []
            parent, salt = block.chain, block.salt
        if event.adapter:
            self.adapters.add(event.adapter)
        num = _num_plain(event, salt)
        tokens = event.tokens[: num * size]
        hashes = block_hashes(tokens, size, salt=salt, parent=parent)
        return [(chain, salt) for chain in hashes.tolist()]

    def _remove(self, event: PodRemoved) -> list[Event]:
        gone: list[int] = []
        for name in event.hashes:
            key = (event.group, name)
            known = self._blocks.get(key)
            if known is None or not known.tiers >> event.tier & 1:
                continue
            tiers = known.tiers & ~(1 << event.tier)
            if tiers:
                self._blocks[key] = known._replace(tiers=tiers)
            else:
                del self._blocks[key]
            gone += self._release(known.chain, (event.tier,))
        return [_removed(gone, event.tier)] if gone else []

    def _release(self, chain: int, tiers: Sequence[int]) -> list[int]:
        """`chain`, once for each of `tiers` in which no other name holds it."""
        gone = []
        for tier in tiers:
            left = self._holders[chain, tier] - 1
            if left:
                self._holders[chain, tier] = left
            else:
                del self._holders[chain, tier]
                gone.append(chain)
        return gone

    def _trim(self) -> list[Event]:
        """Forget the oldest beyond the bound."""
        removed: list[Event] = []
        while len(self._blocks) > self.max_blocks:
            block = self._blocks.pop(next(iter(self._blocks)))
            for tier in _bits(block.tiers):
                removed += [_removed([c], tier) for c in self._release(block.chain, (tier,))]
        return removed


def _bits(tiers: int) -> tuple[int, ...]:
    return tuple(tier for tier in range(3) if tiers >> tier & 1)


def _stored(chains: list[int], tier: int) -> Stored:
    return Stored(_packed(chains), tier)


def _removed(chains: list[int], tier: int) -> Removed:
    return Removed(_packed(chains), tier)


def _packed(chains: list[int]) -> bytes:
    return b"".join(chain.to_bytes(8, "little") for chain in chains)


def _cache_salt(event: PodStored) -> str:
    """The cache salt of a chain that begins with this event: its keys name the adapter, and that."""
    keys = event.keys[0] if event.keys else ()
    salts = [key for key in keys if isinstance(key, str) and key != event.adapter]
    return salts[0] if len(salts) == 1 else ""


def _num_plain(event: PodStored, salt: str) -> int:
    """The leading blocks that tokens, adapter and salt alone make what they are."""
    adapter, _, cache_salt = salt.partition("\n")
    named = {adapter, cache_salt}
    for number, keys in enumerate(event.keys):
        if not all(isinstance(key, str) and key in named for key in keys):
            return number
    return len(event.hashes)


class Arrival(NamedTuple):
    """Work for the caller: forget the engine's blocks, then take in batches."""

    clear: bool = False
    batches: tuple[bytes, ...] = ()


class EventOrder:
    """The order of one engine's batches: gaps, replays, restarts. Pure; numbers start at 0 in each life.

    With replays, live batches wait until a replay has brought those before them: at first, after a gap and in
    a new life (`wants_replay`). `is_whole`: all since the life's start was taken in, so that what is not
    known is not there.
    """

    def __init__(self, *, can_replay: bool) -> None:
        self._can_replay = can_replay
        self._last_live: int | None = None
        self.has_restarted = False  # by its numbers, since `new_life`
        self.num_gaps = 0
        self._reset()

    def _reset(self) -> None:
        self._next: int | None = None  # the number that comes next; None: nothing was taken in
        self._waiting: dict[int, bytes] | None = {} if self._can_replay else None
        self._is_replaying = False
        self.wants_replay = self._can_replay
        self.is_whole = False

    def new_life(self) -> bool:
        """The engine was restarted, by its metrics. False: its numbers have said so before."""
        was_seen, self.has_restarted = self.has_restarted, False
        if not was_seen:
            self._last_live = None
            self._reset()
        return not was_seen

    def on_live(self, seq: int, payload: bytes) -> Arrival:
        """A batch as it was published."""
        is_back = self._last_live is not None and seq <= self._last_live
        is_reborn = is_back or (seq == 0 and bool(self._next))
        self._last_live = seq
        if is_reborn:
            self.has_restarted = True
            self._reset()
        if seq == 0 and self._next is None and not self._is_replaying:
            self._waiting, self.wants_replay = None, False  # nothing came before it
        if self._waiting is None and self._can_replay and seq > (self._next or 0):
            self._waiting, self.wants_replay = {}, True
            self.num_gaps += 1
        if self._waiting is None:
            return Arrival(is_reborn, self._taken({seq: payload}))
        self._waiting[seq] = payload
        if len(self._waiting) > MAX_WAITING:
            del self._waiting[min(self._waiting)]
        return Arrival(is_reborn)

    def begin_replay(self) -> int:
        """The number to replay from."""
        self.wants_replay, self._is_replaying = False, True
        return self._next or 0

    def on_replayed(self, seq: int, payload: bytes) -> Arrival:
        """A batch of the replay that began last; those taken in before are skipped."""
        return Arrival(False, self._taken({seq: payload}) if self._is_replaying else ())

    def end_replay(self, *, is_complete: bool) -> Arrival:
        """No more comes, or none came; the live batches that waited follow."""
        if not self._is_replaying:
            return Arrival()  # another life began meanwhile
        if is_complete and self._next is None:
            self._next, self.is_whole = 0, True  # it has published nothing yet
        waiting, self._waiting, self._is_replaying = self._waiting or {}, None, False
        return Arrival(False, self._taken(waiting))

    def _taken(self, batches: Mapping[int, bytes]) -> tuple[bytes, ...]:
        """Those of `batches` that are new, in order."""
        new = sorted(seq for seq in batches if self._next is None or seq >= self._next)
        for seq in new:
            if self._next is None:
                self.is_whole = seq == 0
            elif seq > self._next:
                self.num_gaps += not self._can_replay
                self.is_whole = False
            self._next = seq + 1
        return tuple(batches[seq] for seq in new)


class PodContents:
    """One engine's blocks, from its messages to numbered events of ours for the router."""

    def __init__(
        self,
        block_size: int,
        *,
        can_replay: bool,
        max_blocks: int,
        salt_of: Callable[[str, str], str] = salt_of,
    ) -> None:
        self.order = EventOrder(can_replay=can_replay)
        self.names = BlockNames(block_size, max_blocks=max_blocks, salt_of=salt_of)
        self.incarnation = Incarnation(0)
        self.next_seq = 0  # of our events, in this life
        self.num_refused = 0  # messages that could not be read

    def begin_life(self, incarnation: Incarnation) -> list[Event]:
        """Number events anew; returns what is known to be held already, which is to be told first."""
        if self.order.new_life():
            self.names.clear()
        self.incarnation, self.next_seq = incarnation, 0
        return self.names.contents()

    def take(self, arrival: Arrival) -> list[Event]:
        """The events in `arrival`."""
        events: list[Event] = []
        if arrival.clear:
            self.names.clear()
            events.append(Cleared())
        for payload in arrival.batches:
            try:
                events += self.names.translate(decode_batch(payload))
            except CodecError:
                self.num_refused += 1
                self.order.is_whole = False
        return events
