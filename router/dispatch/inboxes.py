"""Tokens that clients want in running branches, until workers have taken them in.

A branch whose worker is lost goes on elsewhere, and what its update did not tell is sent there again.
"""

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from mallee.protocol.errors import QueueFull
from mallee.protocol.ids import RequestId

MAX_WAITING: Final = 64  # injections of one branch


class Injection(NamedTuple):
    """Tokens as commands carry them. `replaces`: those that wait before it are dropped."""

    name: RequestId
    tokens: bytes
    replaces: bool


class Inboxes:
    """Injections by request and branch, in order."""

    def __init__(self) -> None:
        self.waiting: dict[tuple[RequestId, int], dict[str, Injection]] = {}  # not to be changed
        self._owners: dict[str, tuple[RequestId, int]] = {}

    def put(self, request: RequestId, branch: int, injection: Injection) -> None:
        """Raises QueueFull."""
        waiting = self.waiting.setdefault((request, branch), {})
        if len(waiting) >= MAX_WAITING:
            raise QueueFull(len(waiting), MAX_WAITING)
        waiting[injection.name] = injection
        self._owners[injection.name] = request, branch

    def of(self, request: RequestId, branch: int) -> Iterable[Injection]:
        """Those that wait for a branch."""
        return self.waiting.get((request, branch), {}).values()

    def owner(self, name: str) -> tuple[RequestId, int] | None:
        """The request and the branch that an injection waits for; None: it does not."""
        return self._owners.get(name)

    def settle(self, name: str) -> None:
        """It is in its branch's text, or never will be. Ignored if it waits no more."""
        owner = self._owners.pop(name, None)
        if owner is not None:
            waiting = self.waiting[owner]
            del waiting[name]
            if not waiting:
                del self.waiting[owner]

    def drop(self, request: RequestId, branch: int) -> Iterator[str]:
        """The branch is over: the names of those that waited for it."""
        for name in self.waiting.pop((request, branch), {}):
            del self._owners[name]
            yield name

    def requests(self) -> set[RequestId]:
        """The requests that something waits for."""
        return {request for request, _ in self.waiting}
