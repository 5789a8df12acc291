"""The handlers of `/v1/requests/{request}` and `/v1/batch`."""

from starlette.requests import Request
from starlette.responses import Response

from mallee.actors.http.entry.asking import Asking
from mallee.actors.http.entry.middleware import caller_of
from mallee.actors.http.live.batch import BatchRequest, check_operations, run
from mallee.actors.http.serve import Server, json_response
from mallee.actors.http.sse import unless_gone
from mallee.protocol.ids import RequestId


class LiveHandlers:
    """Shows requests, and runs many at once. All state is the service's."""

    def __init__(self, server: Server, asking: Asking) -> None:
        self._server = server
        self._asking = asking

    async def get(self, request: Request) -> Response:
        """Raises UnknownRequest."""
        name, scope = RequestId(request.path_params["request"]), self._asking.scope(request)
        names_workers = caller_of(request).is_operator
        life = self._server.service.life(name, scope, names_workers=names_workers)
        created = self._server.clock() - life["age_s"]
        return json_response({**life, "created": created})

    async def batch(self, request: Request) -> Response:
        """Raises BadRequest before anything of it has run."""
        body = await self._asking.read_plain(request, BatchRequest)
        check_operations(body)
        return json_response(await unless_gone(request.receive, run(request, body)))
