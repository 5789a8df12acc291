"""Capsules that are not there yet, promised or computed again, and the dispatches held for them."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, NamedTuple

from mallee.protocol.errors import MalleeError, Unavailable, from_wire
from mallee.protocol.ids import CapsuleId, WorkerId
from mallee.router.dispatch.shards import Dispatch

MAX_BROKEN: Final = 4096  # of the newest that failed, the causes are remembered


class Promise(NamedTuple):
    """A capsule that is not there yet: `worker` computes it (None: it waits for one), or it has failed."""

    num_tokens: int
    worker: WorkerId | None = None
    since: float = 0.0  # seconds, on the dispatcher's clock
    error: MalleeError | None = None

    def check_whole(self) -> None:
        """Raises the error by which it failed, if it has: a copy, as each caller adds where it was raised."""
        if self.error is not None:
            raise from_wire(self.error.to_wire())


class BrokenPromises:
    """The newest capsules whose prefills have failed."""

    __slots__ = ("_broken",)

    def __init__(self) -> None:
        self._broken: OrderedDict[CapsuleId, Promise] = OrderedDict()

    def add(self, capsule: CapsuleId, promise: Promise) -> None:
        """The oldest is forgotten for it, if there are too many."""
        self._broken[capsule] = promise
        if len(self._broken) > MAX_BROKEN:
            self._broken.popitem(last=False)

    def get(self, capsule: CapsuleId) -> Promise | None:
        return self._broken.get(capsule)

    def forget(self, capsule: CapsuleId) -> None:
        """Ignored if it is not here."""
        self._broken.pop(capsule, None)


def not_kept() -> Unavailable:
    """The failure of a prefill whose worker has left no capsule."""
    return Unavailable(
        "the prompt was computed, but the worker kept no capsule; retry later", was_computed=True
    )


class Rebuilds:
    """The capsules that are under way again, each with the dispatches that are held for it, in order."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: dict[CapsuleId, list[Dispatch]] = {}

    def __contains__(self, capsule: CapsuleId) -> bool:
        return capsule in self._held

    def __iter__(self) -> Iterator[CapsuleId]:
        return iter(self._held)

    def held(self) -> set[Dispatch]:
        """All that is held."""
        return {dispatch for held in self._held.values() for dispatch in held}

    def begin(self, capsule: CapsuleId) -> None:
        """`capsule` is under way, if it was not."""
        self._held.setdefault(capsule, [])

    def hold(self, capsule: CapsuleId, dispatch: Dispatch) -> None:
        self._held[capsule].append(dispatch)

    def end(self, capsule: CapsuleId) -> list[Dispatch]:
        """`capsule` is there, or given up. Returns what was held for it."""
        return self._held.pop(capsule, [])

    def discard(self, dispatch: Dispatch) -> None:
        """Hold `dispatch` no more, if it is held."""
        for held in self._held.values():
            if dispatch in held:
                held.remove(dispatch)
