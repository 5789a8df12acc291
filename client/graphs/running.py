"""A graph that runs: the effects of its state machine, carried out over the SDK's own calls.

Prefills, forks and tools run each in a task of one group; they tell the machine what happens, and the effects
that follow are carried out at once, in order. Capsules are given back as soon as the machine says so.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from typing import Any, Final
from uuid import uuid4

from mallee.client import calls
from mallee.client.base import CUT_WAIT_S, DELETE_TIMEOUT_S, growing_waits, was_cut
from mallee.client.critic import result_of
from mallee.client.errors import (
    ApiError,
    ConnectionFailed,
    JournalFailed,
    StreamBroken,
    ToolFailed,
    ToolTimeout,
)
from mallee.client.graphs.beginning import bind, check_window, num_tokens, still_done
from mallee.client.graphs.builder import Graph
from mallee.client.graphs.journal import Done, Head, Journal, fingerprint
from mallee.client.graphs.results import GraphEvent, GraphResult, Work, node_at_end, result_of_run
from mallee.client.results import BranchEvent
from mallee.client.sessions import close_session
from mallee.graphs.graph import checked_graph
from mallee.graphs.nodes import Drawn, Filled, Handle, Join, Map, Prefill, Tool
from mallee.graphs.run import Cancel, Ended, NodeRun, Output, Release, Run, RunLimits, Start
from mallee.protocol.errors import (
    BudgetSpent,
    InvalidParameter,
    MalleeError,
    NotFound,
    Unavailable,
)
from mallee.protocol.ids import RequestId, branch_seed, capsule_id

DEFAULT_RUNNING: Final = 32
MAX_RUNNING: Final = 64  # nodes at once: a client has a hundred connections
MAX_CALLS: Final = 32  # tools at once
MAX_WAITING: Final = 1024  # events that are not read; beyond them answers wait
MAX_WHY: Final = 1024  # characters of a tool's error
MAX_WAIT_S: Final = 2.0  # before a fork that was cut is sent again


@dataclass(slots=True)
class _Group:
    """Nodes that were started together: branches of one fork, one prefill or a tool."""

    names: tuple[str, ...]
    task: asyncio.Task[None] | None = None
    is_ending: bool = False
    request: str = ""  # once a worker has it
    cancelled: list[str] = field(default_factory=list)


class AsyncGraphRun:
    """A graph that runs: `async for` its events, or `await ... .wait()`; leaving its block ends it.

    It begins when it is first iterated or awaited. Plain functions of its tools run in threads.
    """

    def __init__(
        self,
        client: Any,
        graph: Graph,
        outputs: Sequence[Handle],
        *,
        max_running: int | None,
        journal: str | PathLike[str] | None,
        params: dict[str, Any],
    ) -> None:
        """`client`: an AsyncMallee, or a session of one. `params` are those of each of its requests; a budget
        among them is the whole graph's.

        Raises InvalidGraph, InvalidParameter.
        """
        running = DEFAULT_RUNNING if max_running is None else max_running
        if not 1 <= running <= MAX_RUNNING:
            raise InvalidParameter("max_running", max_running, f"give 1 to {MAX_RUNNING}")
        self._graph = checked_graph(graph.nodes, [each.name for each in outputs])
        self._head = Head(graph=fingerprint(self._graph), session=f"graph-{uuid4().hex}")
        self._tools = dict(graph.tools)
        self._limits = RunLimits(running, MAX_CALLS, running)
        self._client = client
        self._path = journal
        self._salt = params.get("cache_salt")
        self._params = dict(params)
        for name in {"keep", "stop_when"} & params.keys():
            remedy = "graphs have keep at their nodes, and joins to stop by; leave it out"
            raise InvalidParameter(name, params[name], remedy)
        self._budget = self._params.pop("budget", None)
        self._journal: Journal | None = None
        self._due: float | None = None
        self._work: dict[str, Work] = {}
        self._held: dict[str, None] = {}  # capsules that are to be given back
        self._groups: dict[str, _Group] = {}  # by nodes under way
        self._fault: JournalFailed | None = None
        self._is_cancelled = False
        self._changed = asyncio.Event()
        self._told: deque[GraphEvent] = deque()
        self._has_news, self._has_room = asyncio.Event(), asyncio.Event()
        self.result: GraphResult | None = None  # at its end
        self._task: asyncio.Task[None] | None = None
        self._events = self._read()

    def __aiter__(self) -> AsyncIterator[GraphEvent]:
        return self._events

    async def wait(self) -> GraphResult:
        """The graph at its end; nodes that failed have their errors.

        Raises InvalidGraph for what does not fit the model's window, before anything is computed,
        JournalFailed, and Unavailable for a run that was closed.
        """
        async for _ in self._events:
            pass
        if self.result is None:
            raise Unavailable("the graph was closed before its end; run it again")
        return self.result

    def cancel(self) -> None:
        """End all nodes that are not over; its end follows soon."""
        self._is_cancelled = True
        self._changed.set()

    async def close(self) -> None:
        """End what still runs, also while another task reads."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def __aenter__(self) -> "AsyncGraphRun":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _read(self) -> AsyncGenerator[GraphEvent, None]:
        self._task = work = asyncio.create_task(self._carry_on())
        work.add_done_callback(lambda _: self._has_news.set())
        try:
            while not work.done() or self._told:
                self._has_news.clear()
                while self._told:
                    event = self._told.popleft()
                    self._has_room.set()
                    yield event
                if not work.done():
                    await self._has_news.wait()
            if not work.cancelled():
                await work
        finally:
            await self.close()

    def _tell(self, event: GraphEvent) -> None:
        """Add an event: few for each node; what adds text waits for room."""
        self._told.append(event)
        self._has_news.set()

    # Its course

    async def _carry_on(self) -> None:
        """Run the graph from its beginning, or its journal, to its end."""
        self._now = asyncio.get_running_loop().time
        send, graph = self._client._send, self._graph
        try:
            await check_window(send, graph, self._salt)
            if self._path is not None:
                self._journal = Journal(self._path, self._head)
                self._head = self._journal.head
            written = {} if self._journal is None else self._journal.done
            done = await still_done(send, graph, written, self._salt)
            if self._budget is not None:
                parent = self._params.get("session")
                self._params["session"] = session = self._head.session
                more: Any = {"parent": parent, "done": written, "salt": self._salt}
                left = await bind(send, self._budget, session, **more)
                self._due = self._now() + left["wall_s"] if "wall_s" in left else None
            self._work = {name: each.work for name, each in done.items()}
            is_map = {name: isinstance(node, Map) for name, node in graph.nodes.items()}
            known = {name: each.output for name, each in done.items() if not is_map.get(name)}
            self._run = Run(graph, self._limits, self._now(), known)
            for name, work in self._work.items():
                if work.capsule and not self._run.nodes[name].stays:
                    self._held[work.capsule] = None
            self._tell(GraphEvent("graph.resumed" if done else "graph.started"))
            await self._to_its_end()
        finally:
            await self._give_back()
        self.result = result_of_run(self._run, self._work)
        self._tell(GraphEvent("graph.ended"))

    async def _to_its_end(self) -> None:
        """Raises JournalFailed."""
        async with asyncio.TaskGroup() as self._tasks:
            self._carry_out()
            while self._run.wall_s is None:
                try:
                    async with asyncio.timeout_at(self._due):
                        await self._changed.wait()
                    self._changed.clear()
                    if self._is_cancelled:
                        self._run.end(None, self._now())
                except TimeoutError:
                    self._run.end(BudgetSpent("wall_s", "its time is over"), self._now())
                self._carry_out()
        if self._fault is not None:
            raise self._fault

    def _carry_out(self) -> None:
        """Carry out what the machine says."""
        while effects := self._run.effects():
            for effect in effects:
                match effect:
                    case Start(names, texts):
                        self._start(names, texts)
                    case Cancel(name):
                        self._cancel_node(name)
                    case Release(name) if name in self._work:
                        capsule, self._work[name].capsule = self._work[name].capsule, ""
                        if capsule:
                            self._tasks.create_task(self._delete(capsule))
                    case Ended(name):
                        self._ended(self._run.nodes[name])
        if self._run.wall_s is not None:
            self._changed.set()

    def _ended(self, node: NodeRun) -> None:
        work = self._work.get(node.name, Work())
        is_fresh = node.status == "done" and not node.is_resumed and self._fault is None
        if self._journal is not None and is_fresh and not isinstance(node.node, Join):
            is_map = isinstance(node.node, Map) and node.item is None
            output = Output() if is_map else node.output
            try:
                self._journal.write(Done(node=node.name, output=output, work=work))
            except JournalFailed as error:
                self._fault = error
                self._run.end(error, self._now())
        if node.stays and node.status == "done":
            self._held.pop(work.capsule, None)
        self._tell(GraphEvent("node.ended", node.name, ended=node_at_end(node, work)))

    def _start(self, names: tuple[str, ...], texts: tuple[Filled, ...]) -> None:
        node, group = self._run.nodes[names[0]].node, _Group(names)
        self._groups |= dict.fromkeys(names, group)
        match node:
            case Tool():
                work = partial(self._call, node, texts[0])
            case Prefill():
                work = partial(self._prefill, node.name, texts[0])
            case _:
                work = partial(self._fork, group, texts)
        group.task = self._tasks.create_task(self._guarded(group, work))

    async def _guarded(self, group: _Group, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run the work of a group; an error ends those of its nodes that are not over."""
        error: MalleeError = ApiError("the answer ended without a result")
        try:
            await work()
        except MalleeError as raised:
            error = raised
        for name in group.names:
            self._groups.pop(name, None)
            self._run.lost(name, error, self._now())
        self._carry_out()

    def _cancel_node(self, name: str) -> None:
        """End a node that runs: its whole group if no other is left in that."""
        group = self._groups.get(name)
        if group is None:
            return
        group.cancelled.append(name)
        if any(self._run.nodes[each].is_open for each in group.names):
            self._prune(group, name)
        elif group.task is not asyncio.current_task() and not group.is_ending:
            assert group.task is not None
            group.is_ending = True
            group.task.cancel()
            work = self._work.get(name, Work())
            if work.capsule and isinstance(self._run.nodes[name].node, Prefill):
                self._tasks.create_task(self._delete(work.capsule))  # it is computed no further

    def _prune(self, group: _Group, name: str) -> None:
        """End one branch of a fork that goes on; one that no worker has yet is ended when one has."""
        if group.request and name in group.names:
            params = {"branches": [group.names.index(name)], "cache_salt": self._salt}
            call = calls.of_request(group.request, "prune", params)
            self._tasks.create_task(self._tried(call))

    async def _tried(self, call: calls.Call) -> None:
        with suppress(MalleeError):  # it has gone by itself, or will
            await self._client._send(call)

    async def _delete(self, capsule: str) -> None:
        with suppress(MalleeError):  # tried again at the end
            with suppress(NotFound):
                await self._client._send(calls.of_capsule("DELETE", capsule, self._salt))
            self._held.pop(capsule, None)

    async def _give_back(self) -> None:
        """Give back all that is still held, in a time that is bounded, also of a run that is cancelled."""
        from anyio import move_on_after

        session = self._head.session
        with move_on_after(DELETE_TIMEOUT_S, shield=True):
            await asyncio.gather(*map(self._delete, [*self._held]))
            # A session that is closed keeps nothing; one of a journal may be gone on with.
            keeps = any(getattr(node, "keep", False) for node in self._graph.nodes.values())
            if self._params.get("session") == session and self._journal is None and not keeps:
                await self._tried(close_session(session, self._salt))
        if self._journal is not None:
            self._journal.close()

    # Nodes

    def _begun(self, name: str, request: str = "") -> None:
        """The node is on its way."""
        self._run.started(name, self._now())
        self._tell(GraphEvent("node.started", name, request=request))

    def _finished(self, name: str, output: Output) -> None:
        self._run.finished(name, output, self._now())
        self._carry_out()

    async def _call(self, tool: Tool, text: Filled) -> None:
        self._begun(tool.name)
        timeout = asyncio.timeout(tool.timeout_s)
        try:
            async with timeout:
                found = await result_of(self._tools[tool.name], text)
            is_list = isinstance(found, list | tuple)
            texts = tuple(map(str, found)) if is_list else ("" if found is None else str(found),)
            num = sum(len(each.encode()) for each in texts)  # tokens, at most
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            # Of a function of the user's: its node fails with it, unless the node itself is ended.
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            if timeout.expired():
                raise ToolTimeout(tool.call, tool.timeout_s) from error
            why = f"{type(error).__name__}: {error}"[:MAX_WHY]
            raise ToolFailed(tool.call, why) from error
        if num > tool.max_tokens:
            num = sum([await num_tokens(self._client._send, each, self._salt) for each in texts])
        if num > tool.max_tokens:
            why = f"its result has {num} tokens > max_tokens {tool.max_tokens}"
            raise ToolFailed(tool.call, why)
        self._finished(tool.name, Output("\n".join(texts), texts if is_list else None))

    async def _prefill(self, name: str, text: Filled) -> None:
        is_early = self._run.is_forked_early(name)
        work = self._work[name] = Work()
        if not is_early:
            self._begun(name)
        given: Any = {"prompt": text} if isinstance(text, str) else {"messages": text}
        capsule = await self._client.prefill(**given, **self._params, wait=not is_early)
        self._held[capsule.id] = None
        work.capsule, work.request = capsule.id, capsule.id.rpartition(".")[0]
        if is_early:  # its branches are ready
            self._begun(name, work.request)
            self._carry_out()
            await capsule.wait()
        work.worker = capsule.worker
        work.prefill_tokens, work.cached_tokens = capsule.prefill_tokens, capsule.cached_tokens
        self._finished(name, Output())

    async def _fork(self, group: _Group, texts: tuple[Filled, ...]) -> None:
        """Draw the branches of one fork; those whose connection was cut are drawn once more."""
        waits = growing_waits(CUT_WAIT_S, MAX_WAIT_S)
        for name in group.names:
            self._run.started(name, self._now())
        for num_left in range(self._client.max_retries, -1, -1):
            try:
                await self._draw(group, texts)
                return
            except (ConnectionFailed, StreamBroken) as error:
                if not (num_left and was_cut(error)):
                    raise
            await asyncio.sleep(next(waits))
            left = [i for i, name in enumerate(group.names) if self._run.nodes[name].is_open]
            if not left:
                return
            texts = tuple(texts[i] for i in left)
            group.names, group.request = tuple(group.names[i] for i in left), ""

    async def _draw(self, group: _Group, texts: tuple[Filled, ...]) -> None:
        first = self._run.nodes[group.names[0]]
        spec = first.node
        assert isinstance(spec, Drawn)
        keeps = self._run.is_forked(first.name) or first.stays
        params = {**self._params, **spec.sampling, "at": spec.at, "max_tokens": spec.max_tokens}
        if first.item is not None and isinstance(seed := spec.sampling.get("seed"), int):
            drawn = branch_seed(seed, first.item[0])  # 64 bits, of which JSON's are signed
            params["seed"] = drawn - (1 << 64) if drawn >> 63 else drawn
        if keeps:
            params["keep"] = True
        suffixes = [text if isinstance(text, str) else {"messages": text} for text in texts]
        self._work |= {name: Work() for name in group.names}
        branches = self._client._fork(self._work[spec.of].capsule, suffixes, params)
        try:
            async with branches:
                async for event in branches.events():
                    if not group.request:
                        self._placed(group, branches.request_id)
                    text = branches.branches[event.index].text
                    self._take(group.names[event.index], event, text, keeps=keeps)
                    if not any(self._run.nodes[name].is_open for name in group.names):
                        break
                    if len(self._told) >= MAX_WAITING:
                        self._has_room.clear()
                        await self._has_room.wait()
        finally:
            # What branches left that were ended, though nothing more was read of them.
            for i, name in enumerate(group.names):
                if keeps and group.request and self._work[name].finish is None:
                    self._held[capsule_id(RequestId(group.request), i)] = None

    def _placed(self, group: _Group, request: str) -> None:
        """A worker has the branches."""
        group.request = request
        for name in group.names:
            self._work[name].request = request
            if self._run.nodes[name].is_open:
                self._begun(name, request)
        for name in group.cancelled:
            self._prune(group, name)

    def _take(self, name: str, event: BranchEvent, text: str, *, keeps: bool) -> None:
        """Take in news of one branch."""
        work, node = self._work[name], self._run.nodes[name]
        if node.is_open:
            self._run.first_token(name, self._now())
            if event.text:
                self._tell(GraphEvent("node.delta", name, event.text))
        if event.finish_reason is None:
            return
        work.finish, work.worker = event.finish_reason, event.worker
        work.cached_tokens, work.prefill_tokens = event.cached_tokens, event.prefill_tokens
        work.completion_tokens = event.completion_tokens
        if keeps and event.capsule is not None:
            self._held[event.capsule] = None
            work.capsule = event.capsule
        error: MalleeError | None = None
        match event.finish_reason:
            case "error":
                error = event.error or ApiError("the branch failed")
            case "budget":
                error = BudgetSpent(event.ended_by or "tokens", "the graph has spent it")
            case _ if keeps and not work.capsule:
                error = Unavailable("the answer's worker kept no capsule to go on from")
        if error is not None or event.finish_reason == "cancelled":
            self._run.lost(name, error, self._now())
            self._carry_out()
        else:
            self._finished(name, Output(text))
