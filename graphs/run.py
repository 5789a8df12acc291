"""The run of a graph, without I/O: what happened comes in, what is to be done comes out as effects.

A shell starts nodes, says how they end, and carries out the effects in their order. Each node ends exactly
once: done, failed, or cancelled. One that can't be done any more ends at once, with the cause; one that
nothing waits for any more is cancelled. Equal inputs at equal times give equal effects.

A branch at a place of a prefill is ready once that has begun; all others, when what they take from is done.

A run may take over what an earlier one of the same graph had done: these nodes are done at once, in the order
in which they were, and are not started.

A node is claimed by each node that takes from it and is not over, and by the graph if it is an output. A
join that has what it waited for is over, so its claims fall, and what was claimed by it alone is ended.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from mallee.graphs.graph import CheckedGraph
from mallee.graphs.nodes import (
    Branch,
    Drawn,
    Filled,
    Handle,
    Item,
    Join,
    Map,
    Node,
    Prefill,
    Text,
    Tool,
    num_awaited,
)
from mallee.protocol.errors import InvalidParameter, MalleeError

Status: TypeAlias = Literal["waiting", "queued", "running", "done", "failed", "cancelled"]
_OPEN: Final = ("waiting", "queued", "running")


class Start(NamedTuple):
    """Nodes to start, with what they begin with: a prefill, a call, or branches that are one fork."""

    nodes: tuple[str, ...]
    texts: tuple[Filled, ...]


class Cancel(NamedTuple):
    """A node that was started is to be ended. Nothing of it may be left, and nothing has to be told of it."""

    node: str


class Release(NamedTuple):
    """The capsule of a node is needed no more. Once for each capsule that does not outlive the graph."""

    node: str


class Ended(NamedTuple):
    """A node is over. Once for each node."""

    node: str


Effect: TypeAlias = Start | Cancel | Release | Ended


class RunLimits(NamedTuple):
    """Nodes that run at once on workers, calls of tools at once, and branches of one fork."""

    running: int
    tools: int
    fork: int


class Output(NamedTuple):
    """The output of a node. `items` of joins, maps, and tools that gave a list."""

    text: str = ""
    items: tuple[str, ...] | None = None


NOTHING: Final = Output()
NO_NODES: Final[Mapping[str, Output]] = {}


@dataclass(slots=True)
class NodeRun:
    """One node of a run, or one item of a map. Times are seconds since the run began.

    `after` is the node whose end made it ready, or ended it. `cause`: the node that failed first if this one
    failed by another, or the one that was over when this one was needed no more.
    """

    name: str
    node: Node
    takers: tuple[str, ...]
    inputs: list[str] = field(default_factory=list)
    claims: int = 1
    holders: int = 0  # open nodes that go on from its capsule
    needed: int = 0  # inputs that are waited for
    item: tuple[int, str] | None = None  # of a map: its number and its text
    status: Status = "waiting"
    done: set[str] = field(default_factory=set)  # inputs; the first ones count
    num_lost: int = 0
    after: str | None = None
    ready_s: float | None = None
    start_s: float | None = None
    first_s: float | None = None
    end_s: float | None = None
    output: Output = NOTHING
    error: MalleeError | None = None
    cause: str | None = None
    has_capsule: bool = False
    is_resumed: bool = False  # done by an earlier run

    @property
    def is_open(self) -> bool:
        return self.status in _OPEN

    @property
    def leaves_capsule(self) -> bool:
        """Whether it is computed, so that its end leaves a capsule."""
        return self.item is not None or isinstance(self.node, Prefill | Branch)

    @property
    def stays(self) -> bool:
        """Whether its capsule outlives the graph."""
        return isinstance(self.node, Prefill | Branch) and self.node.keep

    @property
    def kind(self) -> str:
        """The kind of the node; an item of a map is a branch."""
        return "branch" if self.item is not None else type(self.node).__name__.lower()


class Run:
    """The life of every node of one graph. `now` are seconds of any clock that does not go back.

    `done`: outputs of nodes of an earlier run, as they ended, without joins and maps, which follow from them.
    """

    def __init__(
        self,
        graph: CheckedGraph,
        limits: RunLimits,
        now: float,
        done: Mapping[str, Output] = NO_NODES,
    ) -> None:
        self.graph = graph
        self.wall_s: float | None = None  # once it is over
        # Items of maps come behind.
        self.nodes: dict[str, NodeRun] = {name: _begun(graph, name) for name in graph.nodes}
        self._limits = limits
        self._began = now
        self._is_cancelled = False
        self._num_open = len(self.nodes)
        self._num_running = self._num_calling = 0
        self._queue: dict[tuple[object, ...], list[str]] = {}  # what may be one fork; oldest first
        self._calls: deque[str] = deque()
        self._ended: deque[NodeRun] = deque()  # whose end is to be told to their takers
        self._closed: deque[NodeRun] = deque()  # whose claims are to fall
        self._last = ""  # to end
        self._known = dict(done)  # until they are taken over
        self._effects: list[Effect] = []
        for node in list(self.nodes.values()):
            if node.needed == 0:
                self._ready(node, None, now)
        self._spread(now)

    # What happened

    def started(self, name: str, now: float) -> None:
        """A node that was started has been sent. Of a prefill that is forked early: its capsule has an id."""
        node = self.nodes[name]
        if node.is_open and node.start_s is None:
            node.start_s = now - self._began
            if isinstance(node.node, Prefill):
                self._tell_begun(node, now)
                self._spread(now)

    def first_token(self, name: str, now: float) -> None:
        node = self.nodes[name]
        if node.is_open and node.first_s is None:
            self.started(name, now)
            node.first_s = now - self._began

    def finished(self, name: str, output: Output, now: float) -> None:
        """The node is done; what is computed has left a capsule. One that was ended before gives it back."""
        node = self.nodes[name]
        assert node.status == "running" or not node.is_open, "only what was started can be done"
        self._finish(node, output, now)
        self._spread(now)

    def lost(self, name: str, error: MalleeError | None, now: float) -> None:
        """The node has failed, or was ended from elsewhere; it has left no capsule."""
        node = self.nodes[name]
        if node.is_open:
            node.error = error
            self._settle(node, "failed" if error is not None else "cancelled", now)
            self._spread(now)

    def end(self, error: MalleeError | None, now: float) -> None:
        """End all that is not over: cancelled, or failed by `error`."""
        if self.wall_s is None:
            self._is_cancelled = error is None
        for node in self.nodes.values():
            if node.is_open:
                node.error = error
                self._end(node, "cancelled" if error is None else "failed", now)
        self._spread(now)

    def effects(self) -> list[Effect]:
        """The effects since the last call, in order."""
        found, self._effects = self._effects, []
        return found

    # What there is

    @property
    def status(self) -> Status:
        """Done: every output is."""
        if self.wall_s is None:
            return "running"
        if self._is_cancelled:
            return "cancelled"
        is_done = all(self.nodes[name].status == "done" for name in self.graph.outputs)
        return "done" if is_done else "failed"

    def is_forked_early(self, name: str) -> bool:
        """Whether branches begin before the capsule of a prefill is there."""
        return any(self._is_early(self.nodes[each]) for each in self.nodes[name].takers)

    def _is_early(self, node: NodeRun) -> bool:
        """Whether it can begin once its prefill has begun."""
        spec = node.node
        is_placed = isinstance(spec, Branch) and spec.at is not None
        return is_placed and isinstance(self.nodes[spec.parent].node, Prefill)

    def is_forked(self, name: str) -> bool:
        """Whether other nodes of the graph go on from its capsule."""
        return any(self.nodes[each].node.parent == name for each in self.nodes[name].takers)

    def path(self) -> list[tuple[str, float]]:
        """The chain of nodes that ended last, each with the seconds from the end of the one before.

        They add up to `wall_s`.
        """
        found: list[tuple[str, float]] = []
        name: str | None = self._last
        while name:
            node = self.nodes[name]
            before = 0.0 if node.after is None else self.nodes[node.after].end_s
            assert node.end_s is not None
            assert before is not None
            found.append((name, node.end_s - before))
            name = node.after
        return found[::-1]

    # The life of one node

    def _ready(self, node: NodeRun, after: str | None, now: float) -> None:
        """All that it takes is there."""
        node.after = after
        node.ready_s = now - self._began
        if node.name in self._known:
            return  # it is taken over when its turn comes
        node.status = "queued"
        match node.node:
            case Map() if node.item is None:
                self._expand(node, now)
            case Join():
                self._gathered(node, node.node.separator, now)
            case Tool():
                self._calls.append(node.name)
            case _:
                self._queue.setdefault(self._group(node), []).append(node.name)

    def _expand(self, node: NodeRun, now: float) -> None:
        """Have a map run once for each item."""
        spec = node.node
        assert isinstance(spec, Map)
        node.status = "running"
        node.start_s = node.ready_s
        try:
            items = _items(spec, self.nodes[spec.over].output)
        except InvalidParameter as error:
            node.error = error
            self._settle(node, "failed", now)
            return
        names = [f"{node.name}[{i}]" for i in range(len(items))]
        node.done.clear()
        node.needed = num_awaited(spec.wait, len(items))
        if not items:
            self._gathered(node, spec.separator, now)
            return
        after = node.after
        node.inputs = [*names, *node.inputs]
        self._num_open += len(names)
        for i, name in enumerate(names):
            self.nodes[name] = NodeRun(name, spec, (node.name,), item=(i, items[i]))
        for name in names:
            self._ready(self.nodes[name], after, now)

    def _finish(self, node: NodeRun, output: Output, now: float) -> None:
        if not node.is_open:
            if node.leaves_capsule and not node.has_capsule:
                node.has_capsule = True
                self._effects.append(Release(node.name))
            return
        node.start_s = now - self._began if node.start_s is None else node.start_s
        node.has_capsule = node.leaves_capsule
        node.output = output
        self._settle(node, "done", now)

    def _gathered(self, node: NodeRun, separator: str, now: float) -> None:
        """A join, or a map, has what it waited for."""
        names = (name for name in node.inputs if name in node.done)
        texts = [self.nodes[name].output.text for name in names]
        node.output = Output(separator.join(texts), tuple(texts))
        node.start_s = node.ready_s if node.start_s is None else node.start_s
        self._settle(node, "done", now)

    def _tell_begun(self, node: NodeRun, now: float) -> None:
        """Tell a prefill's branches that wait for no more than some of its tokens."""
        for taker in map(self.nodes.__getitem__, node.takers):
            is_new = taker.is_open and node.name not in taker.done
            if is_new and self._is_early(taker):
                taker.done.add(node.name)
                if len(taker.done) == taker.needed:
                    self._ready(taker, None, now)

    def _input_ended(self, node: NodeRun, ended: NodeRun, now: float) -> None:
        """One of those that an open node takes from is over."""
        if ended.status == "done":
            if ended.name in node.done:
                return  # the node went on from it before
            node.done.add(ended.name)
            if len(node.done) < node.needed:
                return
            if isinstance(node.node, Map) and node.status == "running":
                node.after = ended.name
                self._gathered(node, node.node.separator, now)
            else:
                self._ready(node, ended.name, now)
            return
        node.num_lost += 1
        if _num_inputs(node) - node.num_lost < node.needed:
            node.after = ended.name
            node.cause = ended.cause or ended.name
            node.error = ended.error
            self._end(node, "failed" if ended.status == "failed" else "cancelled", now)

    def _settle(self, node: NodeRun, status: Status, now: float) -> None:
        if node.status == "running":
            self._count(node, -1)
        node.status = status
        node.end_s = now - self._began
        self._num_open -= 1
        self._last = node.name
        self._effects.append(Ended(node.name))
        self._ended.append(node)

    def _end(self, node: NodeRun, status: Status, now: float) -> None:
        """End a node that is not over, whatever it does."""
        if node.status == "running" and (node.leaves_capsule or isinstance(node.node, Tool)):
            self._effects.append(Cancel(node.name))
        self._settle(node, status, now)

    def _count(self, node: NodeRun, change: int) -> None:
        """Count a node that is begun, or over."""
        self._num_calling += change * isinstance(node.node, Tool)
        self._num_running += change * node.leaves_capsule

    # All of them

    def _spread(self, now: float) -> None:
        """Tell all ends to those that they concern, then start what there is room for."""
        self._tell_ends(now)
        for name in [*self._known]:
            if name in self.nodes:
                self.nodes[name].is_resumed = True
                self._finish(self.nodes[name], self._known.pop(name), now)
                self._tell_ends(now)
        self._fill()

    def _tell_ends(self, now: float) -> None:
        while self._ended or self._closed:
            # Ends first: what can't be done has failed, though nothing needs it any more.
            if self._ended:
                ended = self._ended.popleft()
                for name in ended.takers:
                    if self.nodes[name].is_open:
                        self._input_ended(self.nodes[name], ended, now)
                self._closed.append(ended)
            else:
                self._close(self._closed.popleft(), now)
        if self._num_open == 0 and self.wall_s is None:
            self.wall_s = now - self._began

    def _close(self, ended: NodeRun, now: float) -> None:
        """Give up all that a node held."""
        for name in ended.inputs:
            self._unclaim(self.nodes[name], ended, now)
        if ended.item is None and ended.node.parent:
            parent = self.nodes[ended.node.parent]
            parent.holders -= 1
            self._release(parent)
        self._release(ended)

    def _unclaim(self, node: NodeRun, by: NodeRun, now: float) -> None:
        node.claims -= 1
        if node.claims == 0 and node.is_open:
            node.cause = node.after = by.name
            self._end(node, "cancelled", now)

    def _release(self, node: NodeRun) -> None:
        """Give a capsule back that nothing goes on from, once."""
        if node.has_capsule and node.holders == 0 and not node.stays:
            node.holders = -1
            self._effects.append(Release(node.name))

    def _fill(self) -> None:
        """Start what there is room for; what has ended in a queue is passed over."""
        limits = self._limits
        while self._queue and self._num_running < limits.running:
            key = next(iter(self._queue))
            names = [name for name in self._queue.pop(key) if self.nodes[name].is_open]
            room = min(limits.running - self._num_running, limits.fork)
            if names[room:]:
                self._queue = {key: names[room:], **self._queue}
            self._start(names[:room])
        while self._calls and self._num_calling < limits.tools:
            name = self._calls.popleft()
            self._start([name] if self.nodes[name].is_open else [])

    def _group(self, node: NodeRun) -> tuple[object, ...]:
        """Equal for nodes that can go out as one fork.

        One that draws by a seed of its own goes alone: a fork's branches draw by their places in it.
        """
        spec = node.node
        if not isinstance(spec, Drawn):
            return (node.name,)
        is_seeded = "seed" in spec.sampling and spec.sampling.get("temperature") != 0
        alone = node.name if is_seeded else ""
        draws = (spec.of, spec.at, spec.max_tokens, msgspec.json.encode(spec.sampling))
        return (*draws, self.is_forked(node.name), node.stays, alone)

    def _start(self, names: list[str]) -> None:
        if not names:
            return
        for name in names:
            self.nodes[name].status = "running"
            self._count(self.nodes[name], 1)
        texts = tuple(self._text(self.nodes[name]) for name in names)
        self._effects.append(Start(tuple(names), texts))

    def _text(self, node: NodeRun) -> Filled:
        return node.node.filled(lambda text: "".join(self._strings(text, node)))

    def _strings(self, text: Text, node: NodeRun) -> Iterator[str]:
        for part in text:
            match part:
                case Handle(name):
                    yield self.nodes[name].output.text
                case Item():
                    assert node.item is not None
                    yield node.item[1]
                case _:
                    yield part


def _begun(graph: CheckedGraph, name: str) -> NodeRun:
    """A node before anything has happened."""
    node, takers = graph.nodes[name], graph.takers[name]
    num = len(node.takes)
    claims = len(takers) + (name in graph.outputs)
    holders = sum(graph.nodes[taker].parent == name for taker in takers)
    needed = num_awaited(node.wait, num) if isinstance(node, Join) else num
    return NodeRun(name, node, takers, node.takes, claims, holders, needed)


def _num_inputs(node: NodeRun) -> int:
    """Those that may still matter: of a map that has begun its items, else all."""
    if isinstance(node.node, Map) and node.status == "running":
        return len(node.inputs) - len(node.node.takes)
    return len(node.inputs)


def _items(spec: Map, output: Output) -> list[str]:
    """The items of a map. Raises InvalidParameter: too many, too few to wait for, or no list."""
    found = list(output.items) if output.items is not None else _split(spec, output.text)
    if len(found) > spec.max_items:
        remedy = f"{spec.over} has {len(found)} items; raise it, or have fewer"
        raise InvalidParameter("max_items", spec.max_items, remedy)
    if num_awaited(spec.wait, len(found)) > len(found):
        raise InvalidParameter("wait", spec.wait, f"{spec.over} has {len(found)} items")
    return found


def _split(spec: Map, text: str) -> list[str]:
    if spec.split == "lines":
        return [line.strip() for line in text.splitlines() if line.strip()]
    try:
        found = msgspec.json.decode(text, type=list[msgspec.Raw])
    except msgspec.MsgspecError as error:
        remedy = (
            f"the output of {spec.over} is no JSON array ({error}); constrain it, or split lines"
        )
        raise InvalidParameter("split", spec.split, remedy) from error
    return [_plain(item) for item in found]


def _plain(item: msgspec.Raw) -> str:
    """A JSON string as its text, anything else as its JSON."""
    raw = bytes(item).strip()
    return msgspec.json.decode(raw, type=str) if raw.startswith(b'"') else raw.decode()
