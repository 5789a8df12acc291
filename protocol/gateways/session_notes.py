"""Clients' sessions as gateways keep them in their store, and what these ask each other of what runs."""

from typing import Final

import msgspec

from mallee.protocol.codec import Decoder


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


class SessionHead(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A session without its nodes. Times are seconds since the epoch.

    `tenant`: whose share of memory it takes. `gateway` alone uses it; "": several do. `budget` names the
    account that bounds it, which it was given at `given`; `above` one of a session above it, which may be
    over. Its nodes were put last at `kept`.
    """

    parent: str
    tenant: str
    created: float
    used: float
    gateway: str
    kept: float
    budget: str = ""
    given: float = 0.0
    above: str = ""


class SessionEnd(msgspec.Struct, frozen=True, array_like=True):
    """A session of that name was closed: what was created until then is over."""

    closed: float


class EndedRequests(msgspec.Struct, frozen=True, array_like=True):
    """The part of a closed session that a gateway had: requests that ran, and the session's own capsules."""

    num_cancelled: int
    capsules: tuple[str, ...]


class Derived(msgspec.Struct, frozen=True, array_like=True):
    """A capsule that is the beginning of another one, and belongs to the same session."""

    capsule: str
    tokens: int


decode_ended_requests: Final = Decoder(EndedRequests, "requests of a closed session")
decode_derived: Final = Decoder(Derived, "a derived capsule")
