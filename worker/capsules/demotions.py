"""Demotions of capsules to the tiers below: what `Demote` asks for.

A capsule stays usable while it is copied down. It gives up its place on the device when the copy is there:
for disk, when its record is committed. From then on its device blocks are cache.
"""

from typing import NamedTuple

from mallee.protocol.errors import InvalidParameter, MalleeError, TierFull, UnknownCapsule
from mallee.protocol.ids import CapsuleId
from mallee.protocol.messages import Demote
from mallee.worker.capsules.capsule import Below, Capsule, copy_of
from mallee.worker.capsules.disk_records import DiskRecords, Told
from mallee.worker.capsules.registry import CapsuleRegistry
from mallee.worker.kv.tree import BranchTree
from mallee.worker.transfer.lower import LowerTiers
from mallee.worker.transfer.values import DISK, HOST, TIER_NAMES, Moved


class _Way(NamedTuple):
    """A capsule on its way down."""

    key: CapsuleId
    below: Below  # as it will lie there
    nbytes: int  # promised for that


class Demotions:
    """Takes capsules down. Their blocks may be given up meanwhile, and are free when they are read."""

    def __init__(
        self,
        tree: BranchTree,
        capsules: CapsuleRegistry,
        lower: LowerTiers | None,
        records: DiskRecords,
    ) -> None:
        self._tree = tree
        self._capsules = capsules
        self._lower = lower
        self._records = records

    def demote(self, command: Demote, told: Told) -> None:
        """Begin; `told` gets the capsule once it is there.

        Raises UnknownCapsule, InvalidParameter, TierFull, CapsulesFull, DeviceMemoryExhausted.
        """
        capsule = self._capsules.get(command.capsule)
        if self._records.is_deleting(capsule.id):
            raise UnknownCapsule(command.capsule)
        lower = self._lower
        if lower is None or command.tier not in (HOST, DISK) or not lower.has(command.tier):
            raise InvalidParameter(
                "tier",
                TIER_NAMES[command.tier] if 0 <= command.tier < len(TIER_NAMES) else command.tier,
                "its worker has none of that kind: set engine.host_gib (not on unified memory, where that"
                " is KV), or engine.disk_path; of a disk that could not be opened its log says why",
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
        if command.tier == HOST:
            self._park(lower, capsule, told)
        else:
            self._commit(capsule, told)

    def _park(self, lower: LowerTiers, capsule: Capsule, told: Told) -> None:
        node = capsule.node
        assert node is not None, "it is below already"
        copy = copy_of(self._tree, node)
        below = Below(HOST, copy.tokens, capsule.salt, copy.keys, False, True, copy.more)
        way = _Way(capsule.id, below, self._capsules.promise_below(capsule, below))

        end_read = self._tree.keep_bytes(copy.blocks)

        def ended(moved: Moved) -> None:
            end_read()
            if moved.error is None:
                self._arrived(way)
            else:
                self._capsules.forgo_below(way.nbytes)
            told(capsule.id, moved.error)

        try:
            lower.park(copy.all_keys, copy.blocks, ended, num_untold=copy.num_untold)
        except TierFull:
            end_read()
            self._capsules.forgo_below(way.nbytes)
            raise

    def _commit(self, capsule: Capsule, told: Told) -> None:
        copy = self._records.copied(capsule)
        below = Below(DISK, copy.tokens, capsule.salt, copy.keys, True, False, copy.more)
        way = _Way(capsule.id, below, self._capsules.promise_below(capsule, below))

        def ended(error: MalleeError | None) -> None:
            if error is None:
                self._arrived(way)
            else:
                self._capsules.forgo_below(way.nbytes)

        try:
            self._records.commit(capsule, copy, told, ended)
        except MalleeError:
            self._capsules.forgo_below(way.nbytes)
            raise

    def _arrived(self, way: _Way) -> None:
        """The copy is there: the capsule lies there, if it is still that text, and nowhere lower."""
        key, below, nbytes = way
        self._capsules.forgo_below(nbytes)
        found = self._capsules.peek(key)
        if found is not None and self._is_of(below, found):
            old = found.below
            if old is None or old.tier <= below.tier or not (old.is_held or old.is_durable):
                self._capsules.sink(found, below)
                return
            self._capsules.descend(found)
        if below.is_held:
            assert self._lower is not None, "a copy below, without tiers"
            self._lower.release(below.all_keys)

    def _is_of(self, below: Below, capsule: Capsule) -> bool:
        """Whether `below` is a copy of the KV of `capsule`."""
        if (capsule.salt, capsule.num_computed) != (below.salt, len(below.tokens)):
            return False
        if capsule.below is not None:
            return capsule.below.keys == below.keys
        return capsule.node is not None and copy_of(self._tree, capsule.node).keys == below.keys
