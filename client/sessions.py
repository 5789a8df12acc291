"""Sessions as the server tells of them: their calls and answers; no I/O.

Requests name theirs by `session=...`, as those of a `Session` do.
"""

import msgspec

from mallee.client.calls import Budget, Call, query_of
from mallee.client.html import nodes_html


class SessionData(msgspec.Struct, frozen=True, kw_only=True):
    """A session: the capsules of it that are remembered, and its requests that run at the gateway asked."""

    id: str
    parent: str | None
    created: int
    last_used: int
    capsules: int
    running: int


class SessionNode(msgspec.Struct, frozen=True, kw_only=True):
    """A capsule of a session. `is_root`: another session's. Without `held` no worker has it any more."""

    capsule: str
    parent: str | None
    request: str
    tokens: int
    created: int
    is_root: bool
    held: bool
    worker: str | None = None
    pinned: bool | None = None
    tier: str | None = None

    @property
    def words(self) -> str:
        """Its tokens, and where it lies."""
        where = (self.tier or "held") if self.held else "gone"
        return f"{self.tokens} tokens, {where}{' pinned' if self.pinned else ''}"


class Resource(msgspec.Struct, frozen=True, kw_only=True):
    """`reserved`: for what runs below or at other gateways; what that doesn't use returns."""

    limit: float
    used: float
    reserved: float
    left: float


class SessionBudget(msgspec.Struct, frozen=True, kw_only=True):
    """A budget as it stands; None: not bounded by it. Not `kept`: its gateway is gone, or can't be asked."""

    kept: bool
    tokens: Resource | None = None
    branches: Resource | None = None
    wall_s: Resource | None = None


class BoundSession(SessionData, frozen=True, kw_only=True):
    """A session, and the budget that it was given."""

    budget: SessionBudget | None = None


class SessionTree(BoundSession, frozen=True, kw_only=True):
    """A session with its capsules, oldest first. `children`: sessions whose parent it is."""

    children: list[str]
    nodes: list[SessionNode]

    def _repr_html_(self) -> str:
        """The tree of its capsules, which notebooks show."""
        below = f", below {self.parent}" if self.parent else ""
        return nodes_html(
            f"session {self.id}{below}",
            [(node.capsule, node.parent, node.words) for node in self.nodes],
        )


class SessionFork(BoundSession, frozen=True, kw_only=True):
    """A new session, which begins with `capsule`."""

    capsule: str


class ClosedSession(msgspec.Struct, frozen=True, kw_only=True):
    """A session's end: capsules `released`, those `left` with silent workers, requests `cancelled`."""

    id: str
    released: int
    left: int
    cancelled: int


def made_up() -> str:
    """A name that no other session has."""
    from uuid import uuid4

    return f"session-{uuid4().hex}"


def list_sessions(limit: int, cache_salt: str | None, after: str | None) -> Call:
    query = query_of({"limit": limit, "after": after or None})
    return Call("GET", f"/v1/sessions{query}", cache_salt=cache_salt)


def show_session(session: str, cache_salt: str | None) -> Call:
    return Call("GET", _path(session), cache_salt=cache_salt)


def bound_session(session: str, budget: Budget, parent: str | None, cache_salt: str | None) -> Call:
    given = {"budget": budget, "parent": parent, "cache_salt": cache_salt}
    body = {name: value for name, value in given.items() if value is not None}
    return Call("PUT", _path(session), body, cache_salt)


def fork_session(
    session: str,
    new: str | None,
    capsule: str | None,
    cache_salt: str | None,
    *,
    budget: Budget | None = None,
) -> Call:
    given = {"session": new, "capsule": capsule, "cache_salt": cache_salt, "budget": budget}
    body = {name: value for name, value in given.items() if value is not None}
    return Call("POST", f"{_path(session)}/fork", body, cache_salt)


def close_session(session: str, cache_salt: str | None) -> Call:
    return Call("DELETE", _path(session), cache_salt=cache_salt)


def _path(session: str) -> str:
    from urllib.parse import quote

    return f"/v1/sessions/{quote(session, safe='')}"
