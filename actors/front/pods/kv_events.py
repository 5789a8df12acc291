"""KV events of vLLM and SGLang as ours: decoded, counted by copies, and named by our block hashes.

A message is `(topic, 8-byte big-endian number, msgpack)`. Batches and events are maps or arrays by version
and engine; both are read. Engines name blocks as they like; an event has the block's tokens, so each block
gets the chain hash that a prompt's would have (`protocol.hashing`). Its name is kept, for its removal, for
what follows on it, and for stores in lower tiers, which may have no tokens. A block whose parent is not known
is left out, and with it what follows on it: never re-rooted. So are blocks with images in them, remote
copies, and layer groups other than full attention; `BlockNames.left_out` counts them by reason.

An engine may hold a block several times: each copy is stored and removed by itself, and the block is held
until the last copy of a tier is gone.
Source: vLLM 0.32 docs/features/kv_events.md, vllm/distributed/kv_events.py, vllm/v1/core/block_pool.py;
SGLang python/sglang/srt/disaggregation/kv_events.py, python/sglang/srt/mem_cache/events.py.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from mallee.actors.front.pods.event_order import Arrival, EventOrder
from mallee.protocol.errors import CodecError
from mallee.protocol.events import Cleared, Event, Removed, Stored
from mallee.protocol.hashing import block_hashes
from mallee.protocol.ids import Incarnation

MAX_EVENTS: Final = 65_536  # of a message

_EngineHash: TypeAlias = int | bytes
_Key: TypeAlias = tuple[int, _EngineHash]  # an engine's rank, and its name of a block
_STORED_FIELDS: Final = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    *("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
    *("locality", "ownership", "session_id"),
)
_SGLANG_STORED_FIELDS: Final = (*_STORED_FIELDS[:6], "cache_salt", "session_id", "lora_name")
_REMOVED_FIELDS: Final = ("block_hashes", "medium", "group_idx", "locality", "ownership")
_FULL_ATTENTION: Final = (None, "full_attention", "mla_attention", "sink_full_attention")
_OTHER_ATTENTION: Final = frozenset(
    {
        *("sliding_window", "sliding_window_mla", "mamba", "chunked_local_attention"),
        *("encoder_only_attention", "cross_attention"),
    }
)
_TIERS: Final = {
    **{"gpu": 0, "device": 0},
    **{"cpu": 1, "host": 1, "cpu_pinned": 1, "cpu_tier1": 1},
    **{"disk": 2, "storage": 2, "fs": 2, "obj": 2, "cpu_tier2": 2},
}


class Copy(NamedTuple):
    """The place of one copy of a block, as its store and its removal name it."""

    tier: int = 0
    group: int = 0  # of layers
    owner: str = ""


class PodStored(NamedTuple):
    """An engine's BlockStored. Without `tokens` it adds copies of blocks that are known by their names.

    `keys`: of each block, beside its tokens; () where the engine tells none. `salt` None: in `keys`, if any.
    """

    hashes: tuple[_EngineHash, ...]
    parent: _EngineHash | None
    tokens: list[int]
    block_size: int
    copy: Copy
    adapter: str
    salt: str | None
    keys: tuple[tuple[Any, ...], ...]


class PodRemoved(NamedTuple):
    """An engine's BlockRemoved: one copy less of each block."""

    hashes: tuple[_EngineHash, ...]
    copy: Copy


class PodCleared(NamedTuple):
    """An engine's AllBlocksCleared."""


class PodIgnored(NamedTuple):
    """An event that is not followed, for `reason`, and its number of blocks."""

    reason: str
    num_blocks: int


PodEvent: TypeAlias = PodStored | PodRemoved | PodCleared | PodIgnored


def salt_of(adapter: str, cache_salt: str) -> str:
    """The salt of blocks computed with a LoRA adapter and for a cache salt; empty with neither."""
    return f"{adapter}\n{cache_salt}" if adapter or cache_salt else ""


def decode_batch(raw: bytes) -> list[PodEvent]:
    """The events of a message. Raises CodecError."""
    try:
        batch: Any = msgspec.msgpack.decode(raw)
        events = batch["events"] if isinstance(batch, dict) else batch[1]
        if not isinstance(events, list) or len(events) > MAX_EVENTS:
            raise TypeError(f"no list of at most {MAX_EVENTS} events")
        return [_event(event) for event in events]
    except (LookupError, RecursionError, TypeError, ValueError) as error:
        raise CodecError(f"a message of {len(raw)} bytes has no KV events: {error!r}") from error


def _event(event: Any) -> PodEvent:
    kind, fields = _fields(event)
    if kind == "AllBlocksCleared":
        return PodCleared()
    if kind not in ("BlockStored", "BlockRemoved"):
        return PodIgnored("events of an unknown type", 0)
    hashes = tuple(fields["block_hashes"])
    parent, tokens = fields.get("parent_block_hash"), fields.get("token_ids", [])
    if not all(
        isinstance(name, int | bytes) for name in (*hashes, 0 if parent is None else parent)
    ):
        raise TypeError("names of blocks are neither numbers nor bytes")
    if not isinstance(tokens, list):
        raise TypeError("token_ids are no list")
    if (reason := _reason_to_ignore(fields)) is not None:
        return PodIgnored(reason, len(hashes) if kind == "BlockStored" else 0)
    copy = Copy(_tier(fields) or 0, fields.get("group_idx") or 0, fields.get("ownership") or "")
    if kind == "BlockRemoved":
        return PodRemoved(hashes, copy)
    adapter = fields.get("lora_name") or fields.get("lora_id")
    return PodStored(
        hashes=hashes,
        parent=parent,
        tokens=tokens,
        block_size=int(fields["block_size"]),
        copy=copy,
        adapter="" if adapter is None else str(adapter),
        salt=fields.get("cache_salt"),
        keys=tuple(tuple(each or ()) for each in fields.get("extra_keys") or ()),
    )


def _fields(event: Any) -> tuple[str, Mapping[str, Any]]:
    """The type of an event and its fields by name. Arrays have them by place, and those of SGLang differ."""
    if isinstance(event, dict):
        return event["type"], event
    kind, *values = event
    names: Sequence[str] = _REMOVED_FIELDS if kind == "BlockRemoved" else _STORED_FIELDS
    if kind == "BlockStored" and _is_sglang(values):
        names = _SGLANG_STORED_FIELDS
    return kind, dict(zip(names, values, strict=False))


def _is_sglang(values: Sequence[Any]) -> bool:
    """Whether a BlockStored ends with cache salt, session and adapter, as SGLang's.

    vLLM's ends with adapter, keys and group; an adapter comes with its number, `lora_id`, or with keys.
    """
    number, tail = values[4], values[6:9]
    is_vllm = number is not None or any(isinstance(value, list) for value in tail)
    return not is_vllm and any(isinstance(value, str) for value in tail)


def _tier(fields: Mapping[str, Any]) -> int | None:
    medium = fields.get("medium")
    return 0 if medium is None else _TIERS.get(str(medium).lower())


def _reason_to_ignore(fields: Mapping[str, Any]) -> str | None:
    kind = fields.get("kv_cache_spec_kind")
    if kind not in _FULL_ATTENTION:
        return f"layers of {kind}" if kind in _OTHER_ATTENTION else "layers of an unknown kind"
    if str(fields.get("locality")).upper() == "REMOTE" or fields.get("medium") == "EXTERNAL":
        return "copies elsewhere"
    return "an unknown medium" if _tier(fields) is None else None


class _Block(NamedTuple):
    chain: int
    salt: str
    copies: tuple[Copy, ...] = ()  # one that is there twice comes twice


class BlockNames:
    """The blocks of one pod by its engines' own names, and theirs in our index.

    At most `max_blocks` names are known; those of blocks that are no more go first. Engines of different
    ranks have names and copies of their own; the pod holds what one of them holds.
    """

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
        self._blocks: dict[_Key, _Block] = {}  # held, the youngest last
        self._gone: dict[_Key, _Block] = {}  # not held any more
        self._holders: dict[tuple[int, int], int] = {}  # (chain hash, tier): copies
        self.adapters: set[str] = set()
        self.left_out: Counter[str] = Counter()  # blocks that were not taken in, by reason
        self.num_unknown = 0  # of them, those that could not be named

    def __len__(self) -> int:
        return len(self._blocks)

    def translate(self, events: Sequence[PodEvent], rank: int = 0) -> list[Event]:
        """The same as events of ours; those that change nothing are left out."""
        found: list[Event] = []
        for event in events:
            match event:
                case PodStored():
                    found += self._store(rank, event)
                case PodRemoved():
                    found += self._remove(rank, event)
                case PodCleared():
                    found += self.clear(rank)
                case PodIgnored(reason, num_blocks):
                    self.left_out[reason] += num_blocks
        return found

    def clear(self, rank: int) -> list[Event]:
        """Forget all blocks of an engine, and their names."""
        held = [key for key in self._blocks if key[0] == rank]
        self._gone = {key: block for key, block in self._gone.items() if key[0] != rank}
        if len(held) == len(self._blocks):
            self._blocks.clear()
            self._holders.clear()
            return [Cleared()]
        return self._release([copy for key in held for copy in _places(self._blocks.pop(key))])

    def holds(self, chain: int) -> bool:
        """Whether a block is on the device."""
        return (chain, 0) in self._holders

    def held(self, tier: int) -> bytes:
        """The hashes of the blocks in `tier`, as messages have them."""
        return _packed([chain for chain, each in self._holders if each == tier])

    def contents(self) -> list[Event]:
        """All that the pod holds, as if it had just stored it."""
        by_tier: dict[int, list[int]] = {}
        for chain, tier in self._holders:
            by_tier.setdefault(tier, []).append(chain)
        return [Stored(_packed(chains), tier) for tier, chains in sorted(by_tier.items())]

    def check(self) -> None:
        """Raises AssertionError unless copies are counted as the blocks say, and the bound holds."""
        counted = Counter(place for block in self._blocks.values() for place in _places(block))
        assert counted == self._holders, "holders differ from blocks"
        assert all(block.copies for block in self._blocks.values()), "a block without copies"
        assert len(self._blocks) + len(self._gone) <= self.max_blocks, "too many names"

    def _store(self, rank: int, event: PodStored) -> list[Event]:
        named, reason = self._named(rank, event)
        # Lower tiers name what the device has named before: some tell no tokens, some no keys.
        is_by_name = not event.tokens or event.copy.tier > 0
        fresh: list[int] = []
        renamed: list[tuple[int, int]] = []
        for number, name in enumerate(event.hashes):
            key = (rank, name)
            known = self._find(key)
            block = named[number] if number < len(named) else None
            if known is not None and (is_by_name or (block and block.chain == known.chain)):
                block = known
            elif block is None:
                self.left_out[reason] += 1
                self.num_unknown += 1
                continue
            elif known is not None:
                renamed += _places(known)
            self._blocks.pop(key, None)  # put again at the end: the youngest
            self._gone.pop(key, None)
            self._blocks[key] = block._replace(copies=(*block.copies, event.copy))
            place = (block.chain, event.copy.tier)
            self._holders[place] = self._holders.get(place, 0) + 1
            if self._holders[place] == 1:
                fresh.append(block.chain)
        stored = [Stored(_packed(fresh), event.copy.tier)] if fresh else []
        return [*stored, *self._release(renamed), *self._trim()]

    def _find(self, key: _Key) -> _Block | None:
        return self._blocks.get(key) or self._gone.get(key)

    def _named(self, rank: int, event: PodStored) -> tuple[list[_Block], str]:
        """The blocks that the tokens of an event name, without copies; and why the others are not named."""
        size = self._block_size
        if not event.tokens:
            return [], "blocks by names that are not known"
        if event.block_size != size or len(event.tokens) != size * len(event.hashes):
            return [], f"blocks of other than {size} tokens"
        if event.parent is None:
            parent, salt = None, self._salt_of(event.adapter, _cache_salt(event))
        else:
            block = self._find((rank, event.parent))
            if block is None:
                return [], "blocks behind one that is not known"
            parent, salt = block.chain, block.salt
        num = _num_plain(event, salt)
        try:
            hashes = block_hashes(event.tokens[: num * size], size, salt=salt, parent=parent)
        except (TypeError, OverflowError):
            return [], "blocks of what is no token id"
        if event.adapter:
            self.adapters.add(event.adapter)
        return [
            _Block(chain, salt) for chain in hashes.tolist()
        ], "blocks with images or other keys"

    def _remove(self, rank: int, event: PodRemoved) -> list[Event]:
        lost: list[tuple[int, int]] = []
        for name in event.hashes:
            key = (rank, name)
            known = self._blocks.get(key)
            if known is None or event.copy not in known.copies:
                continue
            copies = list(known.copies)
            copies.remove(event.copy)
            lost.append((known.chain, event.copy.tier))
            if copies:
                self._blocks[key] = known._replace(copies=tuple(copies))
            else:
                del self._blocks[key]
                self._gone[key] = known._replace(copies=())
        return self._release(lost)

    def _release(self, lost: Sequence[tuple[int, int]]) -> list[Event]:
        """Count copies (chain hash, tier) that are no more; the events for those that were the last."""
        gone: dict[int, list[int]] = {}
        for place in lost:
            self._holders[place] -= 1
            if not self._holders[place]:
                del self._holders[place]
                gone.setdefault(place[1], []).append(place[0])
        return [Removed(_packed(chains), tier) for tier, chains in gone.items()]

    def _trim(self) -> list[Event]:
        """Forget the oldest beyond the bound."""
        lost: list[tuple[int, int]] = []
        while len(self._blocks) + len(self._gone) > self.max_blocks:
            oldest = self._gone or self._blocks
            block = oldest.pop(next(iter(oldest)))
            self.left_out["blocks beyond the bound"] += bool(block.copies)
            lost += _places(block)
        return self._release(lost)


def _places(block: _Block) -> list[tuple[int, int]]:
    return [(block.chain, copy.tier) for copy in block.copies]


def _packed(chains: list[int]) -> bytes:
    return b"".join(chain.to_bytes(8, "little") for chain in chains)


def _cache_salt(event: PodStored) -> str:
    """The cache salt of a chain that begins with this event; its keys name that, and the adapter."""
    if event.salt is not None:
        return event.salt
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


class PodContents:
    """One pod's blocks, from the messages of its engines to numbered events of ours for the router."""

    def __init__(
        self,
        block_size: int,
        *,
        max_blocks: int,
        salt_of: Callable[[str, str], str] = salt_of,
    ) -> None:
        self.orders: dict[int, EventOrder] = {}  # by the engine's rank
        self.names = BlockNames(block_size, max_blocks=max_blocks, salt_of=salt_of)
        self.incarnation = Incarnation(0)
        self.next_seq = 0  # of our events, in this life
        self.num_refused = 0  # messages that could not be read

    @property
    def is_whole(self) -> bool:
        """Whether all that the engines told since their start was taken in."""
        return bool(self.orders) and all(order.is_whole for order in self.orders.values())

    @property
    def num_gaps(self) -> int:
        """Times that events were found missing."""
        return sum(order.num_gaps for order in self.orders.values())

    @property
    def why_incomplete(self) -> str:
        """The reason why not all that the engines hold is known, for the user; "" if it is."""
        if self.is_whole:
            return ""
        if self.num_refused:
            return f"{self.num_refused} of its messages could not be read"
        if self.num_gaps:
            return "events were lost, and not repeated"
        if any(order.has_begun for order in self.orders.values()):
            return "its first events are not known: see replay_endpoint of --kv-events-config"
        return "no KV events have come yet"

    def reset(self) -> list[Event]:
        """Follow no engine, and forget all."""
        ranks, self.orders = list(self.orders), {}
        return [event for rank in ranks for event in self.names.clear(rank)]

    def follow(self, rank: int, *, can_replay: bool) -> EventOrder:
        """The order of an engine whose events are to be taken in from now on."""
        order = self.orders[rank] = EventOrder(can_replay=can_replay)
        return order

    def begin_life(self, incarnation: Incarnation) -> list[Event]:
        """Number events anew; returns what is known to be held already, which is to be told first."""
        for rank, order in self.orders.items():
            if order.new_life():
                self.names.clear(rank)
        self.incarnation, self.next_seq = incarnation, 0
        return self.names.contents()

    def take(self, arrival: Arrival, rank: int = 0) -> list[Event]:
        """The events in `arrival`."""
        events: list[Event] = []
        if arrival.clear:
            events += self.names.clear(rank)
        for payload in arrival.batches:
            try:
                batch = decode_batch(payload)
            except CodecError:
                self.num_refused += 1
                self.orders[rank].is_whole = False
                continue
            events += self.names.translate(batch, rank)
            is_last = payload is arrival.batches[-1]
            if is_last and any(isinstance(event, PodCleared) for event in batch):
                self.orders[rank].is_whole = True  # what may have been missed is no more
        return events
