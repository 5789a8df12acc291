"""Moves of capsules: down to the tiers below, as records to disk and to other workers, and back up.

A capsule stays usable while it is copied down. It gives up its place on the device when the copy is there:
for disk, when its record is committed. From then on its device blocks are cache.

A reply names what another life of the worker would find: a capsule that changes while its record is written
(a pin) has it written again before anything is answered. Records of one capsule are written and removed in
the order in which that is begun here.

A capsule comes back whole, by one transfer, or not at all. Commands and forks wait for it meanwhile.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from mallee.protocol.codec import encode
from mallee.protocol.errors import (
    BlocksMissing,
    CodecError,
    IncompatibleCapsule,
    InvalidParameter,
    MalleeError,
    PoolExhausted,
    TierFull,
    UnknownCapsule,
)
from mallee.protocol.hashing import NO_HASHES
from mallee.protocol.ids import CapsuleId, owner_of
from mallee.protocol.messages import Demote, Share
from mallee.protocol.model import ModelSpec
from mallee.worker.capsules.capsule import Capsule, Parked, TextKV, blocks_of, kv_of
from mallee.worker.capsules.record import capsule_on_disk, decode_record, record_of
from mallee.worker.capsules.registry import CapsuleRegistry
from mallee.worker.kv.node import Node
from mallee.worker.kv.text import joined
from mallee.worker.kv.tree import BranchTree
from mallee.worker.transfer.loans import LentCapsule
from mallee.worker.transfer.lower import LowerTiers
from mallee.worker.transfer.values import DISK, HOST, TIER_NAMES, Moved

Reply: TypeAlias = Callable[[CapsuleId, MalleeError | None], None]
"""Answers a command about a capsule: it has moved, or why not."""


class Model(Protocol):
    """The model whose capsules these are."""

    @property
    def spec(self) -> ModelSpec: ...

    def dump(self, logits: Any) -> bytes:
        """Kept logits as bytes. Raises DeviceMemoryExhausted."""
        ...

    def undump(self, raw: bytes) -> Any:
        """The same on the device. Raises DeviceMemoryExhausted, CodecError."""
        ...


class Branches(Protocol):
    """The branches of the engine, beside which capsules come back, and those that wait for one."""

    def room_for(self, node: Node, num_tokens: int) -> Node | None:
        """A child of `node` with room for so many tokens, to which the caller's hold passes; None: not yet.

        Raises PoolExhausted if there will be none.
        """
        ...

    def keep_waiting(self, num_steps: int) -> None:
        """The first of those that are to come back has got no room in so many steps; 0: none waits."""
        ...

    def await_tokens_of(self, producer: "Restore") -> bool:
        """Whether any wait for it."""
        ...

    def continue_from(self, producer: "Restore", node: Node) -> None:
        """All tokens of `producer` are there, in `node`: what waits for it goes on."""
        ...


@dataclass(slots=True, eq=False)
class Restore:
    """A capsule on its way back to the device, with those that wait for it.

    It has a `node` once its blocks are on their way there. `num_blocks` are.
    """

    capsule: CapsuleId
    kv: TextKV
    share: Share
    replies: list[Reply] = field(default_factory=list)
    node: Node | None = None
    num_blocks: int = 0

    @property
    def key(self) -> tuple[CapsuleId, int]:
        """Its text's: the id may get another one meanwhile."""
        return self.capsule, self.kv.keys[-1]

    def answer(self, error: MalleeError | None) -> None:
        """Reply to those that asked for it: it is back, or can't come."""
        _answer(self.replies, self.capsule, error)


class Unrestored(NamedTuple):
    """A capsule that can't come back as it was: there is no room for it, or (None) some KV is gone."""

    restore: Restore
    error: MalleeError | None


@dataclass(slots=True)
class _Writing:
    """Records of a capsule on their way to disk: how many, what the last one says, and who waits for it."""

    num: int = 0
    last: tuple[bytes, bool] = (b"", False)
    replies: list[Reply] = field(default_factory=list)


class CapsuleMoves:
    """Moves under way. The blocks that they read may be given up, and are free when they are read."""

    def __init__(
        self,
        tree: BranchTree,
        capsules: CapsuleRegistry,
        lower: LowerTiers | None,
        model: Model,
        branches: Branches,
    ) -> None:
        self.waiting: list[Restore] = []
        """Capsules that are to come back, and have not got room on the device; in order."""
        self.unrestored: list[Unrestored] = []
        """Those that can't, for their owner to take."""
        self._tree = tree
        self._capsules = capsules
        self._lower = lower
        self._model = model
        self._branches = branches
        self._writing: dict[CapsuleId, _Writing] = {}
        self._deleting: dict[CapsuleId, list[Reply]] = {}  # whose records are on their way out
        self._restoring: dict[tuple[CapsuleId, int], Restore] = {}  # also those in `waiting`
        self._num_waited = 0  # steps, by the first of them

    # Down

    def demote(self, command: Demote, reply: Reply) -> None:
        """Begin; `reply` gets the capsule once it is there.

        Raises UnknownCapsule, InvalidParameter, TierFull, CapsulesFull, DeviceMemoryExhausted.
        """
        capsule, lower, tier = self._capsules.get(command.capsule), self._lower, command.tier
        if capsule.id in self._deleting:
            raise UnknownCapsule(command.capsule)
        if lower is None or tier not in (HOST, DISK) or not lower.has(tier):
            raise InvalidParameter(
                "tier",
                TIER_NAMES[tier] if 0 <= tier < len(TIER_NAMES) else tier,
                "its worker has none of that kind: set engine.host_gib (not on unified memory, where that"
                " is KV), or engine.disk_path; of a disk that could not be opened its log says why",
            )
        if not capsule.num_computed:
            raise InvalidParameter("capsule", command.capsule, "it has no KV: fork it instead")
        parked = capsule.parked
        if parked is not None and parked.tier >= tier and parked.is_sure:
            self._capsules.drop(capsule.id)
            reply(capsule.id, None)
            return
        if capsule.node is None and not (tier == DISK and capsule.copy.is_held):
            raise InvalidParameter(
                "capsule", command.capsule, "its blocks may be gone: promote it first"
            )
        kv, blocks = self._kv_to_copy(capsule)
        copy = Parked(kv, tier, is_durable=tier == DISK, is_held=tier == HOST)
        nbytes = self._capsules.promise_parked(capsule, copy)

        def ended(error: MalleeError | None) -> None:
            self._capsules.forgo_parked(nbytes)
            if error is None:
                self._parked(capsule, copy)

        try:
            if tier == HOST:
                self._copy_to_host(lower, capsule.id, kv, blocks, reply, ended)
            else:
                self._write(capsule, kv, blocks, reply, ended)
        except MalleeError:
            self._capsules.forgo_parked(nbytes)
            raise

    def _copy_to_host(
        self,
        lower: LowerTiers,
        key: CapsuleId,
        kv: TextKV,
        blocks: tuple[int, ...],
        reply: Reply,
        end: Callable[[MalleeError | None], None],
    ) -> None:
        """Raises TierFull, with nothing changed."""
        end_read = self._tree.keep_bytes(blocks)

        def ended(moved: Moved) -> None:
            end_read()
            end(moved.error)
            reply(key, moved.error)

        try:
            num_private = kv.num_private(self._tree.block_size)
            lower.park(kv.all_keys, blocks, ended, num_private=num_private)
        except TierFull:
            end_read()
            raise

    def _parked(self, capsule: Capsule, copy: Parked) -> None:
        """The copy is there: the capsule lies there, if it is still that text, and nowhere lower."""
        found = self._capsules.peek(capsule.id)
        if found is not None and (found is capsule or self._is_of(copy.kv, found)):
            old = found.parked
            if old is None or old.tier <= copy.tier or not old.is_sure:
                self._capsules.park(found, copy)
                return
            self._capsules.drop(found.id)
        if copy.is_held:
            assert self._lower is not None, "parked, without tiers"
            self._lower.release(copy.kv.all_keys)

    def _is_of(self, kv: TextKV, capsule: Capsule) -> bool:
        """Whether `kv` is that of `capsule`."""
        if (capsule.salt, capsule.num_computed) != (kv.salt, len(kv.tokens)):
            return False
        return self._kv(capsule).keys == kv.keys

    def _kv(self, capsule: Capsule) -> TextKV:
        if capsule.parked is not None:
            return capsule.parked.kv
        assert capsule.node is not None, "a capsule that is nowhere"
        return kv_of(self._tree, capsule.node)

    def _kv_to_copy(self, capsule: Capsule) -> tuple[TextKV, tuple[int, ...]]:
        """The KV of `capsule`, and its blocks on the device, if it needs a copy that stays."""
        node, parked = capsule.node, capsule.parked
        if node is not None and not (parked is not None and parked.is_durable):
            return self._kv(capsule), blocks_of(self._tree, node)
        return capsule.copy.kv, ()

    # Records

    def _write(
        self,
        capsule: Capsule,
        kv: TextKV,
        blocks: tuple[int, ...],
        reply: Reply,
        written: Callable[[MalleeError | None], None] = lambda error: None,
    ) -> None:
        """Write the record of `capsule`, after its blocks; without any here all of them are below.

        `written` is called when it is there, or failed; `reply` when it says what the capsule is by then.
        Raises DeviceMemoryExhausted, with nothing changed.
        """
        key, lower = capsule.id, self._lower
        assert lower is not None, "a record, without tiers"
        payload, is_kept = self.record(capsule, kv), self._capsules.ttl_s(capsule) is not None
        end_read = self._tree.keep_bytes(blocks)
        writing = self._writing.setdefault(key, _Writing())

        def ended(moved: Moved) -> None:
            end_read()
            writing.num -= 1
            written(moved.error)
            if moved.error is not None:
                reply(key, moved.error)
            else:
                writing.replies.append(reply)
            if not writing.num:
                self._written(key, writing, has_failed=moved.error is not None)

        writing.num += 1
        writing.last = payload, is_kept
        lower.commit(
            key,
            payload,
            kv.all_keys,
            blocks or None,
            ended,
            num_private=kv.num_private(self._tree.block_size),
            owner=owner_of(capsule.salt.rpartition("/")[2]),
            is_kept=is_kept,
        )

    def _written(self, key: CapsuleId, writing: _Writing, *, has_failed: bool) -> None:
        """The last record of a capsule that was under way is on disk, or failed."""
        assert self._lower is not None
        del self._writing[key]
        found = self._durable(key)
        if found is None:  # it was released or used otherwise meanwhile
            self._lower.forget(key)
        elif writing.replies and not has_failed and not self._says(writing, found):
            self.renew(found, lambda key, error: _answer(writing.replies, key, error))
            return
        _answer(writing.replies, key, None)

    def renew(self, capsule: Capsule, reply: Reply) -> None:
        """Have the record of `capsule` say how it is kept from now on, if it is durable or may be soon."""
        key = capsule.id
        is_recorded = self._durable(key) is not None or key in self._writing
        if self._lower is None or not is_recorded or key in self._deleting:
            reply(key, None)
            return
        kv, blocks = self._kv_to_copy(capsule)
        missing = [] if blocks else self._lower.missing(kv.all_keys)
        if missing:
            reply(key, BlocksMissing(len(missing), len(kv.all_keys), missing[0]))
            return
        try:
            self._write(capsule, kv, blocks, reply)
        except MalleeError as error:
            reply(key, error)

    def _says(self, writing: _Writing, capsule: Capsule) -> bool:
        """Whether the last record is that of `capsule` as it is now, as far as that can be known."""
        try:
            record = self.record(capsule, capsule.copy.kv)
        except MalleeError:  # its logits could not be read: they are when it is written anew
            return False
        return writing.last == (record, self._capsules.ttl_s(capsule) is not None)

    def delete(self, key: CapsuleId, reply: Reply) -> None:
        """Release the capsule, if it is here; `reply` is called when nothing of it can come back."""
        lower = self._lower
        if key in self._deleting:
            self._deleting[key].append(reply)
            return
        self._deleting[key] = [reply]
        if lower is not None and (self._durable(key) is not None or lower.is_recording(key)):
            lower.forget(key, lambda moved: self._deleted(key, moved.error))
        else:
            self._deleted(key, None)

    def _deleted(self, key: CapsuleId, error: MalleeError | None) -> None:
        """The record of a capsule is gone from disk, or could not be removed."""
        waiting = self._deleting.pop(key)
        if error is None:
            self._capsules.lose_record(key)
            if self._capsules.peek(key) is not None:
                self._capsules.release(key)
        _answer(waiting, key, error)

    def _durable(self, key: CapsuleId) -> Capsule | None:
        """The capsule, if it is here and its copy is on disk, with its record."""
        found = self._capsules.peek(key)
        parked = None if found is None else found.parked
        return found if parked is not None and parked.is_durable else None

    def record(self, capsule: Capsule, kv: TextKV) -> bytes:
        """`capsule`, which is here and whose KV is `kv`, at rest. O(tokens)."""
        record = record_of(
            capsule,
            kv,
            self._tree,
            logits=None if capsule.logits is None else self._model.dump(capsule.logits),
            ttl_s=self._capsules.ttl_s(capsule),
            fingerprint=self._model.spec.identity,
        )
        return encode(record)

    def lent(self, name: str) -> LentCapsule:
        """The capsule `name`, as others may read it. Raises UnknownCapsule."""
        capsule = self._capsules.get(name)
        kv, node, num_computed = self._kv(capsule), capsule.node, capsule.num_computed
        record = self.record(capsule, kv)
        if node is None:
            return LentCapsule(record, num_computed, keys=kv.all_keys)
        return LentCapsule(record, num_computed, node, blocks_of(self._tree, node))

    def adopt(self, raw: bytes) -> tuple[int, ...]:
        """Take in the record of a capsule that is on disk; those of its keys that no event names."""
        assert self._lower is not None, "a record, without tiers"
        try:
            record = decode_record(raw)
        except CodecError as error:  # of another version, which had other fields
            self._lower.refuse(error)
            return ()
        if record.fingerprint != (ours := self._model.spec.identity):  # nothing finds its blocks
            differs = ("model", record.fingerprint, ours)
            self._lower.refuse(IncompatibleCapsule(record.capsule, [differs]))
            return ()
        logits = None
        if record.logits is not None:
            with suppress(MalleeError):  # without them the last token is computed again
                logits = self._model.undump(record.logits)
        capsule = capsule_on_disk(record, self._tree, logits)
        self._capsules.adopt(capsule, record.ttl_s)
        kv = capsule.copy.kv
        return kv.all_keys[len(kv.all_keys) - kv.num_private(self._tree.block_size) :]

    # Up

    def restore(self, capsule: Capsule, share: Share, reply: Reply | None = None) -> Restore:
        """Have `capsule`, which is parked alone and has KV, come back; `reply` gets it once it is there."""
        restore = Restore(capsule.id, capsule.copy.kv, share)
        known = self._restoring.get(restore.key)
        if known is None:
            self._restoring[restore.key] = restore
            self.waiting.append(restore)
        else:
            restore = known
        if reply is not None:
            restore.replies.append(reply)
        return restore

    def begin_restores(self) -> None:
        """Begin transfers for those that wait, in order, as far as there is room.

        One that nobody waits for any more needs none.
        """
        while self.waiting and self._try_begin(self.waiting[0]):
            del self.waiting[0]
            self._num_waited = 0
        self._num_waited = self._num_waited + 1 if self.waiting else 0
        self._branches.keep_waiting(self._num_waited)

    def _try_begin(self, restore: Restore) -> bool:
        """Whether the KV of `restore` is on its way, or need not come or can't; else there is no room yet."""
        tree, lower, kv = self._tree, self._lower, restore.kv
        assert lower is not None, "parked, without tiers"
        if not restore.replies and not self._branches.await_tokens_of(restore):
            del self._restoring[restore.key]
            return True
        size, end = tree.block_size, len(kv.tokens)
        full = np.array(kv.keys[: end // size], np.uint64) if end >= size else NO_HASHES
        node = tree.attach(full, kv.salt)
        if node.end == end:
            self._came(restore, node)
            return True
        begin = node.end // size
        tree.offload_path(full[begin : tree.index.count_leading(full)].tolist(), begin)
        wanted = (*kv.keys[begin:], *tree.side_keys(kv.keys, end, begin))
        parts = lower.parts(wanted)
        is_whole = sum(len(part.at) for part in parts) == len(wanted)
        if not is_whole or not lower.is_cheaper(parts, end - node.end):
            tree.release(node)
            self._gone(restore, None)
            return True
        above = node

        def room() -> list[int] | None:
            found = self._branches.room_for(above, end - begin * size)
            if found is None:
                return None
            restore.node, restore.num_blocks = found, len(wanted)
            first = begin - found.base // size  # it may have been merged with those above it
            blocks = found.blocks[first : first + len(kv.keys) - begin]
            return blocks + tree.side_rows(found, end, begin)

        try:
            if lower.fetch(parts, room, lambda num: self._fetched(restore, num)):
                return True
        except PoolExhausted as error:
            tree.release(above)
            if any(other.node is not None for other in self._restoring.values()):
                return False  # they can give up theirs once they are here
            self._gone(restore, error)
            return True
        tree.release(above)
        return False

    def _fetched(self, restore: Restore, num_blocks: int) -> None:
        """The first of the blocks of `restore` have come."""
        node, kv, tree = restore.node, restore.kv, self._tree
        assert node is not None, "fetched to nowhere"
        if num_blocks < restore.num_blocks:
            tree.release(node)
            restore.node = None
            self._gone(restore, None)
            return
        tokens = joined(tree.notation, kv.tokens[node.end :])
        tree.commit(node, tokens, np.array(kv.keys, np.uint64))
        self._came(restore, node)

    def _came(self, restore: Restore, node: Node) -> None:
        """All of `restore` is in `node`, which is held."""
        del self._restoring[restore.key]
        restore.node = node
        self.restored(restore, node, None)
        self._branches.continue_from(restore, node)
        self._tree.release(node)
        restore.answer(None)

    def restored(self, restore: Restore, node: Node, logits: object | None) -> object | None:
        """The KV of `restore` is in `node`: the capsule lies there, unless it is another text by now.

        `logits` are of the next token; those that are kept are returned.
        """
        found = self._capsules.peek(restore.capsule)
        if found is None or found.node is not None or found.copy.kv.keys != restore.kv.keys:
            return logits
        self._tree.hold(node)
        return self._capsules.restore(found, node, logits).logits

    def _gone(self, restore: Restore, error: MalleeError | None) -> None:
        del self._restoring[restore.key]
        self.unrestored.append(Unrestored(restore, error))

    def holds(self) -> Counter[Node]:
        """The nodes that are held for what is under way, and how often."""
        nodes = (restore.node for restore in self._restoring.values())
        return Counter(node for node in nodes if node is not None)


def _answer(replies: list[Reply], key: CapsuleId, error: MalleeError | None) -> None:
    for reply in replies:
        reply(key, error)
