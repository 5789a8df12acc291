"""Scopes and ids of tests."""

import secrets
from collections.abc import Callable

from mallee.actors.access.scopes import Scopes
from mallee.protocol.ids import RequestId, Scope

SCOPES = Scopes(b"secret", draw=secrets.token_bytes)


class PlainIds:
    """`RequestIds` with the names that `make` gives; every id belongs to every scope."""

    def __init__(self, make: Callable[[], str]) -> None:
        self._make = make

    def new(self, scope: Scope) -> RequestId:
        return RequestId(self._make())

    def belongs(self, name: str, scope: Scope) -> bool:
        return True
