"""A tenant's sessions at other gateways, for those who watch a scope's sessions at this one."""

import asyncio
from typing import Any, Final, NamedTuple

import msgspec

from mallee.api.serve import Server
from mallee.api.ui.watching import MAX_SESSIONS, Look, Running
from mallee.gateway.sessions.trees import SessionKey
from mallee.protocol.ids import Scope

MAX_BRANCHES: Final = 2048  # that a gateway tells: of more, those of the sessions used last
MAX_SHARE: Final = 0.05  # of the event loop's time, to answer others with
MAX_ANSWERS: Final = 256  # that are kept, and told again meanwhile
ANSWER_S: Final = 0.5
_KIND: Final = "watch.sessions"


class Told(msgspec.Struct, frozen=True):
    """The sessions that a gateway used last, by name, and their branches that run there.

    With each what is another one once its tree has changed there.
    """

    gateway: str
    changes: dict[str, str]
    running: dict[str, list[dict[str, Any]]]


_TOLD: Final = msgspec.json.Decoder(Told)


class _Answer(NamedTuple):
    """`due` is when the next one is made, by the event loop's clock."""

    raw: bytes
    due: float


class Elsewhere:
    """Asks other gateways for the sessions that they use, and answers them."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._peers = server.gateway.peers
        self._answers: dict[tuple[Scope, str], _Answer] = {}
        self._peers.share(_KIND, self._tell)

    async def ask(self, scope: Scope, tenant: str) -> list[Told]:
        """A tenant's sessions, as each gateway tells them that answers in time."""
        given = tenant.encode()
        raws, _ = await self._peers.ask_all(_KIND, "", scope, given=given, wait_s=ANSWER_S)
        return [_TOLD.decode(raw) for raw in raws]

    async def _tell(self, _: str, scope: Scope, given: bytes) -> bytes | None:
        tenant, now = given.decode(), asyncio.get_running_loop().time
        begun = now()
        known = self._answers.get((scope, tenant))
        if known is not None and begun < known.due:
            return known.raw
        raw = msgspec.json.encode(self._told(scope, tenant))
        took = now() - begun
        if len(self._answers) >= MAX_ANSWERS:
            self._answers.clear()
        share = MAX_SHARE / (len(self._answers) + 1)
        self._answers[scope, tenant] = _Answer(raw, begun + took / share)
        return raw

    def _told(self, scope: Scope, tenant: str) -> Told:
        gateway = self._server.gateway
        look, num_left = Look(gateway, self._server.tokenizer, scope), MAX_BRANCHES
        told = Told(gateway.context.gateway, {}, {})
        for tree in gateway.sessions.trees.newest(scope, tenant, MAX_SESSIONS):
            told.changes[tree.key.name] = f"{tree.created} {tree.num_changes}"
            if tree.running and num_left > 0:
                told.running[tree.key.name] = branches = look.branches(tree)[:num_left]
                num_left -= len(branches)
        return told


class Others:
    """The sessions of other gateways, look by look, for one watcher."""

    def __init__(self, server: Server, elsewhere: Elsewhere, scope: Scope, tenant: str) -> None:
        self._sessions = server.gateway.sessions
        self._ask = elsewhere.ask
        self._scope = scope
        self._tenant = tenant
        self._seen: dict[tuple[str, str], str] = {}  # by gateway and session

    async def begin(self) -> None:
        """Have a copy of what is stored."""
        await self._sessions.recall(self._scope, self._tenant, MAX_SESSIONS)

    async def look(self) -> Running:
        """Branches that run elsewhere; sessions that others have changed are read."""
        told = await self._ask(self._scope, self._tenant)
        seen = {
            (each.gateway, name): change for each in told for name, change in each.changes.items()
        }
        news = {name for (_, name), change in seen.items() - self._seen.items()}
        self._seen = seen
        await self._sessions.look(SessionKey(self._scope, name) for name in sorted(news))
        found: dict[str, list[dict[str, Any]]] = {}
        for each in told:
            for session, branches in each.running.items():
                found.setdefault(session, []).extend(branches)
        return found
