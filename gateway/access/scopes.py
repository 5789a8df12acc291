"""Scopes: the owners of state, and ids of requests that are bound to theirs.

A scope is a tenant and, in it, a cache salt, as one digest. It salts the hashes of its blocks, so that scopes
share no block, not even in timing. The id of a request, and with it those of its answers' capsules, has a
tag that is right for its own scope alone: every gateway can tell without a lookup whether an id may be
used by a caller. An id of another scope and one that never was are refused alike, at the same speed. The
tag also covers the account that bounds the request, so that no client can leave it out.

Digests and tags are keyed with the app's secret: without it nobody can find blocks whose hashes collide
with another tenant's, or try out from an id which tenant it belongs to.
"""

import hashlib
import hmac
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Final

from mallee.protocol.ids import COMMON, RequestId, Scope, on_account

_MARK_NBYTES: Final = 3
_RANDOM_NBYTES: Final = 9
_TAG_NBYTES: Final = 8
_SCOPE_NBYTES: Final = 16
# With its account, the number of a part of the request (one that went on elsewhere has), and of a branch.
_ID: Final = re.compile(
    rf"req_([0-9a-f]{{{2 * (_MARK_NBYTES + _RANDOM_NBYTES)}}})([0-9a-f]{{{2 * _TAG_NBYTES}}})"
    r"(~[0-9a-f]{16}(?:[0-9a-f]{16})?)?(?:-[0-9]{1,9})?(?:\.[0-9]{1,9})?",
    re.ASCII,
)


class Scopes:
    """The `RequestIds` of one app: gateways with the same secret understand each other's.

    An id begins with the mark of the gateway that made it, which alone knows what runs of it. `draw(n)`
    gives n random bytes.
    """

    def __init__(self, secret: bytes, *, draw: Callable[[int], bytes], gateway: str = "") -> None:
        self._key = hashlib.blake2b(secret, person=b"mallee scopes", digest_size=32).digest()
        self._draw = draw
        self._mark = _mark(gateway)

    def scope(self, tenant: str, salt: str = "") -> Scope:
        """The scope of `salt` in `tenant`; no two pairs have the same one."""
        if not (tenant or salt):
            return COMMON
        name = f"{len(tenant)}:{tenant}{salt}".encode(errors="surrogatepass")
        return Scope(self._digest(b"scope", name, _SCOPE_NBYTES).hex())

    def new(self, scope: Scope, account: str = "") -> RequestId:
        random = self._mark + self._draw(_RANDOM_NBYTES).hex()
        tag = self._tag(on_account(random, account), scope)
        return RequestId(on_account(f"req_{random}{tag}", account))

    def belongs(self, name: str, scope: Scope) -> bool:
        found = _ID.fullmatch(name)
        if found is None:
            return False
        tag = self._tag(f"{found[1]}{found[3] or ''}", scope)
        return hmac.compare_digest(found[2], tag)

    def made_at(self, name: str, gateway: str) -> bool:
        return name.partition("_")[2].startswith(_mark(gateway))

    def _tag(self, made: str, scope: Scope) -> str:
        return self._digest(b"id", f"{made}{scope}".encode(), _TAG_NBYTES).hex()

    def _digest(self, use: bytes, content: bytes, nbytes: int) -> bytes:
        return hashlib.blake2b(content, key=self._key, person=use, digest_size=nbytes).digest()


@lru_cache(64)
def _mark(gateway: str) -> str:
    return hashlib.blake2b(gateway.encode(), digest_size=_MARK_NBYTES).hexdigest()
