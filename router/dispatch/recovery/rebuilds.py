"""Capsules that are computed again under their own id, and the dispatches held for them meanwhile."""

from collections.abc import Iterator

from mallee.protocol.ids import CapsuleId
from mallee.router.dispatch.shards import Dispatch


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
