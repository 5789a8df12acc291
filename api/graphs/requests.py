"""Requests for graphs, checked whole before anything of them starts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any, ClassVar, Final

import msgspec

from mallee.api.branches.accounts import Budget, read_budget
from mallee.api.entry.decoding import read
from mallee.api.jobs import JobMaker, Plan
from mallee.api.prompts import PromptReader
from mallee.gateway.capsules.capsules import CapsuleInfo
from mallee.graphs.context import check_context
from mallee.graphs.graph import Graph, checked_graph
from mallee.graphs.nodes import Branch, Filled, Map, Node, Tool
from mallee.graphs.run import RunLimits
from mallee.protocol.api.capsules import CapsuleRequest
from mallee.protocol.api.generate import ForkRequest, SamplingFields
from mallee.protocol.api.shared import AnyRequest, Extras
from mallee.protocol.errors import BadRequest, InvalidGraph, InvalidParameter
from mallee.protocol.ids import CapsuleId, Scope, branch_seed
from mallee.router.dispatch.jobs import PrefillJob, QueueTerms

MAX_RUNNING: Final = 128  # nodes of a graph on workers at once
DEFAULT_RUNNING: Final = 32
MAX_CALLS: Final = 64  # tools under way at once
SAMPLING: Final = frozenset(
    {*SamplingFields.__struct_fields__}
    - {*AnyRequest.__struct_fields__, "max_tokens", "stream", "stream_options"}
)


class GraphRequest(AnyRequest, frozen=True, kw_only=True):
    """`outputs`: by default the nodes that no other takes from. `max_running`: nodes on workers at once.

    `resume` names an earlier run of the same nodes, which has stopped: what that had done is taken over.
    """

    is_bounded: ClassVar[bool] = True

    nodes: list[Node] = msgspec.field(default_factory=list)
    outputs: list[str] = msgspec.field(default_factory=list)
    max_running: int = DEFAULT_RUNNING
    stream: bool = False
    resume: str | None = None


class ResultRequest(AnyRequest, frozen=True, kw_only=True):
    """The result of a tool's call: `output`, a text or a list of texts, or `error`, if it failed."""

    output: str | list[str] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """A graph that can run, and for whom."""

    graph: Graph
    limits: RunLimits
    scope: Scope
    terms: QueueTerms
    budget: Budget | None
    streams: bool
    model: str | None
    digest: bytes  # of its nodes and outputs


class GraphMaker:
    """Turns requests into plans, and nodes that start into jobs. Raises BadRequest, without other effects."""

    def __init__(self, maker: JobMaker, reader: PromptReader, *, n_ctx: int, fork: int) -> None:
        """`n_ctx`: tokens of the model's window; `fork`: branches of one fork, at most."""
        self._maker = maker
        self._reader = reader
        self._n_ctx = n_ctx
        self._fork = fork

    def plan(self, request: GraphRequest, scope: Scope, terms: QueueTerms) -> GraphPlan:
        self._maker.check_model(request.model)
        _check_extras(request.mallee)
        if not 1 <= request.max_running <= MAX_RUNNING:
            raise InvalidParameter("max_running", request.max_running, f"give 1 to {MAX_RUNNING}")
        graph = checked_graph(request.nodes, request.outputs)
        if not request.stream:
            _check_no_tools(graph)
        check_context(graph, partial(self.num_tokens, scope), self._n_ctx)
        plan = GraphPlan(
            graph=graph,
            limits=RunLimits(request.max_running, MAX_CALLS, self._fork),
            scope=scope,
            terms=terms,
            budget=read_budget(request.mallee.budget),
            streams=request.stream,
            model=request.model,
            digest=_digest(request.nodes, graph),
        )
        known: set[bytes] = set()
        for node in graph.nodes.values():
            if isinstance(node, Branch | Map):
                key = msgspec.json.encode((node.sampling, node.max_tokens))
                if key not in known:
                    self._check_sampling(plan, node)
                    known.add(key)
        return plan

    def num_tokens(self, scope: Scope, text: Filled, *, opens: bool = False) -> int:
        """Tokens of a text, or of messages; `opens`: which begin a conversation."""
        if isinstance(text, str):
            return len(self._reader.text(text, scope, starts=False))
        if opens:
            return len(self._maker.capsule(_capsule(text), scope, QueueTerms()).tokens)
        return len(self._reader.suffix(_suffix(text), "messages", scope))

    def prefill(self, plan: GraphPlan, text: Filled, *, makes: CapsuleId | None) -> PrefillJob:
        """The job of a prefill; `makes`: its capsule, if that is forked before it is there."""
        job = self._maker.capsule(_capsule(text), plan.scope, plan.terms)
        return job if makes is None else replace(job, makes=makes)

    def fork(
        self,
        plan: GraphPlan,
        spec: Branch | Map,
        capsule: CapsuleInfo,
        texts: Sequence[Filled],
        *,
        keeps: bool,
        item: int = 0,
    ) -> Plan:
        """The plan of branches of `spec`'s kind after a capsule.

        `keeps`: their capsules are pinned. `item`: of the first, where items of a map draw by a seed.
        """
        fields: dict[str, Any] = {
            **spec.sampling,
            "suffixes": [_suffix(text) for text in texts],
            "at": spec.at,
            "max_tokens": spec.max_tokens,
            "mallee": {"keep": keeps},
        }
        if item and isinstance(seed := fields.get("seed"), int):
            drawn = branch_seed(seed, item)  # 64 bits, of which JSON's are signed
            fields["seed"] = drawn - (1 << 64) if drawn >> 63 else drawn
        request = read(fields, ForkRequest).body
        return self._maker.fork(request, capsule, plan.scope, plan.terms)

    def _check_sampling(self, plan: GraphPlan, node: Branch | Map) -> None:
        """Raises InvalidGraph, with the node and what is wrong with it."""
        for name, value in node.sampling.items():
            if name not in SAMPLING:
                remedy = f"not a field of a branch's sampling; known: {', '.join(sorted(SAMPLING))}"
                error: BadRequest = InvalidParameter(f"sampling.{name}", value, remedy)
                raise InvalidGraph(f"node {node.name}: {error.message}")
        try:
            parent = CapsuleInfo(CapsuleId(""), None, node.at or 1, 0.0)
            self.fork(plan, node, parent, [""], keeps=False)
        except BadRequest as error:
            raise InvalidGraph(f"node {node.name}: sampling: {error.message}") from error

    def read_result(self, tool: Tool, output: list[str], scope: Scope) -> None:
        """Raises InvalidParameter for a result of more tokens than its call may have."""
        num = sum(self.num_tokens(scope, text) for text in output)
        if num > tool.max_tokens:
            remedy = f"{num} tokens > max_tokens {tool.max_tokens} of node {tool.name}; shorten it"
            raise InvalidParameter("output", "".join(output), remedy)


def _capsule(text: Filled) -> CapsuleRequest:
    if isinstance(text, str):
        return CapsuleRequest(prompt=text)
    return CapsuleRequest(messages=text)


def _suffix(text: Filled) -> str | dict[str, Any]:
    """A fork's: messages end where the assistant's answer begins."""
    return text if isinstance(text, str) else {"messages": text}


def _digest(nodes: list[Node], graph: Graph) -> bytes:
    raw = msgspec.json.encode((nodes, graph.outputs), order="sorted")
    return blake2b(raw, digest_size=16).digest()


def _check_extras(extras: Extras) -> None:
    """Raises InvalidParameter for wishes that nodes have each for themselves."""
    if extras.stop_when is not None:
        raise InvalidParameter("mallee.stop_when", {}, "graphs have joins for it; leave it out")
    if extras.keep:
        raise InvalidParameter("mallee.keep", True, "give keep at the nodes that are to be kept")


def _check_no_tools(graph: Graph) -> None:
    for node in graph.nodes.values():
        if isinstance(node, Tool):
            remedy = (
                f"node {node.name} is a tool, which its client is asked for by an event: give true"
            )
            raise InvalidParameter("stream", False, remedy)
