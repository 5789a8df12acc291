"""Messages between gateways about clients' sessions, so that each can list and close all."""

from typing import Final

import msgspec

from mallee.protocol.codec import Decoder
from mallee.protocol.ids import Scope


class NodeNote(msgspec.Struct, frozen=True, array_like=True):
    """A capsule that a request of a session left.

    `parent`: the capsule that it continues, "" for none. `prompt_tokens` of its request, whose block
    `prompt_blocks` has the chain hash `prompt_hash`. `is_root`: another session's, which this one forked.
    """

    capsule: str
    parent: str
    request: str
    tokens: int
    created: float
    prompt_tokens: int = 0
    prompt_blocks: int = 0
    prompt_hash: int = 0
    is_root: bool = False


class SessionNote(msgspec.Struct, frozen=True, array_like=True):
    """A session, and what is new in it. With `is_closed` it is over, whatever is known of it.

    `tenant`: whose share of memory it takes. `budget` names the account that bounds it, which it was given
    at `given` (seconds since the epoch); `above` one of a session above it that is over.
    """

    scope: Scope
    session: str
    parent: str = ""
    nodes: tuple[NodeNote, ...] = ()
    is_closed: bool = False
    tenant: str = ""
    budget: str = ""
    given: float = 0.0
    above: str = ""


class SessionNotes(msgspec.Struct, frozen=True, array_like=True):
    """Notes of one gateway."""

    gateway: str
    notes: tuple[SessionNote, ...]


class SessionsAsk(msgspec.Struct, frozen=True, array_like=True):
    """A gateway has come: the others tell what they know."""

    gateway: str


decode_session_note: Final = Decoder(SessionNote, "a note of a session")
decode_session_notes: Final = Decoder(SessionNotes, "notes of sessions")
decode_sessions_ask: Final = Decoder(SessionsAsk, "a question for sessions")
