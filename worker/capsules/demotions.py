"""Demotions of capsules to the tiers below, and the records of those on disk: what `Demote` asks for.

A capsule stays usable while it is copied down. It gives up its place on the device when the copy is there:
for disk, when its record is committed. From then on its device blocks are cache.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

from mallee.protocol.codec import encode
from mallee.protocol.errors import InvalidParameter, MalleeError, TierFull, UnknownCapsule
from mallee.protocol.ids import CapsuleId, owner_of
from mallee.protocol.messages import Delete, Demote
from mallee.protocol.model import ModelSpec
from mallee.worker.capsules.capsule import Below, Capsule, Copied, copy_of
from mallee.worker.capsules.record import CapsuleRecord
from mallee.worker.capsules.registry import CapsuleRegistry
from mallee.worker.kv.node import Node
from mallee.worker.kv.tiers.lower import LowerTiers
from mallee.worker.kv.tiers.moves import DISK, HOST, TIER_NAMES, Moved
from mallee.worker.kv.tree import BranchTree

Told: TypeAlias = Callable[[CapsuleId, MalleeError | None], None]


class Model(Protocol):
    """The model whose capsules these are."""

    @property
    def spec(self) -> ModelSpec: ...

    def dump(self, logits: Any) -> bytes:
        """Kept logits as bytes."""
        ...


class _Way(NamedTuple):
    """A capsule on its way down."""

    capsule: Capsule
    below: Below  # as it will lie there
    nbytes: int  # promised for that
    told: Told


class Demotions:
    """Takes capsules down. Holds what is being copied."""

    def __init__(
        self,
        tree: BranchTree,
        capsules: CapsuleRegistry,
        lower: LowerTiers | None,
        model: Model,
    ) -> None:
        self._tree = tree
        self._capsules = capsules
        self._lower = lower
        self._model = model
        self._in_copy: Counter[Node] = Counter()
        self._committing: Counter[CapsuleId] = Counter()  # records on their way to disk
        self._deleting: dict[CapsuleId, list[Told]] = {}  # whose records are on their way out

    def demote(self, command: Demote, told: Told) -> None:
        """Begin; `told` gets the capsule once it is there.

        Raises UnknownCapsule, InvalidParameter, TierFull, CapsulesFull.
        """
        capsule = self._capsules.get(command.capsule)
        if capsule.id in self._deleting:
            raise UnknownCapsule(command.capsule)
        lower = self._lower
        if lower is None or command.tier not in (HOST, DISK) or not lower.has(command.tier):
            raise InvalidParameter(
                "tier",
                TIER_NAMES[command.tier] if 0 <= command.tier < len(TIER_NAMES) else command.tier,
                "its worker has none of that kind: set engine.host_gib, or engine.disk_path; of a disk"
                " that could not be opened its log says why",
            )
        below = capsule.below
        if not capsule.num_computed:
            raise InvalidParameter("capsule", command.capsule, "it has no KV: fork it instead")
        if below is not None and below.tier >= command.tier and (below.is_held or below.is_durable):
            self._capsules.descend(capsule)
            told(capsule.id, None)
            return
        if capsule.node is None:
            assert below is not None, "a capsule that is nowhere"
            if not (command.tier == DISK and below.is_held):
                raise InvalidParameter(
                    "capsule", command.capsule, "its blocks may be gone: promote it first"
                )
        copy = self._copied(capsule)
        is_durable = command.tier == DISK
        below = Below(
            command.tier,
            copy.tokens,
            capsule.salt,
            copy.keys,
            is_durable=is_durable,
            is_held=not is_durable,
            more=copy.more,
        )
        way = _Way(capsule, below, self._capsules.promise_below(capsule, below), told)
        if command.tier == HOST:
            try:
                lower.park(
                    copy.all_keys,
                    copy.blocks,
                    lambda moved: self._arrived(way, moved),
                    num_untold=copy.num_untold,
                )
            except TierFull:
                self._capsules.forgo_below(way.nbytes)
                raise
        else:
            self._commit(lower, capsule, copy, lambda moved: self._arrived(way, moved))
        if capsule.node is not None:
            self._tree.hold(capsule.node)
            self._in_copy[capsule.node] += 1

    def delete(self, command: Delete, told: Told) -> None:
        """Begin; `told` gets the capsule, if there is one, once nothing of it can come back."""
        key, lower = CapsuleId(command.capsule), self._lower
        if key in self._deleting:
            self._deleting[key].append(told)
        elif lower is not None and (self._is_durable(key) or lower.is_recording(key)):
            self._deleting[key] = [told]
            lower.forget(key, lambda moved: self._deleted(key, moved.error))
        else:
            self._deleting[key] = [told]
            self._deleted(key, None)

    def _deleted(self, key: CapsuleId, error: MalleeError | None) -> None:
        """The record of a capsule is gone from disk, or could not be removed."""
        waiting = self._deleting.pop(key)
        if error is None:
            self._capsules.lost(key)
            if self._capsules.peek(key) is not None:
                self._capsules.release(key)
        for told in waiting:
            told(key, error)

    def renew(self, capsule: Capsule) -> None:
        """Have the record of `capsule`, if it is durable, say how it is kept from now on."""
        below, lower = capsule.below, self._lower
        if (
            lower is None
            or below is None
            or not below.is_durable
            or not lower.has_disk(below.all_keys)
            or capsule.id in self._deleting
        ):
            return

        def ended(moved: Moved) -> None:
            self._committing[capsule.id] -= 1
            self._forget(capsule.id)

        self._commit(lower, capsule, self._copied_below(below), ended)

    def _commit(
        self, lower: LowerTiers, capsule: Capsule, copy: Copied, ended: Callable[[Moved], None]
    ) -> None:
        self._committing[capsule.id] += 1
        lower.commit(
            capsule.id,
            encode(self._record(capsule, copy)),
            copy.all_keys,
            copy.blocks or None,
            ended,
            num_untold=copy.num_untold,
            owner=owner_of(capsule.salt.rpartition("/")[2]),
            is_kept=self._capsules.is_kept(capsule),
        )

    def record(self, capsule: Capsule) -> CapsuleRecord:
        """`capsule`, which is here, at rest. O(tokens)."""
        return self._record(capsule, self._copied(capsule))

    def _record(self, capsule: Capsule, copy: Copied) -> CapsuleRecord:
        logits = None if capsule.logits is None else self._model.dump(capsule.logits)
        return self._capsules.record(capsule, copy, logits, self._model.spec.identity)

    def _copied(self, capsule: Capsule) -> Copied:
        """The parts of a copy of `capsule`; without blocks, if it is below alone."""
        if capsule.node is not None:
            return copy_of(self._tree, capsule.node)
        below = capsule.below
        assert below is not None, "a capsule that is nowhere"
        return self._copied_below(below)

    def _copied_below(self, below: Below) -> Copied:
        has_tail = len(below.tokens) % self._tree.block_size > 0
        return Copied(below.tokens, below.keys, (), has_tail, below.more)

    def holds(self) -> Counter[Node]:
        """The nodes that are being copied, and how often."""
        return Counter(self._in_copy)

    def _arrived(self, way: _Way, moved: Moved) -> None:
        capsule, below, nbytes, told = way
        assert self._lower is not None
        node = capsule.node
        self._capsules.forgo_below(nbytes)
        if below.is_durable:
            self._committing[capsule.id] -= 1
        if moved.error is not None:
            told(capsule.id, moved.error)
        elif not self._capsules.is_here(capsule):  # it was released or used otherwise meanwhile
            if below.is_held:
                self._lower.release(below.all_keys)
            told(capsule.id, None)
        else:
            self._capsules.sink(capsule, below)
            told(capsule.id, None)
        if below.is_durable:
            self._forget(capsule.id)
        if node is not None:
            self._in_copy[node] -= 1
            self._in_copy = +self._in_copy
            self._tree.release(node)

    def _forget(self, name: CapsuleId) -> None:
        """Drop the record that may be on disk, unless it is the capsule's, or another one follows it."""
        assert self._lower is not None
        if self._committing[name]:
            return
        del self._committing[name]
        if not self._is_durable(name):
            self._lower.forget(name)

    def _is_durable(self, name: CapsuleId) -> bool:
        found = self._capsules.peek(name)
        return found is not None and found.below is not None and found.below.is_durable
