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
from typing import Final, NamedTuple

import numpy as np

from mallee.protocol.errors import CapsulesFull, InvalidParameter, UnknownCapsule
from mallee.protocol.events import CapsuleReleased, CapsuleStored, pack_hashes, unpack_hashes
from mallee.protocol.hashing import NO_HASHES
from mallee.protocol.ids import CapsuleId, RequestId, capsule_id, request_of
from mallee.protocol.messages import CapsuleStatus, Pin, Rewind, pack_tokens
from mallee.worker.capsules.capsule import (
    Below,
    Capsule,
    Copied,
    CutText,
    copy_of,
    cut_text,
    lengthened,
)
from mallee.worker.capsules.record import CapsuleRecord
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.node import Node
from mallee.worker.kv.paths import with_ancestors
from mallee.worker.kv.text import Text
from mallee.worker.kv.tiers.lower import LowerTiers
from mallee.worker.kv.tiers.moves import DISK, HOST, TIER_NAMES
from mallee.worker.kv.tree import BranchTree
from mallee.worker.kv.usage import sole_blocks

MAX_ROWS_BELOW: Final = 256


class CapsuleStats(NamedTuple):
    """Counts of live capsules, of replaceable ones pushed out, and of those that found no room to be kept."""

    kept: int
    replaceable: int
    num_replaced: int
    num_refused: int


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
        row_blocks: int = 0,
        lower: LowerTiers | None = None,
    ) -> None:
        """`row_blocks`: blocks that the logits of a kept capsule are worth in bytes."""
        self._tree = tree
        self._lower = lower
        self._droppable: OrderedDict[CapsuleId, None] = OrderedDict()  # on the device and below
        self._rows_below: dict[CapsuleId, None] = {}  # below alone, with logits
        self._journal = journal
        self._clock = clock
        self._max_replaceable = max_replaceable
        self._max_kept_blocks = max_kept_blocks
        self._row_blocks = row_blocks
        self._capsules: dict[CapsuleId, Capsule] = {}
        self._num_left: dict[str, int] = {}  # capsules here by request
        self._replaceable: OrderedDict[CapsuleId, None] = OrderedDict()
        self._ttl: dict[CapsuleId, float] = {}
        self._expires: dict[CapsuleId, float] = {}
        self._next_expiry = inf  # nothing expires before
        self._kept_blocks = 0  # of kept capsules, shared ones counted for each
        self._promised: dict[str, int] = {}  # request -> blocks that its capsule will add, at most
        self._num_replaced = self._num_refused = 0

    def check_unused(self, request: str) -> None:
        """Raises InvalidParameter if a branch of an earlier request of this name left a capsule."""
        if request in self._num_left:
            raise InvalidParameter("request", request, "this id was used; ids are used once")

    def check_owner(self, capsule: str, salt: str) -> None:
        """Raises InvalidParameter if `capsule` is here, and is no text of `salt`."""
        found = self._capsules.get(CapsuleId(capsule))
        if found is not None and found.salt != salt:
            raise InvalidParameter("capsule", capsule, "this id is in use by another tenant")

    def promise(self, request: str, tokens: Text, salt: str) -> None:
        """There will be room to keep a capsule of `tokens`, until `request` ends (`forgo`).

        What it shares with other kept capsules is not counted again; that is looked at only if everything
        would not fit without. O(kept capsules) then, and of tokens. Raises CapsulesFull.
        """

        def beside(nodes: set[Node]) -> int:
            hashes = self._tree.notation.hashes(tokens, self._tree.block_size, salt=salt)
            return needed - self._tree.overlap(hashes, nodes)

        needed = self._tree.weight(len(tokens)) + self._row_blocks
        self._promised[request] = self._check_fits(needed, beside)

    def check_room(self, capsule: Capsule) -> None:
        """Raises CapsulesFull if `capsule`, which is not kept, may not be. O(kept capsules) if close."""

        def beside(nodes: set[Node]) -> int:
            if capsule.node is None or capsule.below is not None:
                return needed
            own = with_ancestors([capsule.node]) - nodes
            return sum(len(node.blocks) for node in own) + self._row_blocks

        needed = self._num_blocks(capsule)
        self._check_fits(needed, beside)

    def _check_fits(self, needed: int, beside: Callable[[set[Node]], int]) -> int:
        """The blocks that one more kept capsule needs. Raises CapsulesFull if that is too many.

        `needed` counts all of it; if that is too much, `beside` counts it beside the nodes that are kept.
        """
        promised = sum(self._promised.values())
        kept = self._kept_blocks
        if kept + promised + needed > self._max_kept_blocks:
            held = [c.node for c in self._kept() if c.node is not None and c.below is None]
            nodes = with_ancestors(held)
            kept = sum(len(node.blocks) for node in nodes) + len(held) * self._row_blocks
            needed = beside(nodes)
        if kept + promised + needed > self._max_kept_blocks:
            self._num_refused += 1
            raise CapsulesFull(needed, kept + promised, self._max_kept_blocks)
        return needed

    def forgo(self, request: str) -> None:
        """`request` has made its capsule, or won't."""
        self._promised.pop(request, None)

    def keep(self, capsule: Capsule, *, ttl_s: float = 0.0) -> None:
        """`capsule`, whose hold on its node passes to the registry, stays until released.

        With `ttl_s` > 0 it also ends when it has not been used for that long.
        """
        if capsule.id in self._capsules:
            self._remove(capsule.id)
        if ttl_s > 0:
            self._ttl[capsule.id] = ttl_s
            self._postpone(capsule.id)
        self._kept_blocks += self._num_blocks(capsule)
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
            self._shorten(lengthened(left, self._cut(left, at), residue))

    def _cut(self, capsule: Capsule, at: int) -> CutText:
        """The first `at` tokens of `capsule`, held where it lies."""
        if capsule.node is not None:
            return cut_text(self._tree, capsule.node, capsule.pending, at)
        below, size = capsule.below, self._tree.block_size
        assert below is not None, "a capsule that is nowhere"
        num = len(below.tokens)
        base = num if at >= num else at - at % size
        if not base:
            rest = tuple(capsule.text(self._tree.notation, 0, at))
            return CutText(self._tree.attach(NO_HASHES, below.salt, 0), rest)
        keys = below.keys[: -(-base // size)]
        more = self._tree.window_keys(keys, base)
        is_held = below.is_held and self._lower is not None and self._lower.hold((*keys, *more))
        if below.is_held and not is_held and more:  # its own windows went on elsewhere
            more = ()
            is_held = self._lower is not None and self._lower.hold(keys)
        cut = Below(below.tier, below.tokens[:base], below.salt, keys, False, is_held, more)
        return CutText(None, tuple(capsule.text(self._tree.notation, base, at)), cut)

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
        if capsule.id in self._capsules:
            self._remove(capsule.id)
        self._replaceable[capsule.id] = None
        self._add(capsule)
        if len(self._replaceable) > self._max_replaceable:
            self.replace_oldest()

    def get(self, capsule: str) -> Capsule:
        """The capsule, now the most recently used. Raises UnknownCapsule; CorruptKV, if checked."""
        self.expire()
        key = CapsuleId(capsule)
        found = self._capsules.get(key)
        if found is None:
            raise UnknownCapsule(capsule)
        if key in self._replaceable:
            self._replaceable.move_to_end(key)
        elif key in self._ttl:
            self._postpone(key)
        if key in self._droppable:
            self._droppable.move_to_end(key)
        if found.node is not None:
            self._tree.verify(found.node)
        return found

    def peek(self, capsule: str) -> Capsule | None:
        """The capsule, if it is here; not used by this. From any thread."""
        return self._capsules.get(CapsuleId(capsule))

    def status(self, capsule: Capsule, *, block_nbytes: int, row_nbytes: int) -> CapsuleStatus:
        """`capsule`, which is here, as it is now. O(nodes above it)."""
        num_blocks = -(-capsule.num_computed // self._tree.block_size)
        own = num_blocks if capsule.node is None else sole_blocks({capsule.node: 1})
        shared = num_blocks - own
        state_nbytes = 4 * len(capsule.pending) + (row_nbytes if capsule.logits is not None else 0)
        expires = self._expires.get(capsule.id)
        return CapsuleStatus(
            capsule.id,
            capsule.boundary,
            own * block_nbytes + state_nbytes,
            shared * block_nbytes,
            capsule.id not in self._replaceable,
            None if expires is None else max(0.0, expires - self._clock()),
            None if capsule.continuation is None else capsule.continuation.drawn,
            TIER_NAMES[capsule.tier],
        )

    def pin(self, command: Pin) -> Capsule:
        """Keep a capsule from now on, or not. Raises UnknownCapsule, InvalidParameter, CapsulesFull."""
        found, key = self.get(command.capsule), CapsuleId(command.capsule)
        is_replaceable = key in self._replaceable
        if command.is_pinned and is_replaceable:
            self.check_room(found)
            del self._replaceable[key]
            self._kept_blocks += self._num_blocks(found)
            self._journal.capsule(self.describe(found))
        elif not command.is_pinned and not is_replaceable:
            if not self.keeps_answers:
                raise InvalidParameter(
                    "capsule", key, "this worker keeps pinned capsules alone; delete it"
                )
            self._kept_blocks -= self._num_blocks(found)
            found = self._capsules[key] = replace(found, logits=None)  # a row would be in no budget
            self._rows_below.pop(key, None)
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
        cut = self._cut(source, at)
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
            if cut.node is not None:
                self._tree.release(cut.node)
            raise
        self.keep(capsule, ttl_s=command.ttl_s)
        return capsule

    def record(
        self, capsule: Capsule, copy: Copied, logits: bytes | None, fingerprint: str
    ) -> CapsuleRecord:
        """`capsule`, whose KV is `copy`, at rest."""
        key = capsule.id
        return CapsuleRecord(
            key,
            pack_tokens([*copy.tokens, *capsule.pending]),
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
        more = self._tree.window_keys(keys, num)
        below = Below(
            DISK, tokens, record.salt, keys, is_durable=is_durable, is_held=False, more=more
        )
        if key in self._capsules:
            self._remove(key)
        if record.ttl_s is None:
            self._replaceable[key] = None
        elif record.ttl_s > 0:
            self._ttl[key] = record.ttl_s
            self._postpone(key)
        self._add(
            Capsule(
                key, None, pending, logits, None, record.continuation, record.grammar, None, below
            )
        )
        self._keep_rows(key)
        while len(self._replaceable) > self._max_replaceable:
            self.replace_oldest()

    def is_kept(self, capsule: Capsule) -> bool:
        """Whether `capsule` was asked for."""
        return capsule.id not in self._replaceable

    def lost(self, name: str) -> None:
        """The durable record of a capsule is gone: what is left of it below is cache."""
        key = CapsuleId(name)
        found = self._capsules.get(key)
        if found is not None and found.below is not None and found.below.is_durable:
            below = found.below._replace(is_durable=False)
            self._capsules[key] = replace(found, below=below)

    def descend(self, capsule: Capsule) -> None:
        """`capsule`, which has a copy below, gives up its place on the device, if it has one."""
        if capsule.id in self._droppable:
            self._drop(capsule.id)

    def is_here(self, capsule: Capsule) -> bool:
        """Whether `capsule`, once got, is still what goes by its id."""
        return self._capsules.get(capsule.id) is capsule

    # Above and below

    def sink(self, capsule: Capsule, below: Below) -> None:
        """`capsule` has a copy `below`, and gives up its place on the device, if it has one."""
        key, old = capsule.id, capsule.below
        self._uncount(capsule)
        self._capsules[key] = replace(capsule, node=None, below=below)
        if capsule.node is not None:
            self._tree.release(capsule.node)
        if old is not None:
            self._let_go(key, old, below)
        self._keep_rows(key)

    def _keep_rows(self, key: CapsuleId) -> None:
        """`key` came below: of the capsules there the last `MAX_ROWS_BELOW` keep their logits.

        Forks of the others compute their last tokens again, a block of them at most.
        """
        if self._capsules[key].logits is None:
            return
        self._rows_below[key] = None
        while len(self._rows_below) > MAX_ROWS_BELOW:
            oldest = next(iter(self._rows_below))
            del self._rows_below[oldest]
            self._capsules[oldest] = replace(self._capsules[oldest], logits=None)

    def lift(self, capsule: Capsule, node: Node, logits: object | None) -> Capsule:
        """`capsule` is on the device again, and stays below; the hold on `node` passes to the registry."""
        key = capsule.id
        assert capsule.node is None, f"{key} is on the device"
        kept = None
        if not capsule.pending and key not in self._replaceable:
            kept = capsule.logits if capsule.logits is not None else logits
        self._rows_below.pop(key, None)
        lifted = self._capsules[key] = replace(capsule, node=node, logits=kept)
        self._droppable[key] = None
        self._tree.seal(node)
        return lifted

    def _drop(self, key: CapsuleId) -> None:
        """Give up the place on the device of a capsule that is below too."""
        found = self._capsules[key]
        assert found.node is not None, f"{key} is below alone"
        del self._droppable[key]
        self._capsules[key] = replace(found, node=None)
        self._tree.release(found.node)
        self._keep_rows(key)

    def _let_go(self, key: CapsuleId, old: Below, new: Below | None) -> None:
        """The copy `old` of a capsule is replaced by `new`, or gone."""
        assert self._lower is not None, "a copy below, without tiers"
        if old.is_held:
            self._lower.release(old.all_keys)
        if old.is_durable and (new is None or not new.is_durable):
            self._lower.forget(key)

    def _leave_below(self, key: CapsuleId) -> bool:
        """Whether the replaceable `key`, whose room is needed, stays as a text, with what is below of it."""
        found = self._capsules[key]
        if self._lower is None or not self._lower.has_host or found.node is None:
            return False
        copy = copy_of(self._tree, found.node)
        keys, num_full = copy.all_keys, len(copy.tokens) // self._tree.block_size
        if copy.more:  # windows are given up before the rest is evicted: it goes down as one
            self._lower.offload(keys[:num_full], copy.blocks[:num_full])
        if copy.num_untold:
            self._lower.offload_untold(keys[num_full:], copy.blocks[num_full:])
        below = Below(
            HOST,
            copy.tokens,
            found.salt,
            copy.keys,
            is_durable=False,
            is_held=False,
            more=copy.more,
        )
        self.sink(found, below)
        return True

    def release(self, capsule: str) -> None:
        """Forget the capsule; branches forked from it go on. Raises UnknownCapsule."""
        key = CapsuleId(capsule)
        if key not in self._capsules:
            raise UnknownCapsule(capsule)
        self._journal.capsule(CapsuleReleased(capsule))
        self._remove(key)

    def _remove(self, key: CapsuleId) -> None:
        found = self._capsules.pop(key)
        request = request_of(key)
        self._num_left[request] -= 1
        if not self._num_left[request]:
            del self._num_left[request]
        self._uncount(found)
        self._replaceable.pop(key, None)
        self._ttl.pop(key, None)
        self._expires.pop(key, None)
        if found.node is not None:
            self._tree.release(found.node)
        if found.below is not None:
            self._let_go(key, found.below, None)

    def _uncount(self, capsule: Capsule) -> None:
        """`capsule` leaves its place on the device, or all places."""
        self._droppable.pop(capsule.id, None)
        self._rows_below.pop(capsule.id, None)
        if capsule.id not in self._replaceable:
            self._kept_blocks -= self._num_blocks(capsule)

    def replace_oldest(self) -> None:
        """Release the least recently used replaceable capsule. There must be one."""
        self.release(next(iter(self._replaceable)))
        self._num_replaced += 1

    def _least_wanted(self) -> CapsuleId:
        """The least recently used replaceable capsule with blocks here, rather not of a retained text."""
        tree = self._tree
        nodes = {key: self._capsules[key].node for key in self._replaceable}
        here = [(key, node) for key, node in nodes.items() if node is not None]
        free = (key for key, node in here if not tree.is_retained(node))
        return next(free, here[0][0])

    def reclaim(self, num_blocks: int, kept: Container[Node]) -> bool:
        """Release replaceable capsules, oldest first, until the tree has `num_blocks` more to give.

        False, with none released, if all of them would not do (`num_reclaimable`).
        """
        if self.num_reclaimable(kept) < num_blocks:
            return False
        enough = self._tree.num_available + num_blocks
        while self._tree.num_available < enough:
            if self._droppable:
                self._drop(next(iter(self._droppable)))
                continue
            key = next(key for key in self._replaceable if self._capsules[key].node is not None)
            if len(self._tree.retention):
                key = self._least_wanted()
            self._give_way(key)
        return True

    def _give_way(self, key: CapsuleId) -> None:
        """The replaceable `key`, which has blocks here, gives them up."""
        if not self._leave_below(key):
            self.release(key)
            self._num_replaced += 1

    def reclaim_any(self) -> bool:
        """Have the oldest replaceable capsule give up its blocks; False if none has any."""
        if self._droppable:
            self._drop(next(iter(self._droppable)))
            return True
        here = (key for key in self._replaceable if self._capsules[key].node is not None)
        key = next(here, None)
        if key is None:
            return False
        self._give_way(key)
        return True

    def num_reclaimable(self, kept: Container[Node]) -> int:
        """Blocks that only replaceable capsules hold; those of nodes in `kept` don't count."""
        if not self._replaceable and not self._droppable:
            return 0
        keys = {**self._replaceable, **self._droppable}
        found = (self._capsules[key].node for key in keys)
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
        return CapsuleStored(capsule.id, capsule.boundary, pack_hashes(hashes))

    def describe_all(self) -> tuple[CapsuleStored, ...]:
        return tuple(self.describe(capsule) for capsule in self._capsules.values())

    def holds(self) -> dict[Node, int]:
        """The number of capsules that hold each node."""
        return dict(Counter(c.node for c in self._capsules.values() if c.node is not None))

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        assert Counter(map(request_of, self._capsules)) == self._num_left, "capsules miscounted"
        assert set(self._replaceable) <= set(self._capsules), "a replaceable capsule is gone"
        assert set(self._expires) == set(self._ttl), "expiry without time to live"
        assert set(self._expires) <= set(self._capsules), "a capsule that is gone may expire"
        earliest = min(self._expires.values(), default=inf)
        assert self._next_expiry <= earliest, "a capsule expires unseen"
        assert len(self._replaceable) <= self._max_replaceable, "too many replaceable capsules"
        kept = sum(map(self._num_blocks, self._kept()))
        assert self._kept_blocks == kept, f"kept blocks {self._kept_blocks}, are {kept}"
        capsules = self._capsules.values()
        assert all(c.node.holders > 0 for c in capsules if c.node is not None), "nothing is held"
        assert all(c.node is not None or c.below is not None for c in capsules), "one is nowhere"
        twice = {c.id for c in capsules if c.node is not None and c.below is not None}
        assert twice == set(self._droppable), "droppable capsules miscounted"
        rows = {c.id for c in capsules if c.node is None and c.logits is not None}
        assert rows == set(self._rows_below), "logits below miscounted"

    def stats(self) -> CapsuleStats:
        left = len(self._replaceable)
        kept = len(self._capsules) - left
        return CapsuleStats(kept, left, self._num_replaced, self._num_refused)

    def _kept(self) -> Iterator[Capsule]:
        return (c for key, c in self._capsules.items() if key not in self._replaceable)

    def _num_blocks(self, capsule: Capsule) -> int:
        """Blocks of the device that nothing but its release gives back."""
        if capsule.node is None or capsule.below is not None:
            return 0
        return self._tree.weight(capsule.boundary) + self._row_blocks

    def _postpone(self, key: CapsuleId) -> None:
        self._expires[key] = self._clock() + self._ttl[key]
        self._next_expiry = min(self._next_expiry, self._expires[key])

    def _add(self, capsule: Capsule) -> None:
        assert capsule.id not in self._capsules, f"capsule {capsule.id} made twice"
        self._capsules[capsule.id] = capsule
        request = request_of(capsule.id)
        self._num_left[request] = self._num_left.get(request, 0) + 1
        if capsule.node is not None:
            self._tree.seal(capsule.node)
        self._journal.capsule(self.describe(capsule))
