"""Wishes for graphs, carried out at the gateway that has the graph; and graphs that outlive their gateway.

Each gateway copies what its graphs have done to all others, so that one that stopped can go on anywhere.
"""

from contextlib import suppress
from typing import Final, Literal

import msgspec

from mallee.api.entry.asking import Asking
from mallee.api.graphs.progress import ProgressCopies, still_done, within
from mallee.api.graphs.requests import GraphMaker, GraphPlan
from mallee.api.graphs.running import GraphRun
from mallee.api.graphs.store import GraphStore
from mallee.api.serve import Server
from mallee.graphs.run import Output
from mallee.protocol.codec import Decoder, encode
from mallee.protocol.errors import (
    GraphRunning,
    InvalidParameter,
    LookupIncomplete,
    MalleeError,
    ToolFailed,
    UnknownGraph,
)
from mallee.protocol.gateways.graph_progress import (
    GraphProgress,
    NodeDone,
    decode_graph_progress,
)
from mallee.protocol.ids import CapsuleId, RequestId, Scope

ID_PREFIX: Final = "graph_"
_REQUEST_PREFIX: Final = "req_"
_VERB: Final = "graph.verb"
_PROGRESS: Final = "graph.progress"
WAIT_S: Final = 5.0  # for another gateway
LEAVE_S: Final = 2.0  # for one that has a graph, so that it leaves it: it may be dead
MAX_NBYTES: Final = 900 << 10  # between gateways: a broker takes 1 MiB at once


class Wish(msgspec.Struct, frozen=True, array_like=True):
    """A wish for a graph. `node`, `output`, `error` are of a result; `names_workers` of a look.

    "leave": one that has stopped goes to who asks, with all that it had done.
    """

    kind: Literal["get", "delete", "result", "leave"]
    names_workers: bool = False
    node: str = ""
    output: str | list[str] | None = None
    error: str = ""


_decode_wish: Final = Decoder(Wish, "a wish for a graph")


class GraphWishes:
    """One gateway's graphs, and its questions for those of others. `ttl_s`: copies are kept for so long."""

    def __init__(
        self, server: Server, store: GraphStore, maker: GraphMaker, asking: Asking, *, ttl_s: float
    ) -> None:
        self._server = server
        self._store = store
        self._maker = maker
        self._asking = asking
        self._records = server.gateway.records
        self._copies = ProgressCopies(ttl_s=ttl_s, clock=server.clock)
        self._records.share(_VERB, self._tell)
        self._records.share(_PROGRESS, self._tell_copy, self._forget_copy, self._hear_copy)

    # Wishes

    async def run(self, name: str, wish: Wish, scope: Scope) -> bytes:
        """The body of the answer. Raises MalleeError."""
        run = self._store.find(name, scope)
        if run is not None:
            return await self._here(run, wish)
        try:
            return await self._elsewhere(name, wish, scope, WAIT_S)
        except UnknownGraph:
            if wish.kind != "delete" or self._copies.get(name, scope) is None:
                raise
        self._forget(name, scope)  # its gateway is gone
        return _deleted(name, was_running=False)

    async def _here(self, run: GraphRun, wish: Wish) -> bytes:
        match wish.kind:
            case "get":
                return msgspec.json.encode(run.body(names_workers=wish.names_workers))
            case "delete":
                was_running = not run.has_ended
                run.cancel()
                self._store.forget(run)
                self._forget(run.name, run.scope)
                return _deleted(run.name, was_running=was_running)
            case "result":
                await self._take_result(run, wish)
                body = {"id": run.name, "object": "graph.result", "node": wish.node}
                return msgspec.json.encode(body)
            case "leave":
                progress = await self._left(run)
                self._store.forget(run)
                return encode(progress)

    async def _take_result(self, run: GraphRun, wish: Wish) -> None:
        tool = run.tool(wish.node)
        result: Output | MalleeError = ToolFailed(tool.call, wish.error)
        if wish.output is not None:
            texts = [wish.output] if isinstance(wish.output, str) else wish.output
            items = None if isinstance(wish.output, str) else tuple(texts)
            # However short: it is not often that a tool answers.
            await self._asking.in_pool(lambda: self._maker.read_result(tool, texts, run.scope))
            result = Output("\n".join(texts), items)
        run.take_result(wish.node, result)

    async def _elsewhere(self, name: str, wish: Wish, scope: Scope, wait_s: float) -> bytes:
        given = encode(wish)
        if len(given) > MAX_NBYTES:
            remedy = f"at most {MAX_NBYTES} bytes go to the gateway that runs the graph; shorten it"
            raise InvalidParameter("output", len(given), remedy)
        key = _request_name(name)
        raw = await self._records.fetch(_VERB, key, scope, given=given, wait_s=wait_s)
        if raw is None:
            raise UnknownGraph(name)
        return raw

    # Progress, which outlives a gateway

    async def resumed(self, name: str, plan: GraphPlan) -> list[NodeDone]:
        """The nodes of a graph that has stopped which need not be done again.

        Raises GraphRunning, UnknownGraph, InvalidParameter.
        """
        progress = await self._progress(name, plan.scope)
        if progress.digest != plan.digest:
            remedy = "its nodes or outputs were others: send it as it was"
            raise InvalidParameter("resume", name, remedy)
        gateway = self._server.gateway

        async def find(capsule: CapsuleId) -> None:
            await gateway.capsules.show(capsule, plan.scope)

        return await still_done(plan.graph, progress.nodes, find)

    async def _progress(self, name: str, scope: Scope) -> GraphProgress:
        """Of a graph that has stopped, wherever it is known.

        Raises GraphRunning, UnknownGraph, LookupIncomplete.
        """
        if not name.startswith(ID_PREFIX):
            raise UnknownGraph(name)
        run = self._store.find(name, scope)
        if run is not None:
            return await self._left(run)
        with suppress(UnknownGraph, LookupIncomplete):  # its gateway may be dead
            raw = await self._elsewhere(name, Wish("leave"), scope, LEAVE_S)
            self._copies.hear(name, scope, decode_graph_progress(raw))
        copy = self._copies.get(name, scope)
        if copy is None:
            told = await self._records.fetch(_PROGRESS, _request_name(name), scope)
            if told is None:
                raise UnknownGraph(name)
            copy = decode_graph_progress(told)
        return copy

    async def _left(self, run: GraphRun) -> GraphProgress:
        """The progress of a graph that has stopped, once all that it held is given back."""
        if not (run.has_ended or run.is_over.is_set()):
            raise GraphRunning(run.name)
        await run.is_over.wait()
        return run.progress

    def copy(self, name: str, scope: Scope, news: GraphProgress) -> None:
        """Tell all other gateways what is new in the progress of a graph here."""
        if not self._records.has_others:
            return
        for raw in within(news, MAX_NBYTES):
            self._records.copy(_PROGRESS, _request_name(name), scope, raw)

    def _forget(self, name: str, scope: Scope) -> None:
        """Have no gateway know its progress any more."""
        self._copies.forget(name, scope)
        self._records.forget(_PROGRESS, _request_name(name), scope)

    def _hear_copy(self, key: str, scope: Scope, raw: bytes) -> None:
        self._copies.hear(graph_name(RequestId(key)), scope, decode_graph_progress(raw))

    def _forget_copy(self, key: str, scope: Scope) -> None:
        self._copies.forget(graph_name(RequestId(key)), scope)

    async def _tell_copy(self, key: str, scope: Scope, given: bytes) -> bytes | None:
        copy = self._copies.get(graph_name(RequestId(key)), scope)
        return None if copy is None else encode(copy)

    async def _tell(self, key: str, scope: Scope, given: bytes) -> bytes | None:
        run = self._store.find(graph_name(RequestId(key)), scope)
        return None if run is None else await self._here(run, _decode_wish(given))


def _deleted(name: str, *, was_running: bool) -> bytes:
    body = {"id": name, "object": "graph.deleted", "deleted": True, "cancelled": was_running}
    return msgspec.json.encode(body)


def graph_name(request: RequestId) -> str:
    return ID_PREFIX + request.removeprefix(_REQUEST_PREFIX)


def _request_name(graph: str) -> RequestId:
    """The name from which that of a graph was made: it tells its scope."""
    return RequestId(_REQUEST_PREFIX + graph.removeprefix(ID_PREFIX))
