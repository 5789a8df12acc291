"""Directory of capsules: written on the reply path, repaired by the workers' events."""

from collections import OrderedDict
from collections.abc import Iterator, Set
from heapq import heapify, heappop
from typing import NamedTuple, TypeVar

from mallee.protocol.errors import UnknownCapsule
from mallee.protocol.events import CapsuleReleased, CapsuleStored, unpack_hashes
from mallee.protocol.hashing import Hashes
from mallee.protocol.ids import COMMON, CapsuleId, Scope, WorkerId
from mallee.protocol.model import WeightVersion

K = TypeVar("K", WorkerId, Scope)


class CapsuleEntry(NamedTuple):
    """One capsule as a router knows it."""

    capsule: CapsuleId
    worker: WorkerId
    boundary: int  # committed tokens
    hashes: Hashes  # of its full blocks
    created: float  # seconds, when it was first learned, on that component's clock
    is_announced: bool = False  # by an event of its worker, not by a reply alone
    scope: Scope = COMMON  # its owner's
    is_computing: bool = False  # its prefill runs there, and has not ended
    is_durable: bool = False  # on disk there


class _Lost(NamedTuple):
    """A capsule that went with its worker: the weights of that, and, if it was on disk there, when."""

    weights: WeightVersion | None = None
    durable_at: float | None = None


class CapsuleDirectory:
    """At most `capacity` capsules; beyond it the least recently used entry is forgotten."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity={capacity}: must be at least 1")
        self.capacity = capacity
        self._entries: OrderedDict[CapsuleId, CapsuleEntry] = OrderedDict()
        self._of_worker: dict[WorkerId, set[CapsuleId]] = {}
        self._of_scope: dict[Scope, set[CapsuleId]] = {}
        self._unannounced: dict[WorkerId, set[CapsuleId]] = {}  # of entries, few
        self._lost: OrderedDict[CapsuleId, _Lost] = OrderedDict()  # with their workers

    def __len__(self) -> int:
        return len(self._entries)

    def learn(
        self,
        capsule: CapsuleId,
        worker: WorkerId,
        *,
        boundary: int,
        hashes: Hashes,
        created: float,
        is_announced: bool = False,
        scope: Scope | None = None,
        is_computing: bool = False,
        is_durable: bool | None = None,
    ) -> None:
        """Note that `capsule` is on `worker`. Learning it again renews it, but keeps `created` and the
        longer of two hash runs: a reply knows fewer than the event, and either may come first. `scope` and
        `is_durable` None: as it is known. One that `is_computing` there is not one that is there already.
        """
        known = self._entries.get(capsule)
        if is_computing and known is not None and not known.is_computing:
            return
        if scope is None:
            scope = COMMON if known is None else known.scope
        if known is not None and known.worker == worker:
            created, is_announced = known.created, known.is_announced or is_announced
            if known.boundary == boundary and len(known.hashes) > len(hashes):
                hashes = known.hashes
            is_durable = known.is_durable if is_durable is None else is_durable
        if known is None or known.worker != worker or known.scope != scope:
            self.forget(capsule)
            self._of_worker.setdefault(worker, set()).add(capsule)
            self._of_scope.setdefault(scope, set()).add(capsule)
        self._lost.pop(capsule, None)
        self._entries[capsule] = CapsuleEntry(
            capsule,
            worker,
            boundary,
            hashes,
            created=created,
            is_announced=is_announced,
            scope=scope,
            is_computing=is_computing,
            is_durable=bool(is_durable),
        )
        self._entries.move_to_end(capsule)
        if not is_announced and not is_computing:
            self._unannounced.setdefault(worker, set()).add(capsule)
        else:
            _discard(self._unannounced, worker, capsule)
        if len(self._entries) > self.capacity:
            self.forget(next(iter(self._entries)))

    def apply(
        self, worker: WorkerId, event: CapsuleStored | CapsuleReleased, *, created: float
    ) -> None:
        """Take in an event of `worker`. A release by a worker that isn't the owner is ignored."""
        capsule = CapsuleId(event.capsule)
        match event:
            case CapsuleStored():
                hashes = unpack_hashes(event.hashes)
                self.learn(
                    capsule,
                    worker,
                    boundary=event.boundary,
                    hashes=hashes,
                    created=created,
                    is_announced=True,
                    scope=Scope(event.scope),
                    is_durable=event.is_durable,
                )
            case CapsuleReleased():
                known = self._entries.get(capsule)
                if known is not None and known.worker == worker:
                    self.forget(capsule)

    def get(self, capsule: CapsuleId) -> CapsuleEntry | None:
        """The entry, now the most recently used; None if it is not known."""
        entry = self._entries.get(capsule)
        if entry is not None:
            self._entries.move_to_end(capsule)
        return entry

    def lookup(self, capsule: CapsuleId) -> CapsuleEntry:
        """As `get`. Raises UnknownCapsule."""
        if (entry := self.get(capsule)) is None:
            raise UnknownCapsule(capsule)
        return entry

    def of_worker(self, worker: WorkerId) -> list[CapsuleId]:
        """The capsules on `worker`, by name."""
        return sorted(self._of_worker.get(worker, ()))

    def of_scope(self, scope: Scope, after: str) -> Iterator[CapsuleId]:
        """The capsules of `scope` by name, behind `after`, without those that go meanwhile.

        O(capsules of `scope`) for all, and O(log) for each that is taken.
        """
        later = [capsule for capsule in self._of_scope.get(scope, ()) if capsule > after]
        heapify(later)
        while later:
            capsule = heappop(later)
            if capsule in self._entries:
                yield capsule

    def forget(self, capsule: CapsuleId) -> bool:
        """Forget `capsule`. False if it was not known."""
        entry = self._entries.pop(capsule, None)
        if entry is None:
            return False
        _discard(self._of_worker, entry.worker, capsule)
        _discard(self._unannounced, entry.worker, capsule)
        _discard(self._of_scope, entry.scope, capsule)
        return True

    def drop_worker(self, worker: WorkerId, at: float, weights: WeightVersion | None = None) -> int:
        """Forget all capsules of `worker`, which is over since `at` (seconds); returns how many.

        They were made by `weights`.
        """
        owned = self._of_worker.pop(worker, set())
        self._unannounced.pop(worker, None)
        for capsule in owned:
            entry = self._entries.pop(capsule)
            _discard(self._of_scope, entry.scope, capsule)
            self._lost[capsule] = _Lost(weights, at if entry.is_durable else None)
        self._bound_lost()
        return len(owned)

    def note_lost(self, capsule: CapsuleId) -> None:
        """`capsule` went with a worker that was not known to have it."""
        self._lost.setdefault(capsule, _Lost())
        self._bound_lost()

    def _bound_lost(self) -> None:
        while len(self._lost) > self.capacity:
            self._lost.popitem(last=False)

    def was_lost(self, capsule: CapsuleId) -> bool:
        """Whether `capsule` went with its worker, not by its own end."""
        return capsule in self._lost

    def lost_weights(self, capsule: CapsuleId) -> WeightVersion | None:
        """The weights of a capsule that went with its worker; None if that is not known."""
        return self._lost.get(capsule, _Lost()).weights

    def durable_until(self, capsule: CapsuleId) -> float | None:
        """The time at which a capsule on disk went with its worker; None if there is no such."""
        return self._lost.get(capsule, _Lost()).durable_at

    def drop_older(self, worker: WorkerId, *, created_before: float, keep: Set[CapsuleId]) -> None:
        """Forget `worker`'s capsules, but those in `keep`, and those known by a reply since `created_before`.

        An event that announced one is older than the list `keep`, or it would not be taken in yet. The list
        has none that are computing.
        """
        for capsule in self._of_worker.get(worker, set()) - keep:
            entry = self._entries[capsule]
            if entry.is_computing:
                continue
            if entry.is_announced or entry.created < created_before:
                self.forget(capsule)

    def has_unannounced(self, worker: WorkerId, *, created_before: float) -> bool:
        """Whether a capsule of `worker` is known by a reply alone, and from before then."""
        unannounced = self._unannounced.get(worker, ())
        return any(self._entries[each].created < created_before for each in unannounced)

    def check(self) -> None:
        """Raises AssertionError unless both directions agree and the bound holds."""
        assert len(self._entries) <= self.capacity, f"{len(self)} entries > {self.capacity}"
        rebuilt: dict[WorkerId, set[CapsuleId]] = {}
        unannounced: dict[WorkerId, set[CapsuleId]] = {}
        of_scope: dict[Scope, set[CapsuleId]] = {}
        for capsule, entry in self._entries.items():
            assert capsule == entry.capsule, f"{entry.capsule} is filed under {capsule}"
            rebuilt.setdefault(entry.worker, set()).add(capsule)
            of_scope.setdefault(entry.scope, set()).add(capsule)
            if not entry.is_announced and not entry.is_computing:
                unannounced.setdefault(entry.worker, set()).add(capsule)
        assert rebuilt == self._of_worker, "entries and per-worker sets differ"
        assert of_scope == self._of_scope, "entries and per-scope sets differ"
        assert unannounced == self._unannounced, "entries and those without an event differ"


def _discard(index: dict[K, set[CapsuleId]], key: K, capsule: CapsuleId) -> None:
    """Take `capsule` out of the set of `key`, and the set away with its last one."""
    owned = index.get(key, set())
    owned.discard(capsule)
    if not owned:
        index.pop(key, None)
