"""Records of capsules on disk: written, written anew, removed, and told of when that is so.

What is answered is what another life of the worker finds: a capsule that changes while its record is
written (a pin) has it written again before anything is answered. Records of one capsule are written and
removed in the order in which that is begun here.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from mallee.protocol.codec import encode
from mallee.protocol.errors import BlocksMissing, MalleeError
from mallee.protocol.ids import CapsuleId, owner_of
from mallee.protocol.model import ModelSpec
from mallee.worker.capsules.capsule import Below, Capsule, Copied, copy_of
from mallee.worker.capsules.record import CapsuleRecord
from mallee.worker.capsules.registry import CapsuleRegistry
from mallee.worker.kv.tree import BranchTree
from mallee.worker.transfer.loans import LentCapsule
from mallee.worker.transfer.lower import LowerTiers
from mallee.worker.transfer.values import Move, Moved, Record, Transfer

Told: TypeAlias = Callable[[CapsuleId, MalleeError | None], None]


class Model(Protocol):
    """The model whose capsules these are."""

    @property
    def spec(self) -> ModelSpec: ...

    def dump(self, logits: Any) -> bytes:
        """Kept logits as bytes. Raises DeviceMemoryExhausted."""
        ...


class DiskRecords:
    """Records under way."""

    def __init__(
        self, tree: BranchTree, capsules: CapsuleRegistry, lower: LowerTiers | None, model: Model
    ) -> None:
        self._tree = tree
        self._capsules = capsules
        self._lower = lower
        self._model = model
        self._committing: Counter[CapsuleId] = Counter()  # records on their way to disk
        self._unanswered: dict[CapsuleId, list[Told]] = {}  # until the record is the capsule's
        self._deleting: dict[CapsuleId, list[Told]] = {}  # whose records are on their way out

    def commit(
        self,
        capsule: Capsule,
        copy: Copied,
        told: Told,
        written: Callable[[MalleeError | None], None] = lambda error: None,
    ) -> None:
        """Write the record of `capsule`, after the blocks of `copy`.

        `written` is called when it is there, or failed; `told` when it says what the capsule is by then.
        Raises DeviceMemoryExhausted, with nothing changed.
        """
        key, lower = capsule.id, self._lower
        assert lower is not None, "a record, without tiers"
        payload = self._encoded(capsule, copy)
        end_read = self._tree.keep_bytes(copy.blocks)

        def ended(moved: Moved) -> None:
            end_read()
            self._committing[key] -= 1
            written(moved.error)
            if moved.error is not None:
                told(key, moved.error)
            else:
                self._unanswered.setdefault(key, []).append(told)
            if not self._committing[key]:
                self._written(key, moved)

        self._committing[key] += 1
        lower.commit(
            key,
            payload,
            copy.all_keys,
            copy.blocks or None,
            ended,
            num_untold=copy.num_untold,
            owner=owner_of(capsule.salt.rpartition("/")[2]),
            is_kept=self._capsules.is_kept(capsule),
        )

    def _written(self, key: CapsuleId, moved: Moved) -> None:
        """The last record of a capsule that was under way is on disk, or failed."""
        assert self._lower is not None
        del self._committing[key]
        waiting = self._unanswered.pop(key, [])
        found = self._durable(key)
        if found is None:  # it was released or used otherwise meanwhile
            self._lower.forget(key)
        elif waiting and moved.error is None and not self._says(moved.move, found):
            self.renew(found, lambda key, error: _tell_all(waiting, key, error))
            return
        _tell_all(waiting, key, None)

    def renew(self, capsule: Capsule, told: Told) -> None:
        """Have the record of `capsule` say how it is kept from now on, if it is durable or may be soon."""
        key = capsule.id
        is_recorded = self._durable(key) is not None or self._committing[key]
        if self._lower is None or not is_recorded or key in self._deleting:
            told(key, None)
            return
        copy = self.copied(capsule)
        missing = [] if copy.blocks else self._lower.missing(copy.all_keys)
        if missing:
            told(key, BlocksMissing(len(missing), len(copy.all_keys), missing[0]))
            return
        try:
            self.commit(capsule, copy, told)
        except MalleeError as error:
            told(key, error)

    def delete(self, key: CapsuleId, told: Told) -> None:
        """Release the capsule, if it is here; `told` is called when nothing of it can come back."""
        lower = self._lower
        if key in self._deleting:
            self._deleting[key].append(told)
        elif lower is not None and (self._durable(key) is not None or lower.is_recording(key)):
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
        _tell_all(waiting, key, error)

    # Reading

    def is_deleting(self, key: CapsuleId) -> bool:
        """Whether the capsule's record is being removed for good."""
        return key in self._deleting

    def record(self, capsule: Capsule, copy: Copied | None = None) -> CapsuleRecord:
        """`capsule`, which is here, at rest; `copy` are the parts of it, if they are known. O(tokens)."""
        return self._record(capsule, self.copied(capsule) if copy is None else copy)

    def lent(self, name: str) -> LentCapsule:
        """The capsule `name`, as others may read it. Raises UnknownCapsule."""
        capsule = self._capsules.get(name)
        node, num_computed = capsule.node, capsule.num_computed
        if node is not None:
            copy = copy_of(self._tree, node)
            return LentCapsule(encode(self.record(capsule, copy)), num_computed, node, copy.blocks)
        keys = () if capsule.below is None else capsule.below.all_keys
        return LentCapsule(encode(self.record(capsule)), num_computed, keys=keys)

    def copied(self, capsule: Capsule) -> Copied:
        """The parts of a copy of `capsule`; without blocks, if its copy is below already."""
        below = capsule.below
        if capsule.node is not None and (below is None or not below.is_durable):
            return copy_of(self._tree, capsule.node)
        assert below is not None, "a capsule that is nowhere"
        return self._copied_below(below)

    def _copied_below(self, below: Below) -> Copied:
        has_tail = len(below.tokens) % self._tree.block_size > 0
        return Copied(below.tokens, below.keys, (), has_tail, below.more)

    def _encoded(self, capsule: Capsule, copy: Copied) -> bytes:
        return encode(self._record(capsule, copy))

    def _record(self, capsule: Capsule, copy: Copied) -> CapsuleRecord:
        logits = None if capsule.logits is None else self._model.dump(capsule.logits)
        return self._capsules.record(capsule, copy, logits, self._model.spec.identity)

    def _says(self, move: Move, capsule: Capsule) -> bool:
        """Whether the record that `move` wrote is that of `capsule` as it is now, as far as can be told."""
        assert capsule.below is not None, "not on disk"
        try:
            record = self._encoded(capsule, self._copied_below(capsule.below))
        except MalleeError:  # its logits could not be read: they are when it is written anew
            return False
        match move:
            case Transfer(record=Record() as written):
                said = (written.payload, written.is_kept)
                return said == (record, self._capsules.is_kept(capsule))
        raise AssertionError("no record was written")

    def _durable(self, key: CapsuleId) -> Capsule | None:
        """The capsule, if it is here and its copy is on disk, with its record."""
        found = self._capsules.peek(key)
        is_durable = found is not None and found.below is not None and found.below.is_durable
        return found if is_durable else None


def _tell_all(waiting: list[Told], key: CapsuleId, error: MalleeError | None) -> None:
    for told in waiting:
        told(key, error)
