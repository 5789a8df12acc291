"""One graph that runs: the effects of its state machine are carried out with the gateway.

Prefills and forks run each in a task of one group; they tell the machine what happens, and the effects that
follow are carried out at once, in order. Capsules are given back as soon as the machine says so.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from mallee.api.answers import UsageCounter
from mallee.api.branches.accounts import Account
from mallee.api.branches.budgets import Bound
from mallee.api.deltas import TextDelta
from mallee.api.entry.asking import INLINE_BODY_BYTES, Asking
from mallee.api.errors import unexpected
from mallee.api.graphs.progress import outputs
from mallee.api.graphs.requests import GraphMaker, GraphPlan
from mallee.api.graphs.writing import (
    Computed,
    Events,
    computed_before,
    graph_body,
    kind_of,
    node_body,
    node_done,
    spec_of,
    tool_call,
)
from mallee.api.serve import Server, prefill
from mallee.gateway.access.quotas import Visit
from mallee.gateway.capsules.capsules import CapsuleInfo
from mallee.graphs.effects import Cancel, Effect, Ended, Expanded, Over, Release, Start
from mallee.graphs.nodes import Filled, Join, Prefill, Tool, parts, texts_of
from mallee.graphs.run import Output, Run
from mallee.protocol.errors import (
    BudgetSpent,
    InternalError,
    MalleeError,
    NotAwaited,
    NotFound,
    Unavailable,
    UnknownGraph,
    UnknownRequest,
)
from mallee.protocol.gateways.graph_progress import GraphProgress, NodeDone
from mallee.protocol.ids import CapsuleId, RequestId, WorkerId, capsule_id

_log = logging.getLogger(__name__)
_NOTHING: Final = Output()


@dataclass(slots=True)
class _Group:
    """Nodes that were started together: branches of one fork, or one prefill."""

    names: tuple[str, ...]
    task: asyncio.Task[None] | None = None
    is_ending: bool = False
    request: RequestId | None = None  # once a worker has it
    texts: dict[str, list[str]] = field(default_factory=dict)  # of the answers so far
    cancelled: list[str] = field(default_factory=list)


class GraphRun:
    """A graph on its way, and afterwards its record. Belongs to one event loop.

    `follow` makes events for one reader. `work` runs it to its end, in a task that others supervise.
    """

    def __init__(
        self,
        name: str,
        plan: GraphPlan,
        *,
        server: Server,
        maker: GraphMaker,
        asking: Asking,
        visit: Visit,
        names_workers: bool,
        copy: Callable[[GraphProgress], None],
        done: Sequence[NodeDone] | None = None,
        bound: Bound | None = None,
        account: Account | None = None,
    ) -> None:
        """`account`, which is open, is that of `bound`; it is closed at the graph's end.

        `copy` is called with what is new in its progress. `done`: the nodes of an earlier run that stopped.
        """
        self.name = name
        self.scope = plan.scope
        self.created = server.clock()
        self.is_over = asyncio.Event()
        self._plan = plan
        self._server = server
        self._maker = maker
        self._asking = asking
        self._visit = visit
        self._names_workers = names_workers
        self._now: Callable[[], float] = asyncio.get_running_loop().time
        self._bound = bound
        self._account = account
        wall_s = plan.budget.wall_s if plan.budget is not None else None
        due = None if wall_s is None else self._now() + wall_s
        nodes = () if done is None else done
        known = outputs(plan.graph, nodes)
        self._run = Run(plan.graph, plan.limits, self._now(), due, known)
        self._computed = {each.node: computed_before(each) for each in nodes if each.request}
        self._is_resumed = done is not None
        self._copy = copy
        self._done: list[NodeDone] = []
        self._num_copied = 0  # of these
        self._groups: dict[str, _Group] = {}  # by nodes under way
        self._changed = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self.events = Events() if plan.streams else None

    # For clients

    @property
    def num_chars(self) -> int:
        """Of the texts that its record holds."""
        nodes = self._run.nodes.values()
        outputs = sum(len(node.output.text) for node in nodes)
        given = sum(
            len(part)
            for node in self._plan.graph.nodes.values()
            for text in texts_of(node).values()
            for part in parts(text)
            if isinstance(part, str)
        )
        return given + 2 * outputs + 500 * len(nodes)

    def body(self, *, names_workers: bool, with_nodes: bool = True) -> dict[str, Any]:
        """The graph as it stands."""
        head = {
            "id": self.name,
            "object": "graph",
            "created": int(self.created),
            "model": self._server.model_name,
        }
        body = graph_body(head, self._run, self._computed)
        if with_nodes:
            body["nodes"] = {
                name: node_body(node, self._computed.get(name), names_workers=names_workers)
                for name, node in self._run.nodes.items()
            }
        return body

    @property
    def progress(self) -> GraphProgress:
        """Its nodes that are done."""
        return GraphProgress(self._plan.digest, (*self._done,))

    @property
    def has_ended(self) -> bool:
        """Whether each of its nodes has."""
        return self._run.wall_s is not None

    def cancel(self) -> None:
        """End all that is not over; its end follows soon."""
        self._run.cancel(self._now())
        self._carry_out()

    def tool(self, name: str) -> Tool:
        """A tool whose result is awaited. Raises UnknownGraph, NotAwaited."""
        node = self._run.nodes.get(name)
        if node is None:
            raise UnknownGraph(self.name, name)
        if not isinstance(node.node, Tool):
            raise NotAwaited(name, f"a {kind_of(node)}")
        if node.status != "running":
            raise NotAwaited(name, node.status)
        return node.node

    def take_result(self, name: str, result: Output | MalleeError) -> None:
        """End a call with what the client says of it. Raises as `tool`."""
        self.tool(name)
        if isinstance(result, Output):
            self._run.finished(name, result, self._now())
        else:
            self._run.failed(name, result, self._now())
        self._carry_out()

    # Its course

    async def work(self) -> None:
        """Run it to its end."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                kind = "graph.resumed" if self._is_resumed else "graph.started"
                self._tell({"type": kind, "nodes": len(self._run.nodes)})
                self._carry_out()
                while self._run.wall_s is None:
                    self._changed.clear()
                    due = self._run.on_time(self._now())
                    self._carry_out()
                    if self._run.wall_s is None:
                        with suppress(TimeoutError):
                            async with asyncio.timeout_at(due):
                                await self._changed.wait()
        finally:
            if self._account is not None:
                self._account.close()
            self.is_over.set()
            if self.events is not None:
                self.events.end()

    def _carry_out(self) -> None:
        """Carry out what the machine says, once it works."""
        if self._tasks is not None:
            for effect in self._run.effects():
                self._carry_out_one(effect)
            fresh = tuple(self._done[self._num_copied :])
            if fresh:
                self._num_copied = len(self._done)
                self._copy(GraphProgress(self._plan.digest, fresh))

    def _carry_out_one(self, effect: Effect) -> None:
        match effect:
            case Start(names, texts):
                self._start(names, texts)
            case Cancel(name):
                self._cancel_node(name)
            case Release(name):
                self._release(name)
            case Expanded(name, items):
                self._tell({"type": "map.expanded", "node": name, "items": list(items)})
            case Ended(name):
                node, known = self._run.nodes[name], self._computed.get(name)
                if node.status == "done" and not isinstance(node.node, Join):
                    self._done.append(node_done(node, known))
                body = node_body(node, known, names_workers=self._names_workers)
                self._tell({"type": "node.ended", "node": name, **body})
            case Over():
                body = self.body(names_workers=self._names_workers, with_nodes=False)
                self._tell({"type": "graph.ended", **body})
                self._changed.set()

    def _start(self, names: tuple[str, ...], texts: tuple[Filled, ...]) -> None:
        node = self._run.nodes[names[0]]
        if isinstance(node.node, Tool):
            assert isinstance(texts[0], str), "a call's input is a text"
            self._run.started(node.name, self._now())
            self._tell(tool_call(node, texts[0]))
            self._changed.set()  # it may be due before the others
            return
        group = _Group(names)
        self._groups.update(dict.fromkeys(names, group))
        work: Callable[[], Awaitable[None]] = partial(self._prefill, group, texts[0])
        if not isinstance(node.node, Prefill):
            work = partial(self._fork, group, texts)
        assert self._tasks is not None, "effects are carried out while it works"
        group.task = self._tasks.create_task(self._guarded(group, work))

    def _cancel_node(self, name: str) -> None:
        """End a node on its worker: its whole group if no other is left in that."""
        group = self._groups.get(name)
        if group is None:  # a tool: a result that comes late is refused
            return
        group.cancelled.append(name)
        if any(self._run.nodes[each].is_open for each in group.names):
            self._prune(group, name)
        elif group.task is not asyncio.current_task() and not group.is_ending:
            assert group.task is not None
            group.is_ending = True
            group.task.cancel()

    def _prune(self, group: _Group, name: str) -> None:
        """End one branch of a fork that goes on; one that no worker has yet is ended when one has."""
        if group.request is not None:
            with suppress(UnknownRequest):
                branch = group.names.index(name)
                self._server.gateway.requests.prune(group.request, [branch], self._plan.scope)

    def _release(self, name: str) -> None:
        known = self._computed[name]
        capsule, known.capsule = known.capsule, None
        if capsule is not None:
            self._give_back(capsule)

    def _give_back(self, capsule: CapsuleId) -> None:
        assert self._tasks is not None
        self._visit.unkeep(capsule)
        self._tasks.create_task(self._released(capsule))

    async def _released(self, capsule: CapsuleId) -> None:
        try:
            await self._server.gateway.capsules.release(capsule, self._plan.scope)
        except NotFound:
            pass  # it has gone by itself
        except MalleeError as error:
            _log.warning("a graph's capsule ends only with its time: %s", error)

    def _tell(self, body: dict[str, Any]) -> None:
        if self.events is not None:
            self.events.put({**body, "object": "graph.event", "id": self.name})

    # Prefills and forks

    async def _guarded(self, group: _Group, work: Callable[[], Awaitable[None]]) -> None:
        """Run the work of a group; an error ends those of its nodes that are not over."""
        try:
            await work()
            error: MalleeError = InternalError("the answer ended without a result")
        except MalleeError as raised:
            error = raised
        except Exception:  # a bug must not leave nodes without an end
            number = self._server.new_id()
            _log.exception("a node of graph %s failed as request %s", self.name, number)
            error = unexpected(number)
        for name in group.names:
            self._groups.pop(name, None)
            self._run.failed(name, error, self._now())
        self._carry_out()

    async def _prefill(self, group: _Group, text: Filled) -> None:
        (name,) = group.names
        plan = self._plan
        request = self._server.named(plan.scope, self._bound).name
        makes = capsule_id(request) if self._run.is_forked_early(name) else None
        make = partial(self._maker.prefill, plan, text, makes=makes)
        job = await self._made(make, _num_chars(text))
        num, gateway = len(job.tokens), self._server.gateway

        def placed(request: RequestId) -> None:
            self._begun(name, request, num)
            self._carry_out()  # what forks it early is ready

        with self._visit.staying() as part, part.making(num, gateway.capsules.is_kept) as keep:
            part.begin(1, num)
            last = await prefill(gateway, job, 0.0, request, placed=placed)
            assert last.capsule is not None
            assert last.worker is not None
            keep(last.capsule)
        known = self._computed[name]
        known.worker, known.capsule, known.boundary = last.worker, last.capsule, last.boundary
        known.cached_tokens, known.prefill_tokens = last.cached_tokens, last.prefill_tokens
        self._finished(name, _NOTHING)

    async def _fork(self, group: _Group, texts: tuple[Filled, ...]) -> None:
        first = self._run.nodes[group.names[0]]
        spec = spec_of(first)
        parent = self._computed[spec.of]
        keeps = self._run.is_forked(first.name) or first.stays
        if parent.capsule is not None:
            info = CapsuleInfo(parent.capsule, None, parent.boundary, 0.0)
        else:  # of a prefill that is under way: else it stays while something goes on from it
            info = CapsuleInfo(capsule_id(parent.request), None, parent.prompt_tokens, 0.0)
        begin = spec.at or info.boundary
        item = 0 if first.item is None else first.item[0]
        plan = await self._made(
            lambda: self._maker.fork(self._plan, spec, info, texts, keeps=keeps, item=item),
            sum(map(_num_chars, texts)),
        )
        server, gateway = self._server, self._server.gateway
        with ExitStack() as stack:
            part = stack.enter_context(self._visit.staying())
            usage = UsageCounter(plan.prompt_tokens, part.charge)
            if plan.keeps:
                keep = stack.enter_context(
                    part.making(plan.prompt_tokens, gateway.capsules.is_kept)
                )
                usage = UsageCounter(plan.prompt_tokens, part.charge, keep)
            part.begin(plan.num_choices, plan.prompt_tokens)
            stream = await server.start(plan, 0.0)
            try:
                group.request = stream.streams[0].request
                for i, name in enumerate(group.names):
                    self._begun(name, group.request, plan.starts[i] - begin)
                for name in group.cancelled:
                    self._prune(group, name)
                async for delta in stream:
                    usage.add(delta)
                    self._take(group, group.names[delta.index], delta)
                    if not any(self._run.nodes[name].is_open for name in group.names):
                        break
                    if self.events is not None:
                        await self.events.room()
            finally:
                await stream.aclose()
                self._sweep(group)

    async def _made(self, make: Callable[[], Any], num_chars: int) -> Any:
        """The result of `make`: long texts are tokenized off the event loop."""
        return await self._asking.in_pool(make) if num_chars > INLINE_BODY_BYTES else make()

    def _begun(self, name: str, request: RequestId, prompt_tokens: int) -> None:
        """A worker has taken the node."""
        self._computed[name] = Computed(request, WorkerId(""), prompt_tokens)
        self._run.started(name, self._now())
        if self._run.nodes[name].is_open:
            self._tell({"type": "node.started", "node": name, "request": request})

    def _take(self, group: _Group, name: str, delta: TextDelta) -> None:
        """Take in news of one branch."""
        known, node = self._computed[name], self._run.nodes[name]
        known.worker = WorkerId(delta.worker)
        known.cached_tokens = max(known.cached_tokens, delta.cached_tokens)
        known.prefill_tokens = max(known.prefill_tokens, delta.prefill_tokens)
        known.completion_tokens = delta.completion_tokens
        if node.is_open and delta.num_tokens:
            self._run.first_token(name, self._now())
        if node.is_open and delta.text:
            group.texts.setdefault(name, []).append(delta.text)
            self._tell({"type": "node.delta", "node": name, "text": delta.text})
        if delta.finish is None:
            if name in group.cancelled:
                self._prune(group, name)
            return
        known.finish = delta.finish
        known.capsule, known.boundary = delta.capsule, delta.boundary
        match delta.finish:
            case "error":
                self._failed(name, delta.error or InternalError("the branch failed"))
            case "cancelled":
                self._run.cancelled(name, self._now())
            case "budget":
                self._failed(name, BudgetSpent(delta.ended_by, "the graph has spent it"))
            case _ if delta.capsule is None and (self._run.is_forked(name) or node.stays):
                why = (
                    "the answer is there, but its worker kept no capsule to go on from; retry later"
                )
                self._failed(name, Unavailable(why, was_computed=True))
            case _:
                self._finished(name, Output("".join(group.texts.get(name, ()))))
        self._carry_out()

    def _failed(self, name: str, error: MalleeError) -> None:
        """The node failed; a capsule that it left all the same is given back."""
        known = self._computed[name]
        if known.capsule is not None:
            self._give_back(known.capsule)
            known.capsule = None
        self._run.failed(name, error, self._now())

    def _finished(self, name: str, output: Output) -> None:
        self._run.finished(name, output, self._now())
        self._carry_out()

    def _sweep(self, group: _Group) -> None:
        """Give back what branches left that were cancelled, though nothing more was read of them."""
        for name in group.cancelled:
            if group.request is not None and self._computed[name].finish is None:
                self._give_back(capsule_id(group.request, group.names.index(name)))


def _num_chars(text: Filled) -> int:
    return len(text) if isinstance(text, str) else sum(len(turn["content"]) for turn in text)
