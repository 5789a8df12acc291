"""The handlers of an operator's paths: decisions, workers, weights, metrics."""

from starlette.requests import Request
from starlette.responses import Response

from mallee.api.entry.asking import Asking, read_count
from mallee.api.entry.middleware import caller_of
from mallee.api.openapi.operations import MAX_CANDIDATES, MAX_DECISIONS
from mallee.api.serve import json_response
from mallee.gateway.gateway import Gateway
from mallee.gateway.operator import metrics_type
from mallee.protocol.api.operator import WeightsRequest, WorkerDraining
from mallee.protocol.errors import Forbidden, InvalidParameter
from mallee.protocol.ids import RequestId, WorkerId


class OperatorHandlers:
    """Tells and changes what belongs to no tenant. Everybody else is refused."""

    def __init__(self, gateway: Gateway, asking: Asking) -> None:
        self._gateway = gateway
        self._asking = asking

    async def explain(self, request: Request) -> Response:
        _check_operator(request)
        query = request.query_params
        name = query.get("request")
        if name == "":
            raise InvalidParameter("request", name, "give the id of an answer, or leave it out")
        limit = read_count(query.get("limit"), "limit", 64 if name else 16, MAX_DECISIONS)
        candidates = read_count(query.get("candidates"), "candidates", 16, MAX_CANDIDATES)
        request_id = RequestId(name) if name else None
        return json_response(self._gateway.operator.decisions(request_id, limit, candidates))

    async def workers(self, request: Request) -> Response:
        _check_operator(request)
        return json_response(await self._gateway.operator.workers())

    async def metrics_targets(self, request: Request) -> Response:
        _check_operator(request)
        return json_response(self._gateway.operator.metrics_targets())

    async def drain_worker(self, request: Request) -> Response:
        _check_operator(request)
        worker = WorkerId(request.path_params["worker"])
        await self._gateway.operator.drain_worker(worker)
        return json_response(WorkerDraining(worker=worker), 202)

    async def change_weights(self, request: Request) -> Response:
        _check_operator(request)
        body = await self._asking.read_plain(request, WeightsRequest)
        found = await self._gateway.operator.change_weights(
            body.version, path=body.path, drain_s=body.drain_s, wait_s=body.wait_s
        )
        is_done = all(worker["state"] == "serving" for worker in found["workers"])
        return json_response(found, 200 if is_done else 202)

    async def weights(self, request: Request) -> Response:
        _check_operator(request)
        return json_response(self._gateway.operator.weights())

    async def metrics(self, request: Request) -> Response:
        _check_operator(request)
        accept = request.headers.get("accept", "")
        headers = {"content-type": metrics_type(accept)}
        return Response(self._gateway.operator.metrics(accept), headers=headers)


def _check_operator(request: Request) -> None:
    if not caller_of(request).is_operator:
        raise Forbidden("this path needs an operator's key")
