"""Scopes and ids of tests."""

import re
import secrets
from collections.abc import Callable

from mallee.gateway.access.scopes import Scopes
from mallee.protocol.ids import RequestId, Scope, on_account

SCOPES = Scopes(b"secret", draw=secrets.token_bytes)


def scopes_at(gateway: str) -> Scopes:
    """As SCOPES, of one gateway among others."""
    return Scopes(b"secret", draw=secrets.token_bytes, gateway=gateway)


_PARTS = re.compile(r"(?:-[0-9]+)?(?:\.[0-9]+)?")
MAX_ISSUED = 1024
_issued: dict[str, Scope] = {}  # by all gateways of this process


class PlainIds:
    """`RequestIds` with the names that `make` gives; each belongs to the scope it was given for last."""

    def __init__(self, make: Callable[[], str]) -> None:
        self._make = make

    def new(self, scope: Scope, account: str = "") -> RequestId:
        name = on_account(self._make(), account)
        _issued[name] = scope
        if len(_issued) > MAX_ISSUED:
            del _issued[next(iter(_issued))]
        return RequestId(name)

    def belongs(self, name: str, scope: Scope) -> bool:
        """Of a request, of a part of it, or of the capsule of a branch."""
        return any(
            _issued.get(name[:end]) == scope
            for end in range(len(name) + 1)
            if _PARTS.fullmatch(name, end)
        )

    def made_at(self, name: str, gateway: str) -> bool:
        """These names don't tell."""
        return True
