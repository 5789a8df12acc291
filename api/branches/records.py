"""The handler of `/v1/requests/{request}`."""

from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mallee.api.entry.asking import Asking
from mallee.api.entry.middleware import caller_of
from mallee.api.serve import Server, json_response
from mallee.protocol.errors import UnknownRequest
from mallee.protocol.ids import RequestId, Scope

_LIFE: Final = "request.life"
_NAMES_WORKERS: Final = b"w"  # in a question: the caller may know workers' names


class RecordHandlers:
    """Shows the course of requests of all gateways. All state is the gateway's."""

    def __init__(self, server: Server, asking: Asking) -> None:
        self._server = server
        self._asking = asking
        server.gateway.peers.share(_LIFE, self._tell)

    async def get(self, request: Request) -> Response:
        """Raises UnknownRequest, PeerSilent."""
        name, scope = RequestId(request.path_params["request"]), self._asking.scope(request)
        names_workers = caller_of(request).is_operator
        try:
            life = self._life(name, scope, names_workers=names_workers)
        except UnknownRequest:
            given = _NAMES_WORKERS if names_workers else b""
            raw = await self._server.gateway.peers.ask_maker(_LIFE, name, scope, given=given)
            if raw is None:
                raise
            life = msgspec.json.decode(raw)
        return json_response(life)

    def _life(self, name: RequestId, scope: Scope, *, names_workers: bool) -> dict[str, Any]:
        """Raises UnknownRequest: it did not begin at this gateway, or long ago."""
        life = self._server.gateway.requests.life(name, scope, names_workers=names_workers)
        return {**life, "created": self._server.clock() - life["age_s"]}

    async def _tell(self, key: str, scope: Scope, given: bytes) -> bytes | None:
        try:
            life = self._life(RequestId(key), scope, names_workers=given == _NAMES_WORKERS)
        except UnknownRequest:
            return None
        return msgspec.json.encode(life)
