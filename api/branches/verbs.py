"""Verbs of running branches, carried out by the gateway that runs the request, whichever is asked."""

from collections.abc import Awaitable
from typing import Any, Final, Literal

import msgspec

from mallee.gateway.gateway import Gateway
from mallee.protocol.codec import Decoder, encode
from mallee.protocol.errors import PeerSilent, Unavailable, UnknownBranch, UnknownRequest
from mallee.protocol.hashing import as_tokens
from mallee.protocol.ids import RequestId, Scope
from mallee.protocol.messages import pack_tokens, unpack_tokens

WAIT_S: Final = 30.0  # for a branch's next boundary, at another gateway
_VERB: Final = "branches.verb"


class Verb(msgspec.Struct, frozen=True, array_like=True):
    """`branches`: None for all; `inject` names one."""

    kind: Literal["inject", "prune", "prioritize"]
    branches: list[int] | None = None
    tokens: bytes = b""
    replaces: bool = False
    priority: float = 0.0


_decode_verb: Final = Decoder(Verb, "a verb of branches")
_decode_found: Final = Decoder(list[int], "a verb's outcome")


def injection(branch: int, tokens: Any, *, replaces: bool) -> Verb:
    return Verb("inject", [branch], pack_tokens(tokens), replaces)


class BranchVerbs:
    """One gateway's side: it carries out what others pass on, and passes on what it doesn't run."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        gateway.peers.share(_VERB, self._tell_outcome)

    async def run(self, request: RequestId, verb: Verb, scope: Scope) -> list[int]:
        """The branches that it was carried out on; of `inject` the place in the answer.

        Raises UnknownRequest, UnknownBranch, what the verb raises, and Unavailable where the gateway that
        runs it does not answer.
        """
        try:
            return await self._here(request, verb, scope)
        except (UnknownRequest, UnknownBranch):
            raw = await self._elsewhere(request, verb, scope)
            if raw is None:
                raise
        return _decode_found(raw)

    async def _elsewhere(self, request: RequestId, verb: Verb, scope: Scope) -> bytes | None:
        ask = self._gateway.peers.ask_maker
        try:
            return await ask(_VERB, request, scope, given=encode(verb), wait_s=WAIT_S)
        except PeerSilent:
            raise Unavailable(
                f"the gateway that runs {request} did not answer in {WAIT_S:g} s; look at its stream before"
                " you send this again"
            ) from None

    async def _here(self, request: RequestId, verb: Verb, scope: Scope) -> list[int]:
        match verb.kind:
            case "inject":
                (branch,) = verb.branches or [0]
                tokens = as_tokens(unpack_tokens(verb.tokens))
                place: Awaitable[int] = self._gateway.requests.inject(
                    request, branch, tokens, scope, replaces=verb.replaces
                )
                return [await place]
            case "prune":
                return self._gateway.requests.prune(request, verb.branches, scope)
            case "prioritize":
                return self._gateway.requests.prioritize(
                    request, verb.branches, verb.priority, scope
                )

    async def _tell_outcome(self, key: str, scope: Scope, given: bytes) -> bytes | None:
        request = RequestId(key)
        if not self._gateway.requests.runs(request, scope):
            return None
        return encode(await self._here(request, _decode_verb(given), scope))
