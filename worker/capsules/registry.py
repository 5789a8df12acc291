"""Capsules, and the rules by which a worker keeps them.

One id is one text, wherever it is computed: a capsule that is made again under its id takes the place of
the one that is there, and is announced anew; no release is told, for the id goes on.

Two kinds. *Kept* capsules were asked for: they stay until released or until their time to live has
passed since their last use. What they hold can't be evicted, so there is a limit to it, and a request that
would pass it is refused before anything is computed. *Replaceable* ones are what finished answers
leave behind: they stay while there is room, least recently used out first.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterator
from dataclasses import replace
from math import inf
from typing import NamedTuple

import numpy as np

from mallee.protocol.errors import CapsulesFull, InvalidParameter, UnknownCapsule
from mallee.protocol.events import CapsuleReleased, CapsuleStored, pack_hashes, unpack_hashes
from mallee.protocol.hashing import NO_HASHES
from mallee.protocol.ids import CapsuleId, RequestId, capsule_id, owner_of, request_of
from mallee.protocol.messages import CapsuleStatus, Pin, Rewind
from mallee.worker.capsules.capsule import Below, Capsule, Copied, lengthened
from mallee.worker.capsules.places import CapsulePlaces
from mallee.worker.capsules.record import CapsuleRecord
from mallee.worker.capsules.room import KeptRoom
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.node import Node
from mallee.worker.kv.text import Text, joined
from mallee.worker.kv.tree import BranchTree
from mallee.worker.kv.usage import sole_blocks
from mallee.worker.transfer.lower import LowerTiers
from mallee.worker.transfer.values import DISK, TIER_NAMES


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


class CapsuleRegistry:
    """Capsules by id. Each holds its node in the tree; letting go is `release`."""

    def __init__(
        self,
        tree: BranchTree,
        journal: Journal,
        *,
        clock: Callable[[], float],
        max_replaceable: int,
        max_kept_blocks: int,
        max_nbytes_below: int,
        row_blocks: int,
        row_nbytes: int,
        lower: LowerTiers | None = None,
    ) -> None:
        """See `KeptRoom` for the limits of kept capsules."""
        self._tree = tree
        self._journal = journal
        self._clock = clock
        self._max_replaceable = max_replaceable
        self._places = CapsulePlaces(tree, lower)
        self._room = KeptRoom(
            tree,
            max_blocks=max_kept_blocks,
            row_blocks=row_blocks,
            max_nbytes_below=max_nbytes_below,
            row_nbytes=row_nbytes,
        )
        self._num_left: dict[str, int] = {}  # capsules here by request
        self._replaceable: OrderedDict[CapsuleId, None] = OrderedDict()
        self._ttl: dict[CapsuleId, float] = {}
        self._expires: dict[CapsuleId, float] = {}
        self._next_expiry = inf  # nothing expires before
        self._num_replaced = 0

    def check_unused(self, request: str) -> None:
        """Raises InvalidParameter if a branch of an earlier request of this name left a capsule."""
        if request in self._num_left:
            raise InvalidParameter("request", request, "this id was used; ids are used once")

    def check_owner(self, capsule: str, salt: str) -> None:
        """Raises InvalidParameter if `capsule` is here, and is no text of `salt`."""
        found = self.peek(capsule)
        if found is not None and found.salt != salt:
            raise InvalidParameter("capsule", capsule, "this id is in use by another tenant")

    def promise(self, request: str, tokens: Text, salt: str) -> None:
        """There will be room to keep a capsule of `tokens`, until `request` ends (`forgo`).

        Raises CapsulesFull.
        """
        self._room.promise(request, tokens, salt)

    def forgo(self, request: str) -> None:
        """`request` has made its capsule, or won't."""
        self._room.forgo(request)

    def check_room(self, capsule: Capsule) -> None:
        """Raises CapsulesFull if `capsule`, which is not kept, may not be. O(kept capsules) if close."""
        self._room.check_fits(capsule)

    def keep(self, capsule: Capsule, *, ttl_s: float = 0.0) -> None:
        """`capsule`, whose hold on its node passes to the registry, stays until released.

        With `ttl_s` > 0 it also ends when it has not been used for that long.
        """
        if capsule.id in self._places:
            self._remove(capsule.id)
        if ttl_s > 0:
            self._ttl[capsule.id] = ttl_s
            self._postpone(capsule.id)
        self._room.put(capsule)
        self._add(capsule)

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

    def cut(self, name: CapsuleId, at: int, residue: tuple[int, ...]) -> None:
        """The capsule, if it is here and so long, is its first `at` tokens and `residue` from now on."""
        left = self.peek(name)
        if left is not None and at <= left.boundary:
            self._shorten(lengthened(left, self._places.cut(left, at), residue))

    def _shorten(self, capsule: Capsule) -> None:
        """`capsule` takes the place of the longer one of its name, as kept or replaceable as that was."""
        ttl_s = self._ttl.get(capsule.id, 0.0)
        if capsule.id in self._replaceable:
            self.leave(capsule)
        else:
            self.keep(capsule, ttl_s=ttl_s)

    @property
    def keeps_answers(self) -> bool:
        """Whether answers leave capsules here (`leave`)."""
        return self._max_replaceable > 0

    def leave(self, capsule: Capsule) -> None:
        """Keep `capsule` while there is room."""
        assert self.keeps_answers, "answers leave nothing here"
        if capsule.id in self._places:
            self._remove(capsule.id)
        self._replaceable[capsule.id] = None
        self._add(capsule)
        if len(self._replaceable) > self._max_replaceable:
            self.replace_oldest()

    def get(self, capsule: str) -> Capsule:
        """The capsule, now the most recently used. Raises UnknownCapsule; CorruptKV, if checked."""
        self.expire()
        key = CapsuleId(capsule)
        if key not in self._places:
            raise UnknownCapsule(capsule)
        if key in self._replaceable:
            self._replaceable.move_to_end(key)
        elif key in self._ttl:
            self._postpone(key)
        self._places.use(key)
        return self._places[key]

    def peek(self, capsule: str) -> Capsule | None:
        """The capsule, if it is here; not used by this. From any thread."""
        return self._places.get(CapsuleId(capsule))

    def status(self, capsule: Capsule, *, block_nbytes: int, row_nbytes: int) -> CapsuleStatus:
        """`capsule`, which is here, as it is now. O(nodes above it)."""
        num_blocks = -(-capsule.num_computed // self._tree.block_size)
        own = num_blocks if capsule.node is None else sole_blocks({capsule.node: 1})
        shared = num_blocks - own
        state_nbytes = 4 * len(capsule.pending) + (row_nbytes if capsule.logits is not None else 0)
        expires = self._expires.get(capsule.id)
        tier = self._places.tier(capsule)
        return CapsuleStatus(
            capsule.id,
            capsule.boundary,
            own * block_nbytes + state_nbytes,
            shared * block_nbytes,
            capsule.id not in self._replaceable,
            None if expires is None else max(0.0, expires - self._clock()),
            None if capsule.continuation is None else capsule.continuation.drawn,
            "none" if tier is None else TIER_NAMES[tier],
        )

    def pin(self, command: Pin) -> Capsule:
        """Keep a capsule from now on, or not. Raises UnknownCapsule, InvalidParameter, CapsulesFull."""
        found, key = self.get(command.capsule), CapsuleId(command.capsule)
        is_replaceable = key in self._replaceable
        if command.is_pinned and is_replaceable:
            self.check_room(found)
            del self._replaceable[key]
            self._room.put(found)
            self._journal.capsule(self.describe(found))
        elif not command.is_pinned and not is_replaceable:
            if not self.keeps_answers:
                raise InvalidParameter(
                    "capsule", key, "this worker keeps pinned capsules alone; delete it"
                )
            self._room.take(key)
            found = self._places.forget_logits(key)  # a row would be in no budget
            self._replaceable[key] = None
        self._ttl.pop(key, None)
        self._expires.pop(key, None)
        if command.is_pinned and command.ttl_s > 0:
            self._ttl[key] = command.ttl_s
            self._postpone(key)
        while len(self._replaceable) > self._max_replaceable:
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
        cut = self._places.cut(source, at)
        is_end = at == source.boundary
        capsule = Capsule(
            capsule_id(RequestId(command.request)),
            cut.node,
            cut.pending,
            source.logits if is_end else None,
            source.matcher if is_end else None,
            source.continuation_at(at),
            source.grammar_at(at),
            below=cut.below,
        )
        try:
            self.check_room(capsule)
        except CapsulesFull:
            self._places.give_back(cut)
            raise
        self.keep(capsule, ttl_s=command.ttl_s)
        return capsule

    def record(
        self, capsule: Capsule, copy: Copied, logits: bytes | None, fingerprint: str
    ) -> CapsuleRecord:
        """`capsule`, whose KV is `copy`, at rest."""
        key, notation = capsule.id, self._tree.notation
        return CapsuleRecord(
            key,
            notation.dump(joined(notation, copy.tokens, capsule.pending)),
            len(copy.tokens),
            capsule.salt,
            fingerprint,
            self._tree.block_size,
            pack_hashes(np.array(copy.keys, dtype=np.uint64)),
            copy.has_tail,
            logits,
            None if key in self._replaceable else self._ttl.get(key, 0.0),
            capsule.continuation,
            capsule.grammar,
            capsule.draft,
        )

    def adopt(self, record: CapsuleRecord, logits: object | None, *, is_durable: bool) -> None:
        """A capsule of an earlier life of this worker, or of another one: its blocks are on disk."""
        key, num = CapsuleId(record.capsule), record.num_computed
        text = self._tree.notation.read(record.tokens)
        tokens, pending = self._tree.notation.compact(text[:num]), tuple(text[num:])
        keys = tuple(unpack_hashes(record.keys).tolist())
        more = self._tree.side_keys(keys, num)
        below = Below(
            DISK, tokens, record.salt, keys, is_durable=is_durable, is_held=False, more=more
        )
        if key in self._places:
            self._remove(key)
        if record.ttl_s is None:
            self._replaceable[key] = None
        elif record.ttl_s > 0:
            self._ttl[key] = record.ttl_s
            self._postpone(key)
        adopted = Capsule(
            key, None, pending, logits, None, record.continuation, record.grammar, None, below
        )
        if not self._room.has_room_below(adopted):  # none is refused, but rows can be computed
            adopted = replace(adopted, logits=None)
        self._weigh(adopted)
        self._add(adopted)
        while len(self._replaceable) > self._max_replaceable:
            self.replace_oldest()

    def is_kept(self, capsule: Capsule) -> bool:
        """Whether `capsule` was asked for."""
        return capsule.id not in self._replaceable

    def is_here(self, capsule: Capsule) -> bool:
        """Whether `capsule`, once got, is still what goes by its id."""
        return self._places.get(capsule.id) is capsule

    # Above and below

    def promise_below(self, capsule: Capsule, below: Below) -> int:
        """Room for `capsule` as it will be `below`: bytes, to be given back by `forgo_below`.

        Also for one that is replaceable: it may be pinned on its way. Raises CapsulesFull.
        """
        return self._room.promise_below(replace(capsule, node=None, below=below))

    def forgo_below(self, nbytes: int) -> None:
        """A capsule that had so many bytes promised has come down, or won't."""
        self._room.forgo_below(nbytes)

    def sink(self, capsule: Capsule, below: Below) -> None:
        """`capsule` has a copy `below`, and gives up its place on the device, if it has one."""
        was_durable = capsule.below is not None and capsule.below.is_durable
        sunk = self._places.sink(capsule, below)
        self._weigh(sunk)
        if below.is_durable and not was_durable:
            self._journal.capsule(self.describe(sunk))

    def lift(self, capsule: Capsule, node: Node, logits: object | None) -> Capsule:
        """`capsule` is on the device again, and stays below; the hold on `node` passes to the registry."""
        kept = None
        if not capsule.pending and capsule.id not in self._replaceable:
            kept = capsule.logits if capsule.logits is not None else logits
        lifted = self._places.lift(capsule, node, kept)
        self._weigh(lifted)
        return lifted

    def descend(self, capsule: Capsule) -> None:
        """`capsule`, which has a copy below, gives up its place on the device, if it has one."""
        if self._places.is_in_both(capsule.id):
            self._drop(capsule.id)

    def lost(self, name: str) -> None:
        """The durable record of a capsule is gone: what is left of it below is cache."""
        self._places.lost(CapsuleId(name))

    def _drop(self, key: CapsuleId) -> None:
        """Give up the place on the device of a capsule that is below too."""
        self._places.drop(key)
        self._weigh(self._places[key])

    def _weigh(self, capsule: Capsule) -> None:
        """`capsule` has come, or to another place: if it is kept, its room is what it holds there."""
        if capsule.id not in self._replaceable:
            self._room.put(capsule)

    def release(self, capsule: str) -> None:
        """Forget the capsule; branches forked from it go on. Raises UnknownCapsule."""
        key = CapsuleId(capsule)
        if key not in self._places:
            raise UnknownCapsule(capsule)
        self._journal.capsule(CapsuleReleased(capsule))
        self._remove(key)

    def _remove(self, key: CapsuleId) -> None:
        request = request_of(key)
        self._num_left[request] -= 1
        if not self._num_left[request]:
            del self._num_left[request]
        self._room.take(key)
        self._replaceable.pop(key, None)
        self._ttl.pop(key, None)
        self._expires.pop(key, None)
        self._places.remove(key)

    def replace_oldest(self) -> None:
        """Release the least recently used replaceable capsule. There must be one."""
        self.release(next(iter(self._replaceable)))
        self._num_replaced += 1

    def _least_wanted(self) -> CapsuleId:
        """The least recently used replaceable capsule with blocks here, rather not of a retained text."""
        tree = self._tree
        nodes = {key: self._places[key].node for key in self._replaceable}
        here = [(key, node) for key, node in nodes.items() if node is not None]
        free = (key for key, node in here if not tree.is_ranked(node))
        return next(free, here[0][0])

    def reclaim(self, num_blocks: int, kept: Container[Node]) -> bool:
        """Release replaceable capsules, oldest first, until the tree has `num_blocks` more to give.

        False, with none released, if all of them would not do (`num_reclaimable`).
        """
        if self.num_reclaimable(kept) < num_blocks:
            return False
        enough = self._tree.num_available + num_blocks
        while self._tree.num_available < enough:
            droppable = next(self._places.in_both(), None)
            if droppable is not None:
                self._drop(droppable)
                continue
            key = next(key for key in self._replaceable if self._places[key].node is not None)
            if len(self._tree.ranks):
                key = self._least_wanted()
            self._give_way(key)
        return True

    def _give_way(self, key: CapsuleId) -> None:
        """The replaceable `key`, which has blocks here, gives them up."""
        if not self._places.leave_below(key):
            self.release(key)
            self._num_replaced += 1

    def reclaim_any(self) -> bool:
        """Have the oldest replaceable capsule give up its blocks; False if none has any."""
        droppable = next(self._places.in_both(), None)
        if droppable is not None:
            self._drop(droppable)
            return True
        here = (key for key in self._replaceable if self._places[key].node is not None)
        key = next(here, None)
        if key is None:
            return False
        self._give_way(key)
        return True

    def num_reclaimable(self, kept: Container[Node]) -> int:
        """Blocks that only replaceable capsules hold; those of nodes in `kept` don't count."""
        keys = {**self._replaceable, **dict.fromkeys(self._places.in_both())}
        if not keys:
            return 0
        found = (self._places[key].node for key in keys)
        return sole_blocks(Counter(node for node in found if node is not None), kept)

    def expire(self) -> None:
        """Release every capsule whose time to live is over."""
        if not self.is_expiry_due:
            return
        now = self._clock()
        for key in [key for key, at in self._expires.items() if at <= now]:
            self.release(key)

    @property
    def is_expiry_due(self) -> bool:
        """Whether a time to live is over. O(1), but for once in the shortest of them."""
        if self._next_expiry > self._clock():
            return False
        self._next_expiry = min(self._expires.values(), default=inf)
        return self._next_expiry <= self._clock()

    @property
    def next_expiry(self) -> float:
        """Nothing expires before, on the clock."""
        return self._next_expiry

    def describe(self, capsule: Capsule) -> CapsuleStored:
        """The event that announces `capsule`.

        Answers leave many, most are never forked, and repeating their whole path for each would make
        messages too large for the broker: only kept capsules tell their hashes.
        """
        hashes = NO_HASHES
        if capsule.id not in self._replaceable:
            if capsule.node is not None:
                hashes = self._tree.path_hashes(capsule.node)
            elif capsule.below is not None:
                num_full = len(capsule.below.tokens) // self._tree.block_size
                hashes = np.array(capsule.below.keys[:num_full], dtype=np.uint64)
        scope = owner_of(capsule.salt.rpartition("/")[2])
        is_durable = capsule.below is not None and capsule.below.is_durable
        return CapsuleStored(capsule.id, capsule.boundary, pack_hashes(hashes), scope, is_durable)

    def describe_all(self) -> tuple[CapsuleStored, ...]:
        return tuple(self.describe(self._places[key]) for key in self._places)

    def holds(self) -> dict[Node, int]:
        """The number of capsules that hold each node."""
        return self._places.holds()

    def matchers(self) -> Iterator[object]:
        """The grammar states that capsules hold."""
        return self._places.matchers()

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        assert Counter(map(request_of, self._places)) == self._num_left, "capsules miscounted"
        assert set(self._replaceable) <= set(self._places), "a replaceable capsule is gone"
        assert set(self._expires) == set(self._ttl), "expiry without time to live"
        assert set(self._expires) <= set(self._places), "a capsule that is gone may expire"
        earliest = min(self._expires.values(), default=inf)
        assert self._next_expiry <= earliest, "a capsule expires unseen"
        assert len(self._replaceable) <= self._max_replaceable, "too many replaceable capsules"
        kept = {key: self._places[key] for key in self._places if key not in self._replaceable}
        self._room.check(kept)
        self._places.check()

    def stats(self) -> CapsuleStats:
        return CapsuleStats(
            len(self._room),
            len(self._replaceable),
            self._num_replaced,
            self._room.num_refused,
            self._room.nbytes_below,
            tuple(self._room.num_by_tier),
            tuple(self._room.blocks_by_tier),
            self._room.max_blocks,
        )

    def _postpone(self, key: CapsuleId) -> None:
        self._expires[key] = self._clock() + self._ttl[key]
        self._next_expiry = min(self._next_expiry, self._expires[key])

    def _add(self, capsule: Capsule) -> None:
        self._places.put(capsule)
        request = request_of(capsule.id)
        self._num_left[request] = self._num_left.get(request, 0) + 1
        self._journal.capsule(self.describe(capsule))
