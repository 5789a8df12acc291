"""Branches that run at other gateways, for those who watch a scope's sessions at this one."""

import asyncio
from typing import Any, Final, NamedTuple

import msgspec

from mallee.api.serve import Server
from mallee.api.ui.watching import MAX_SESSIONS, Look, Running
from mallee.protocol.ids import Scope

MAX_BRANCHES: Final = 2048  # that a gateway tells: of more, those of the sessions used last
MAX_SHARE: Final = 0.05  # of the event loop's time, to answer others with
MAX_ANSWERS: Final = 256  # that are kept, and told again meanwhile
_KIND: Final = "watch.running"
_TOLD: Final = msgspec.json.Decoder(dict[str, list[dict[str, Any]]])


def running_of(raws: list[bytes]) -> Running:
    """Branches that several gateways told."""
    found: dict[str, list[dict[str, Any]]] = {}
    for raw in raws:
        for session, branches in _TOLD.decode(raw).items():
            found.setdefault(session, []).extend(branches)
    return found


class _Answer(NamedTuple):
    """`due` is when the next one is made, by the event loop's clock."""

    raw: bytes
    due: float


class Elsewhere:
    """Asks other gateways for the branches that they run, and answers them."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._records = server.gateway.records
        self._answers: dict[tuple[Scope, str], _Answer] = {}
        self._records.share(_KIND, self._tell)

    async def ask(self, scope: Scope, tenant: str) -> list[bytes]:
        """The branches of a tenant's sessions, as each gateway tells them that answers in time."""
        if not self._records.has_others:
            return []
        name = self._server.gateway.requests.new_name(scope)  # of the scope: no record has it
        raws, _ = await self._records.gather(_KIND, name, scope, given=tenant.encode())
        return raws

    async def _tell(self, _: str, scope: Scope, given: bytes) -> bytes | None:
        tenant, now = given.decode(), asyncio.get_running_loop().time
        begun = now()
        known = self._answers.get((scope, tenant))
        if known is not None and begun < known.due:
            return known.raw
        raw = msgspec.json.encode(self._running(scope, tenant))
        took = now() - begun
        if len(self._answers) >= MAX_ANSWERS:
            self._answers.clear()
        share = MAX_SHARE / (len(self._answers) + 1)
        self._answers[scope, tenant] = _Answer(raw, begun + took / share)
        return raw

    def _running(self, scope: Scope, tenant: str) -> Running:
        gateway = self._server.gateway
        look, num_left = Look(gateway, self._server.tokenizer, scope), MAX_BRANCHES
        found: dict[str, list[dict[str, Any]]] = {}
        for tree in gateway.sessions.trees.newest(scope, tenant, MAX_SESSIONS):
            if tree.running and num_left > 0:
                found[tree.key.name] = branches = look.branches(tree)[:num_left]
                num_left -= len(branches)
        return found
