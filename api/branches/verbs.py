"""Verbs of running branches, carried out by the gateway that runs the request, whichever is asked."""

from collections.abc import Awaitable
from typing import Any, Final, Literal

import msgspec

from mallee.gateway.gateway import Gateway
from mallee.protocol.codec import Decoder, encode
from mallee.protocol.errors import LookupIncomplete, Unavailable, UnknownBranch, UnknownRequest
from mallee.protocol.hashing import as_tokens
from mallee.protocol.ids import RequestId, Scope
from mallee.protocol.messages import pack_tokens, unpack_tokens

WAIT_S: Final = 30.0  # for a branch's next boundary, at another gateway
_RUNS: Final = "branches.runs"  # a request that runs
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
        gateway.records.share(_RUNS, self._tell_runs)
        gateway.records.share(_VERB, self._tell_outcome)

    async def run(self, request: RequestId, verb: Verb, scope: Scope) -> list[int]:
        """The branches that it was carried out on; of `inject` the place in the answer.

        Raises UnknownRequest, UnknownBranch, what the verb raises, LookupIncomplete, and Unavailable where
        the gateway that runs it took too long.
        """
        try:
            return await self._here(request, verb, scope)
        except (UnknownRequest, UnknownBranch):
            records = self._gateway.records
            if await records.fetch(_RUNS, request, scope) is None:
                raise
        given = encode(verb)
        try:
            raw = await records.fetch(_VERB, request, scope, given=given, wait_s=WAIT_S)
        except LookupIncomplete:
            raise Unavailable(
                f"the gateway that runs {request} did not answer in {WAIT_S:g} s; look at its stream before"
                " you send this again"
            ) from None
        if raw is None:
            raise UnknownRequest(request)  # it has just ended
        return _decode_found(raw)

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

    async def _tell_runs(self, key: str, scope: Scope, _: bytes) -> bytes | None:
        return b"" if self._gateway.requests.runs(RequestId(key), scope) else None

    async def _tell_outcome(self, key: str, scope: Scope, given: bytes) -> bytes | None:
        request = RequestId(key)
        if not self._gateway.requests.runs(request, scope):
            return None
        return encode(await self._here(request, _decode_verb(given), scope))
