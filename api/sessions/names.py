"""The session of a request, as its client names it: in the body, or in a header of the client's own kind.

The first place that names one counts, and its parent is read there too:

    body    mallee.session (and mallee.parent_session), then session_id (vLLM, SGLang)
    header  x-dynamo-session-id, x-dynamo-parent-session-id       NVIDIA Dynamo, aiperf
            x-claude-code-session-id, -agent-id, -parent-agent-id  Claude Code
            thread-id, x-codex-parent-thread-id                   Codex (of forks, as its metadata say)
            x-session-id, x-parent-session-id                     OpenCode, vLLM, llm-d
            session-id, session_id                                llm-d
            x-session-affinity                                    llm-d, aiperf
            x-smg-routing-key                                     SGLang's model gateway

A body that names a session wrongly is refused. A header is another system's: it may mean something else,
so one that can't be a name counts as absent, and no request fails for it. A name is one segment of a path,
so slashes in a header's are written `%2F`.
"""

from typing import Final, NamedTuple

import msgspec
from starlette.datastructures import Headers

from mallee.protocol.api.shared import MAX_SESSION, AnyRequest
from mallee.protocol.errors import InvalidParameter

FINAL_HEADER: Final = "x-dynamo-session-final"
_TRUE: Final = ("true", "1")


class SessionNames(NamedTuple):
    """The session of a request, its parent, and whether this is its last request."""

    session: str = ""
    parent: str = ""
    is_final: bool = False


NO_SESSION: Final = SessionNames()


class _CodexTurn(msgspec.Struct):
    forked_from_thread_id: str = ""


class _Kind(NamedTuple):
    """Headers of one kind of client. An agent's session is one of its own, below that of its parent agent."""

    session: str
    parent: str = ""
    agent: str = ""
    parent_agent: str = ""

    def read(self, headers: Headers) -> tuple[str, str]:
        """The session and its parent; empty: it names none."""
        session, parent = _named(headers, self.session), _named(headers, self.parent)
        agent = _named(headers, self.agent)
        if not session or not agent:
            return session, parent
        above = _named(headers, self.parent_agent)
        parent = f"{session}:{above}" if above and above != agent else session
        return _checked(f"{session}:{agent}") or session, _checked(parent) or session


KINDS: Final = (
    _Kind("x-dynamo-session-id", "x-dynamo-parent-session-id"),
    _Kind(
        "x-claude-code-session-id",
        agent="x-claude-code-agent-id",
        parent_agent="x-claude-code-parent-agent-id",
    ),
    _Kind("thread-id", "x-codex-parent-thread-id"),
    _Kind("x-session-id", "x-parent-session-id"),
    _Kind("session-id"),
    _Kind("session_id"),
    _Kind("x-session-affinity"),
    _Kind("x-smg-routing-key"),
)
SESSION_HEADERS: Final = {
    name.encode() for name in (FINAL_HEADER, *(n for kind in KINDS for n in kind if n))
}


def read_session(request: AnyRequest, headers: Headers) -> SessionNames:
    """Raises InvalidParameter for what the body says."""
    own = request.mallee
    session, parent = own.session or request.session_id, own.parent_session
    if session or parent:
        check_session(own.session, "mallee.session")
        check_session(parent, "mallee.parent_session")
        check_session(request.session_id, "session_id")
    is_final = own.session_final
    if not SESSION_HEADERS.isdisjoint(name for name, _ in headers.raw):
        if not session:
            found = (kind.read(headers) for kind in KINDS)
            session, above = next((each for each in found if each[0]), ("", ""))
            parent = parent or above or _forked_from(request)
        is_final = is_final or _named(headers, FINAL_HEADER).lower() in _TRUE
    if own.parent_session and not session:
        raise InvalidParameter(
            "mallee.parent_session", parent, "name the session too, as mallee.session"
        )
    return SessionNames(session, parent if parent != session else "", bool(session) and is_final)


def _forked_from(request: AnyRequest) -> str:
    """The thread that a Codex thread was forked from, as the metadata in its body say; "" if none was."""
    told = getattr(request, "client_metadata", None)
    turn = told.get("x-codex-turn-metadata") if isinstance(told, dict) else None
    if not isinstance(turn, str):
        return ""
    try:
        found = msgspec.json.decode(turn, type=_CodexTurn)
    except msgspec.DecodeError:
        return ""
    return _checked(found.forked_from_thread_id)


def check_session(name: str, param: str) -> None:
    """Raises InvalidParameter if `name` can't be one; an empty one names none."""
    if name and not _checked(name):
        remedy = f"give at most {MAX_SESSION} printable characters, none of them a slash"
        raise InvalidParameter(param, name, remedy)


def _named(headers: Headers, name: str) -> str:
    """The header, if it can be a name and comes once; else nothing."""
    given = headers.getlist(name) if name else []
    return _checked(given[0].strip().replace("/", "%2F")) if len(given) == 1 else ""


def _checked(name: str) -> str:
    """The name if it can be one, which is a segment of a path."""
    is_name = len(name) <= MAX_SESSION and name.isprintable() and "/" not in name
    return name if is_name else ""
