"""Calls of sessions, and their trees; no I/O.

Requests name theirs by `session=...`, as those of a `Session` do.
"""

from mallee.client.calls import Budget, Call, given, query_of, quoted
from mallee.client.html import Rows, nodes_html, nodes_text
from mallee.protocol.api import sessions as protocol


class SessionTree(protocol.SessionTree, frozen=True, kw_only=True):
    """A session with its capsules, oldest first. `children`: sessions whose parent it is."""

    def __str__(self) -> str:
        """The tree of its capsules."""
        return nodes_text(*self._drawn())

    def _repr_html_(self) -> str:
        """The tree of its capsules, which notebooks show."""
        return nodes_html(*self._drawn())

    def _drawn(self) -> tuple[str, Rows]:
        below = f", below {self.parent}" if self.parent else ""
        rows = [(node.capsule, node.parent, words(node)) for node in self.nodes]
        return f"session {self.id}{below}", rows


def words(node: protocol.SessionNode) -> str:
    """A capsule's tokens, and where it lies."""
    where = (node.tier or "held") if node.held else "gone"
    return f"{node.tokens} tokens, {where}{' pinned' if node.pinned else ''}"


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
    body = {"budget": budget, "parent": parent, "cache_salt": cache_salt}
    return Call("PUT", _path(session), given(body), cache_salt)


def fork_session(
    session: str,
    new: str | None,
    capsule: str | None,
    cache_salt: str | None,
    *,
    budget: Budget | None = None,
) -> Call:
    body = {"session": new, "capsule": capsule, "cache_salt": cache_salt, "budget": budget}
    return Call("POST", f"{_path(session)}/fork", given(body), cache_salt)


def close_session(session: str, cache_salt: str | None) -> Call:
    return Call("DELETE", _path(session), cache_salt=cache_salt)


def _path(session: str) -> str:
    return f"/v1/sessions/{quoted(session)}"
