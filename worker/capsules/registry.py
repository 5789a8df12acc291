"""Capsules: where each lies, how long it stays, and the budget of those that were asked for.

One id is one text, wherever it is computed: a capsule that is made again under its id takes the place of
the one that is there, and is announced anew; its release is not published, for the id goes on.

Two kinds. *Kept* capsules were asked for: they stay until released or until their time to live has
passed since their last use. What they hold can't be evicted, so there is a limit to it, and a request that
would pass it is refused before anything is computed. On the device it is a share of the blocks. A capsule
that is parked can do without those, but its text, keys and state are in this process's memory: bytes, which
are counted as they are stored. *Replaceable* ones are what finished answers leave behind: they stay while
there is room, least recently used out first.

A capsule may lie on the device, in a tier below it, or in both: then it gives up its device blocks where
there is no room for others.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Final, NamedTuple

import numpy as np

from mallee.protocol.codec import encode
from mallee.protocol.errors import CapsulesFull, InvalidParameter, UnknownCapsule
from mallee.protocol.events import CapsuleReleased, CapsuleStored, pack_hashes
from mallee.protocol.hashing import NO_HASHES
from mallee.protocol.ids import CapsuleId, RequestId, capsule_id, owner_of, request_of
from mallee.protocol.messages import CapsuleStatus, Pin, Rewind
from mallee.worker.capsules.capsule import (
    Capsule,
    Parked,
    TextKV,
    begun,
    blocks_of,
    cut,
    kv_of,
    lengthened,
)
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.node import Node
from mallee.worker.kv.paths import with_ancestors
from mallee.worker.kv.text import Text
from mallee.worker.kv.tree import BranchTree
from mallee.worker.kv.usage import sole_blocks
from mallee.worker.transfer.lower import LowerTiers
from mallee.worker.transfer.values import DEVICE, HOST, TIER_NAMES

CAPSULE_NBYTES: Final = 1024
"""Of a parked capsule: its objects and its places in tables, about."""
TOKEN_NBYTES: Final = 4
KEY_NBYTES: Final = 44  # an integer and its place in a tuple


class CapsuleLimits(NamedTuple):
    """Bounds on the capsules of one engine."""

    max_replaceable: int
    max_kept_blocks: int  # of the device, that kept ones hold
    max_parked_nbytes: int  # of this process's memory, that kept ones take which are parked
    row_blocks: int  # that the logits of a kept capsule are worth on the device
    row_nbytes: int
    state_nbytes: int = 0  # of recurrent layers, that each capsule has


class CapsuleStats(NamedTuple):
    """Counts of live capsules, of replaceable ones pushed out, and of those that found no room to be kept."""

    kept: int
    replaceable: int
    num_replaced: int
    num_refused: int
    nbytes_below: int  # of this process's memory, that kept capsules below the device take
    num_by_tier: tuple[int, ...]  # of kept ones, by the lowest tier where each lies
    blocks_by_tier: tuple[int, ...]  # of those, as if they shared none
    max_blocks: int  # that kept ones may hold on the device


class _Weight(NamedTuple):
    """The budget that a kept capsule takes: blocks of `node`, or bytes if it is parked."""

    node: Node | None = None  # None: the device can do without its blocks
    num_blocks: int = 0  # as if it shared none
    nbytes: int = 0


@dataclass(slots=True)
class _Entry:
    """A capsule that is here. It is a value: one that moves is another one in the same entry.

    `weight`: of a kept capsule; a replaceable one has none. Without a `ttl_s` it does not end by itself.
    """

    capsule: Capsule
    weight: _Weight | None
    ttl_s: float = 0.0


class CapsuleRegistry:
    """Capsules by id. Each holds its node in the tree, and its copy below; letting go is `release`."""

    def __init__(
        self,
        tree: BranchTree,
        journal: Journal,
        limits: CapsuleLimits,
        *,
        clock: Callable[[], float],
        lower: LowerTiers | None = None,
    ) -> None:
        self.limits = limits
        self.next_expiry = inf
        """Nothing expires before, on the clock."""
        self._tree = tree
        self._journal = journal
        self._clock = clock
        self._lower = lower
        self._entries: dict[CapsuleId, _Entry] = {}
        self._num_left: dict[str, int] = {}  # capsules here by request
        # The least recently used first.
        self._replaceable: OrderedDict[CapsuleId, None] = OrderedDict()
        self._in_both: OrderedDict[CapsuleId, None] = OrderedDict()
        self._expires: dict[CapsuleId, float] = {}
        self._promised: dict[str, int] = {}  # request -> blocks that its capsule will add, at most
        self._promised_nbytes = 0  # to capsules that are being parked
        # Of kept capsules.
        self._num_blocks = 0  # shared ones counted for each
        self._nbytes_parked = 0
        self._num_replaced = self._num_refused = 0

    # Asking

    def check_unused(self, request: str) -> None:
        """Raises InvalidParameter if a branch of an earlier request of this name left a capsule."""
        if request in self._num_left:
            raise InvalidParameter("request", request, "this id was used; ids are used once")

    def check_owner(self, capsule: str, salt: str) -> None:
        """Raises InvalidParameter if `capsule` is here, and is no text of `salt`."""
        found = self.peek(capsule)
        if found is not None and found.salt != salt:
            raise InvalidParameter("capsule", capsule, "this id is in use by another tenant")

    def get(self, capsule: str) -> Capsule:
        """The capsule, now the most recently used. Raises UnknownCapsule; CorruptKV, if checked."""
        if self.next_expiry <= self._clock():
            self.expire()
        key = CapsuleId(capsule)
        entry = self._entries.get(key)
        if entry is None:
            raise UnknownCapsule(capsule)
        if entry.weight is None:
            self._replaceable.move_to_end(key)
        elif entry.ttl_s:
            self._postpone(key, entry.ttl_s)
        if key in self._in_both:
            self._in_both.move_to_end(key)
        found = entry.capsule
        if found.node is not None:
            self._tree.verify(found.node)
        return found

    def peek(self, capsule: str) -> Capsule | None:
        """The capsule, if it is here; not used by this. From any thread."""
        entry = self._entries.get(CapsuleId(capsule))
        return None if entry is None else entry.capsule

    def ttl_s(self, capsule: Capsule) -> float | None:
        """The time to live of `capsule`, which is here; 0: it has none, None: it is replaceable."""
        entry = self._entries[capsule.id]
        return None if entry.weight is None else entry.ttl_s

    def status(self, capsule: Capsule, block_nbytes: int) -> CapsuleStatus:
        """`capsule`, which is here, as it is now. O(nodes above it)."""
        num_blocks = -(-capsule.num_computed // self._tree.block_size)
        own = num_blocks if capsule.node is None else sole_blocks({capsule.node: 1})
        row_nbytes = self.limits.row_nbytes if capsule.logits is not None else 0
        row_nbytes += self.limits.state_nbytes if num_blocks else 0
        expires = self._expires.get(capsule.id)
        tier = self._tier(capsule)
        return CapsuleStatus(
            capsule.id,
            capsule.boundary,
            nbytes=own * block_nbytes + 4 * len(capsule.pending) + row_nbytes,
            shared_nbytes=(num_blocks - own) * block_nbytes,
            is_pinned=capsule.id not in self._replaceable,
            ttl_s=None if expires is None else max(0.0, expires - self._clock()),
            drawn=None if capsule.continuation is None else capsule.continuation.drawn,
            tier="none" if tier is None else TIER_NAMES[tier],
            aligned=self._tree.aligned_len(capsule.boundary),
        )

    def _tier(self, capsule: Capsule) -> int | None:
        """The tier where the last of its KV lies; None: its text is here, but some of its KV is gone."""
        parked = capsule.parked
        if capsule.node is not None or parked is None:
            return DEVICE
        if parked.is_sure:
            return parked.tier
        assert self._lower is not None, "parked, without tiers"
        kv = parked.kv
        full = np.array(kv.keys[: len(kv.tokens) // self._tree.block_size], np.uint64)
        rest = kv.all_keys[self._tree.find(full) :]  # the others are still cached on the device
        return self._lower.tier_of(rest) if rest else DEVICE

    # Coming and going

    @property
    def keeps_answers(self) -> bool:
        """Whether answers leave capsules here (`leave`)."""
        return self.limits.max_replaceable > 0

    def keep(self, capsule: Capsule, *, ttl_s: float = 0.0) -> None:
        """`capsule`, whose hold on its node passes to the registry, stays until released.

        With `ttl_s` > 0 it also ends when it has not been used for that long.
        """
        self._put(capsule, ttl_s=ttl_s, is_kept=True)

    def leave(self, capsule: Capsule) -> None:
        """Keep `capsule` while there is room."""
        assert self.keeps_answers, "answers leave nothing here"
        self._put(capsule, ttl_s=0.0, is_kept=False)
        if len(self._replaceable) > self.limits.max_replaceable:
            self.replace_oldest()
        while self._tree.lacks_states and len(self._replaceable) > 1 and self.reclaim_any():
            pass  # an answer's state, but for the last one's, is worth less than a place that prompts share

    def keep_or_leave(self, capsule: Capsule, keep_s: float | None) -> None:
        """Keep `capsule`, if that was asked for and there is room; else leave it while there is room."""
        if keep_s is not None:
            try:
                self.check_room(capsule)
            except CapsulesFull:
                pass
            else:
                self.keep(capsule, ttl_s=keep_s)
                return
        if self.keeps_answers:
            self.leave(capsule)
        elif capsule.node is not None:
            self._tree.release(capsule.node)

    def adopt(self, capsule: Capsule, ttl_s: float | None) -> None:
        """`capsule`, parked by an earlier life of this worker or by another one; `ttl_s` as in records."""
        if self._nbytes_parked_with(self._weigh(capsule).nbytes) > self.limits.max_parked_nbytes:
            capsule = replace(capsule, logits=None)  # none is refused, but rows can be computed
        self._put(capsule, ttl_s=ttl_s or 0.0, is_kept=ttl_s is not None)
        while len(self._replaceable) > self.limits.max_replaceable:
            self.replace_oldest()

    def _put(self, capsule: Capsule, *, ttl_s: float, is_kept: bool) -> None:
        key = capsule.id
        if key in self._entries:
            self._remove(key)
        entry = self._entries[key] = _Entry(capsule, None, ttl_s)
        if not is_kept:
            self._replaceable[key] = None
        else:
            self._reweigh(entry, is_kept=True)
            if ttl_s > 0:
                self._postpone(key, ttl_s)
        if capsule.node is not None:
            self._tree.seal(capsule.node)
        request = request_of(key)
        self._num_left[request] = self._num_left.get(request, 0) + 1
        self._journal.capsule(self.describe(capsule))

    def release(self, capsule: str) -> None:
        """Forget the capsule; branches forked from it go on. Raises UnknownCapsule."""
        key = CapsuleId(capsule)
        if key not in self._entries:
            raise UnknownCapsule(capsule)
        self._journal.capsule(CapsuleReleased(capsule))
        self._remove(key)

    def _remove(self, key: CapsuleId) -> None:
        entry, request = self._entries.pop(key), request_of(key)
        self._num_left[request] -= 1
        if not self._num_left[request]:
            del self._num_left[request]
        self._reweigh(entry, is_kept=False)
        self._replaceable.pop(key, None)
        self._in_both.pop(key, None)
        self._expires.pop(key, None)
        self._let_go(entry.capsule)

    def _let_go(self, capsule: Capsule) -> None:
        """Let go of what `capsule` holds on the device and below."""
        if capsule.node is not None:
            self._tree.release(capsule.node)
        if capsule.parked is not None:
            self._give_up(capsule.id, capsule.parked, None)

    def replace_oldest(self) -> None:
        """Release the least recently used replaceable capsule. There must be one."""
        self.release(next(iter(self._replaceable)))
        self._num_replaced += 1

    def expire(self) -> None:
        """Release every capsule whose time to live is over. O(1), but for once in the shortest of them."""
        if not self.is_expiry_due:
            return
        now = self._clock()
        for key in [key for key, at in self._expires.items() if at <= now]:
            self.release(key)

    @property
    def is_expiry_due(self) -> bool:
        """Whether a time to live is over."""
        if self.next_expiry > self._clock():
            return False
        self.next_expiry = min(self._expires.values(), default=inf)
        return self.next_expiry <= self._clock()

    def _postpone(self, key: CapsuleId, ttl_s: float) -> None:
        self._expires[key] = self._clock() + ttl_s
        self.next_expiry = min(self.next_expiry, self._expires[key])

    # Changing

    def pin(self, command: Pin) -> Capsule:
        """Keep a capsule from now on, or not. Raises UnknownCapsule, InvalidParameter, CapsulesFull."""
        found, key = self.get(command.capsule), CapsuleId(command.capsule)
        entry = self._entries[key]
        if command.is_pinned and entry.weight is None:
            self.check_room(found)
            del self._replaceable[key]
            self._reweigh(entry, is_kept=True)
            self._journal.capsule(self.describe(found))
        elif not command.is_pinned and entry.weight is not None:
            if not self.keeps_answers:
                raise InvalidParameter(
                    "capsule", key, "this worker keeps pinned capsules alone; delete it"
                )
            self._reweigh(entry, is_kept=False)
            found = entry.capsule = replace(found, logits=None)  # a row would be in no budget
            self._replaceable[key] = None
        self._expires.pop(key, None)
        entry.ttl_s = command.ttl_s if command.is_pinned else 0.0
        if entry.ttl_s > 0:
            self._postpone(key, entry.ttl_s)
        while len(self._replaceable) > self.limits.max_replaceable:
            self.replace_oldest()
        return found

    def rewind(self, command: Rewind) -> Capsule:
        """Keep the beginning of a capsule as one of its own.

        Raises UnknownCapsule, InvalidParameter, CapsulesFull.
        """
        self.check_unused(command.request)
        source, at = self.get(command.capsule), command.at
        if not 1 <= at <= source.boundary:
            raise InvalidParameter(
                "to", at, f"give 1 to {source.boundary}, the tokens of the capsule"
            )
        key = capsule_id(RequestId(command.request))
        capsule = replace(self._cut(source, at), id=key)
        try:
            self.check_room(capsule)
        except CapsulesFull:
            self._let_go(capsule)
            raise
        self.keep(capsule, ttl_s=command.ttl_s)
        return capsule

    def cut(self, name: CapsuleId, at: int, residue: tuple[int, ...]) -> None:
        """The capsule, if it is here and so long, is its first `at` tokens and `residue` from now on."""
        entry = self._entries.get(name)
        if entry is None or at > entry.capsule.boundary:
            return
        shorter = lengthened(self._cut(entry.capsule, at), residue)
        if entry.weight is None:
            self.leave(shorter)
        else:
            self.keep(shorter, ttl_s=entry.ttl_s)

    def _cut(self, capsule: Capsule, at: int) -> Capsule:
        """The first `at` tokens of `capsule`, held where it lies."""
        tree, lower, size = self._tree, self._lower, self._tree.block_size
        if capsule.node is not None:
            return cut(tree, capsule, at)
        kv, num = capsule.copy.kv, capsule.num_computed
        base = num if at >= num else at - at % size
        if not base:
            root = tree.attach(NO_HASHES, kv.salt, 0)
            return begun(capsule, at, 0, tree.notation, node=root)
        keys = kv.keys[: -(-base // size)]
        more = tree.side_keys(keys, base)
        was_held = capsule.copy.is_held
        is_held = was_held and lower is not None and lower.hold((*keys, *more))
        if was_held and not is_held and more:  # what is read there went on elsewhere
            more = ()
            is_held = lower is not None and lower.hold(keys)
        copy = TextKV(kv.tokens[:base], kv.salt, keys, more)
        parked = Parked(copy, capsule.copy.tier, is_held=is_held)
        return begun(capsule, at, base, tree.notation, parked=parked)

    # Moving

    def park(self, capsule: Capsule, copy: Parked) -> None:
        """`capsule` has a `copy` below, and gives up its place on the device, if it has one."""
        key, old = capsule.id, capsule.parked
        self._in_both.pop(key, None)
        parked = self._move(replace(capsule, node=None, parked=copy))
        if capsule.node is not None:
            self._tree.release(capsule.node)
        if old is not None:
            self._give_up(key, old, copy)
        if copy.is_durable and not (old is not None and old.is_durable):
            self._journal.capsule(self.describe(parked))

    def restore(self, capsule: Capsule, node: Node, logits: object | None = None) -> Capsule:
        """`capsule` is on the device again, and stays parked; the hold on `node` passes to the registry."""
        key, kept = capsule.id, None
        assert capsule.node is None, f"{key} is on the device"
        if not capsule.pending and key not in self._replaceable:
            kept = capsule.logits if capsule.logits is not None else logits
        self._in_both[key] = None
        self._tree.seal(node)
        return self._move(replace(capsule, node=node, logits=kept))

    def drop(self, key: CapsuleId) -> None:
        """The capsule gives up its place on the device, if it lies in both."""
        if key not in self._in_both:
            return
        del self._in_both[key]
        found = self._entries[key].capsule
        assert found.node is not None, f"{key} is parked alone"
        self._move(replace(found, node=None))
        self._tree.release(found.node)

    def lose_record(self, name: str) -> None:
        """The durable record of a capsule is gone: what is left of it below is cache."""
        found = self.peek(name)
        if found is not None and found.parked is not None and found.parked.is_durable:
            copy = found.parked._replace(is_durable=False)
            self._entries[found.id].capsule = replace(found, parked=copy)

    def _move(self, capsule: Capsule) -> Capsule:
        """`capsule` lies elsewhere than before: if it is kept, its budget is what it takes there."""
        entry = self._entries[capsule.id]
        entry.capsule = capsule
        self._reweigh(entry, is_kept=entry.weight is not None)
        return capsule

    def _give_up(self, key: CapsuleId, old: Parked, new: Parked | None) -> None:
        """The copy `old` of a capsule is replaced by `new`, or gone."""
        assert self._lower is not None, "parked, without tiers"
        if old.is_held:
            self._lower.release(old.kv.all_keys)
        if old.is_durable and (new is None or not new.is_durable):
            self._lower.forget(key)

    # Giving up the device's blocks

    def reclaim(self, num_blocks: int, kept: Container[Node]) -> bool:
        """Give up device blocks of parked and replaceable capsules until the tree has `num_blocks` more.

        False, with nothing given up, if all of them would not do (`num_reclaimable`).
        """
        if self.num_reclaimable(kept) < num_blocks:
            return False
        enough = self._tree.num_available + num_blocks
        while self._tree.num_available < enough:
            self.reclaim_any()
        return True

    def reclaim_any(self) -> bool:
        """Have the next capsule give up its device blocks; False if none has any."""
        if self._in_both:
            self.drop(next(iter(self._in_both)))
            return True
        nodes = ((key, self._entries[key].capsule.node) for key in self._replaceable)
        here = ((key, node) for key, node in nodes if node is not None)
        first = next(here, None)
        if first is None:
            return False
        if len(self._tree.ranks) and self._tree.is_ranked(first[1]):  # rather not of such a text
            first = next((each for each in here if not self._tree.is_ranked(each[1])), first)
        self._push_out(*first)
        return True

    def _push_out(self, key: CapsuleId, node: Node) -> None:
        """The replaceable `key` gives up its place on the device, at `node`: its text stays, with tiers."""
        tree = self._tree
        if self._lower is None or not self._lower.has_host:
            self.release(key)
            self._num_replaced += 1
            return
        kv, blocks = kv_of(tree, node), blocks_of(tree, node)
        num_full = len(kv.tokens) // tree.block_size
        if kv.more:  # these are given up before the rest is evicted: it goes down as one
            tree.offload(kv.keys[:num_full], blocks[:num_full])
        tree.offload(kv.all_keys[num_full:], blocks[num_full:], are_full=False)
        self.park(self._entries[key].capsule, Parked(kv, HOST))

    def num_reclaimable(self, kept: Container[Node]) -> int:
        """Blocks that only replaceable and parked capsules hold; those of nodes in `kept` don't count."""
        if not (self._replaceable or self._in_both):
            return 0
        keys = {**self._replaceable, **self._in_both}
        found = (self._entries[key].capsule.node for key in keys)
        return sole_blocks(Counter(node for node in found if node is not None), kept)

    # The budget of kept capsules

    def promise(self, request: str, tokens: Text, salt: str) -> None:
        """There will be room to keep a capsule of `tokens`, until `request` ends (`forgo`).

        What it shares with other kept capsules is not counted again; that is looked at only if everything
        would not fit without. O(kept capsules) then, and of tokens. Raises CapsulesFull.
        """

        def beside(nodes: set[Node]) -> int:
            hashes = self._tree.notation.hashes(tokens, self._tree.block_size, salt=salt)
            return needed - self._tree.overlap(hashes, nodes)

        needed = self._tree.weight(len(tokens)) + self.limits.row_blocks
        self._promised[request] = self._check_blocks(needed, beside)

    def forgo(self, request: str) -> None:
        """`request` has made its capsule, or won't."""
        self._promised.pop(request, None)

    def check_room(self, capsule: Capsule) -> None:
        """Raises CapsulesFull if `capsule`, which is not kept, may not be. O(kept capsules) if close."""
        weight = self._weigh(capsule)
        self._check_nbytes(weight.nbytes)

        def beside(nodes: set[Node]) -> int:
            if weight.node is None:
                return weight.num_blocks
            own = with_ancestors([weight.node]) - nodes
            return sum(len(node.blocks) for node in own) + self.limits.row_blocks

        self._check_blocks(weight.num_blocks, beside)

    def promise_parked(self, capsule: Capsule, copy: Parked) -> int:
        """Room for `capsule` as it will be parked: bytes, to be given back by `forgo_parked`.

        Also for one that is replaceable: it may be pinned on its way. Raises CapsulesFull.
        """
        weight = self._entries[capsule.id].weight
        old = 0 if weight is None else weight.nbytes
        nbytes = max(0, self._weigh(replace(capsule, node=None, parked=copy)).nbytes - old)
        self._check_nbytes(nbytes)
        self._promised_nbytes += nbytes
        return nbytes

    def forgo_parked(self, nbytes: int) -> None:
        """A capsule that had so many bytes promised is parked, or won't be."""
        self._promised_nbytes -= nbytes

    def _check_nbytes(self, nbytes: int) -> None:
        most = self.limits.max_parked_nbytes
        if nbytes and self._nbytes_parked_with(nbytes) > most:
            self._num_refused += 1
            raise CapsulesFull(nbytes, self._nbytes_parked_with(0), most, unit="bytes")

    def _nbytes_parked_with(self, nbytes: int) -> int:
        """The bytes that parked capsules take, or are promised, with so many more."""
        return self._nbytes_parked + self._promised_nbytes + nbytes

    def _check_blocks(self, needed: int, beside: Callable[[set[Node]], int]) -> int:
        """The blocks that one more kept capsule needs. Raises CapsulesFull if that is too many.

        `needed` counts all of it; if that is too much, `beside` counts it beside the nodes that are kept.
        """
        promised, most = sum(self._promised.values()), self.limits.max_kept_blocks
        kept = self._num_blocks
        if kept + promised + needed > most:
            weights = (entry.weight for entry in self._entries.values())
            held = [each.node for each in weights if each is not None and each.node is not None]
            nodes = with_ancestors(held)
            kept = sum(len(node.blocks) for node in nodes) + len(held) * self.limits.row_blocks
            state = self._tree.weight(0)  # which no other text shares
            kept, needed = max(kept, len(set(held)) * state), max(beside(nodes), state)
        if kept + promised + needed > most:
            self._num_refused += 1
            raise CapsulesFull(needed, kept + promised, most)
        return needed

    def _weigh(self, capsule: Capsule) -> _Weight:
        """The weight of `capsule` where it lies, if it were kept."""
        if capsule.parked is None:
            num_blocks = self._tree.weight(capsule.boundary) + self.limits.row_blocks
            return _Weight(capsule.node, num_blocks)
        num_keys = len(capsule.parked.kv.all_keys)
        nbytes = CAPSULE_NBYTES + TOKEN_NBYTES * capsule.boundary + KEY_NBYTES * num_keys
        nbytes += len(encode(capsule.continuation)) + len(encode(capsule.grammar))
        nbytes += self.limits.row_nbytes if capsule.logits is not None else 0
        return _Weight(nbytes=nbytes)

    def _reweigh(self, entry: _Entry, *, is_kept: bool) -> None:
        """The capsule of `entry` is kept from now on, or not, or lies elsewhere than before."""
        if entry.weight is not None:
            self._num_blocks -= entry.weight.num_blocks
            self._nbytes_parked -= entry.weight.nbytes
        entry.weight = self._weigh(entry.capsule) if is_kept else None
        if entry.weight is not None:
            self._num_blocks += entry.weight.num_blocks
            self._nbytes_parked += entry.weight.nbytes

    # Reading

    def describe(self, capsule: Capsule) -> CapsuleStored:
        """The event that announces `capsule`.

        Answers leave many, most are never forked, and repeating their whole path for each would make
        messages too large for the broker: only kept capsules tell their hashes.
        """
        hashes, parked = NO_HASHES, capsule.parked
        if capsule.id not in self._replaceable:
            if capsule.node is not None:
                hashes = self._tree.path_hashes(capsule.node)
            else:
                num_full = capsule.num_computed // self._tree.block_size
                hashes = np.array(capsule.copy.kv.keys[:num_full], dtype=np.uint64)
        scope = owner_of(capsule.salt.rpartition("/")[2])
        is_durable = parked is not None and parked.is_durable
        return CapsuleStored(capsule.id, capsule.boundary, pack_hashes(hashes), scope, is_durable)

    def describe_all(self) -> tuple[CapsuleStored, ...]:
        return tuple(map(self.describe, self))

    def __iter__(self) -> Iterator[Capsule]:
        return (entry.capsule for entry in self._entries.values())

    def holds(self) -> dict[Node, int]:
        """The number of capsules that hold each node."""
        return dict(Counter(c.node for c in self if c.node is not None))

    def matchers(self) -> Iterator[object]:
        """The grammar states of capsules inside a constrained text; some may hold the same."""
        return (c.matcher for c in self if c.matcher is not None)

    def stats(self) -> CapsuleStats:
        """O(capsules)."""
        num_by_tier, blocks_by_tier = [0, 0, 0], [0, 0, 0]
        for each in self:
            if each.id not in self._replaceable:
                tier = DEVICE if each.parked is None else each.parked.tier
                num_by_tier[tier] += 1
                blocks_by_tier[tier] += -(-each.num_computed // self._tree.block_size)
        return CapsuleStats(
            kept=len(self._entries) - len(self._replaceable),
            replaceable=len(self._replaceable),
            num_replaced=self._num_replaced,
            num_refused=self._num_refused,
            nbytes_below=self._nbytes_parked,
            num_by_tier=tuple(num_by_tier),
            blocks_by_tier=tuple(blocks_by_tier),
            max_blocks=self.limits.max_kept_blocks,
        )

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        entries, weights = self._entries, [e.weight for e in self._entries.values()]
        assert Counter(map(request_of, entries)) == self._num_left, "capsules miscounted"
        replaceable = {key for key, entry in entries.items() if entry.weight is None}
        assert set(self._replaceable) == replaceable, "a replaceable capsule is kept, or gone"
        assert len(replaceable) <= self.limits.max_replaceable, "too many replaceable capsules"
        mortal = {key for key, entry in entries.items() if entry.ttl_s}
        assert set(self._expires) == mortal, "expiry without time to live"
        earliest = min(self._expires.values(), default=inf)
        assert self.next_expiry <= earliest, "a capsule expires unseen"
        for entry in entries.values():
            found = entry.capsule
            assert found.node is not None or found.parked is not None, f"{found.id} is nowhere"
            assert found.node is None or found.node.holders > 0, f"{found.id} holds nothing"
            is_in_both = found.node is not None and found.parked is not None
            assert is_in_both == (found.id in self._in_both), f"the places of {found.id}"
            if entry.weight is not None:
                assert entry.weight == self._weigh(found), f"{found.id} is misweighed"
        kept = [weight for weight in weights if weight is not None]
        assert self._num_blocks == sum(each.num_blocks for each in kept), "kept blocks"
        assert self._nbytes_parked == sum(each.nbytes for each in kept), "kept bytes"
        assert self._promised_nbytes >= 0, "given back, but never promised"
