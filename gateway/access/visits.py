"""One request's use of its key, as long as it lasts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from mallee.gateway.access.quotas import Use
from mallee.protocol.ids import CapsuleId


class Visit:
    """One request, as long as the context lasts; it counts in the use of its key, if it has one."""

    __slots__ = ("_num_branches", "_use")

    def __init__(self, use: Use | None) -> None:
        self._use = use
        self._num_branches = 0

    def __enter__(self) -> None:
        """Raises QuotaExceeded."""
        if self._use is not None:
            self._use.begin()

    def __exit__(self, *_: object) -> None:
        if self._use is not None:
            self._use.end(self._num_branches)

    @contextmanager
    def staying(self) -> Iterator["Visit"]:
        """The part of this request that goes on after its answer, as long as the context lasts."""
        if self._use is None:
            yield self
            return
        self._use.stay()
        more = Visit(self._use)
        try:
            yield more
        finally:
            more.__exit__()

    async def ready(self, **need: float) -> None:
        """See `Use.ready`: `branches`, `capsules`, `capsule_tokens`; by default of a request to begin."""
        if self._use is not None:
            await self._use.ready(**need)

    def another(self) -> "Visit":
        """One more request under the same key, which has not begun."""
        return Visit(self._use)

    def begin(self, branches: int, tokens: int) -> None:
        """Count a prompt of so many tokens, and its branches. Raises QuotaExceeded, QuotaTooSmall."""
        if self._use is not None:
            self._use.add_branches(branches)
            self._num_branches += branches
            self._use.charge_prompt(tokens)

    def charge(self, tokens: int) -> None:
        """So many tokens of its answer."""
        if self._use is not None:
            self._use.charge(tokens)

    def unkeep(self, capsule: CapsuleId) -> None:
        """See `Use.unkeep`."""
        if self._use is not None:
            self._use.unkeep(capsule)

    @contextmanager
    def making(
        self, tokens: int, is_kept: Callable[[CapsuleId], bool]
    ) -> Iterator[Callable[[CapsuleId], None]]:
        """See `Use.making`."""
        if self._use is None:
            yield lambda capsule: None
            return
        with self._use.making(tokens, is_kept) as keep:
            yield keep


UNLIMITED: Final = Visit(None)
