"""Handlers of the paths below a request's branches."""

from starlette.requests import Request
from starlette.responses import Response

from mallee.api.branches.verbs import BranchVerbs, Verb, injection
from mallee.api.entry.asking import Asking
from mallee.api.jobs import JobMaker
from mallee.api.prompts import PromptReader
from mallee.api.serve import json_response
from mallee.api.sse import unless_gone
from mallee.gateway.gateway import Gateway
from mallee.protocol.api.capsules import (
    Injected,
    InjectRequest,
    Prioritized,
    PrioritizeRequest,
    Pruned,
    PruneRequest,
)
from mallee.protocol.errors import BadRequest, InvalidParameter, UnknownBranch
from mallee.protocol.ids import RequestId


class BranchHandlers:
    """The verbs of running branches."""

    def __init__(
        self, gateway: Gateway, maker: JobMaker, reader: PromptReader, asking: Asking
    ) -> None:
        self._verbs = BranchVerbs(gateway)
        self._maker = maker
        self._reader = reader
        self._asking = asking

    async def inject(self, request: Request) -> Response:
        name, branch = _branch(request)
        asked = await self._asking.read(request, InjectRequest)
        self._maker.check_model(asked.body.model)
        mode = asked.body.mode
        tokens = await self._asking.make(
            request,
            asked,
            lambda body, scope, _: self._reader.suffix(body.suffix, "suffix", scope),
        )
        if not len(tokens):
            raise InvalidParameter("suffix", asked.body.suffix, "give at least one token")
        verb = injection(branch, tokens, replaces=mode == "replace")
        (at,) = await unless_gone(request.receive, self._verbs.run(name, verb, asked.scope))
        return json_response(Injected(request=name, branch=branch, at=at, tokens=len(tokens)))

    async def prune(self, request: Request) -> Response:
        name = RequestId(request.path_params["request"])
        asked = await self._asking.read(request, PruneRequest)
        self._maker.check_model(asked.body.model)
        verb = Verb("prune", asked.body.branches)
        ended = await unless_gone(request.receive, self._verbs.run(name, verb, asked.scope))
        return json_response(Pruned(request=name, branches=ended))

    async def prioritize(self, request: Request) -> Response:
        name = RequestId(request.path_params["request"])
        asked = await self._asking.read(request, PrioritizeRequest)
        self._maker.check_model(asked.body.model)
        priority = asked.body.priority
        if priority is None:
            raise BadRequest("priority is required", param="priority")
        verb = Verb("prioritize", asked.body.branches, priority=priority)
        changed = await unless_gone(request.receive, self._verbs.run(name, verb, asked.scope))
        return json_response(Prioritized(request=name, branches=changed, priority=priority))


def _branch(request: Request) -> tuple[RequestId, int]:
    """The branch that a path names. Raises UnknownBranch."""
    name, branch = RequestId(request.path_params["request"]), request.path_params["branch"]
    if not (branch.isascii() and branch.isdecimal() and len(branch) <= 6):
        raise UnknownBranch(name, -1)
    return name, int(branch)
