"""Runs of random graphs beside a plain model: states, causes, order, capsules, times."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from mallee.graphs.graph import CheckedGraph, checked_graph
from mallee.graphs.nodes import (
    Branch,
    Filled,
    Handle,
    Item,
    Join,
    Map,
    Node,
    Prefill,
    Text,
    Tool,
    Wait,
    num_awaited,
)
from mallee.graphs.run import Cancel, Ended, NodeRun, Output, Release, Run, RunLimits, Start
from mallee.protocol.errors import MalleeError, Unavailable


def random_graph(rng: Random, num_nodes: int) -> CheckedGraph:
    """Layers of up to a tenth of the nodes, with diamonds and joins: nodes take from those in layers before.

    Most take from the last two layers, some from far above.
    """
    nodes: list[Node] = []
    before: list[Node] = []
    while len(nodes) < num_nodes:
        width = rng.randint(1, max(2, num_nodes // 10))
        width = min(width, num_nodes - len(nodes))
        layer = [_node(rng, f"n{len(nodes) + i}", before) for i in range(width)]
        nodes += layer
        near = nodes[-2 * width :]
        before = near + rng.sample(nodes, min(3, len(nodes)))
    outputs = [node.name for node in nodes if rng.random() < 0.05]
    taken = {name for node in nodes for name in node.takes}
    ends = [node.name for node in nodes if node.name not in taken]
    return checked_graph(nodes, [*dict.fromkeys(ends + outputs)])


def _node(rng: Random, name: str, before: list[Node]) -> Node:
    capsuled = [node.name for node in before if isinstance(node, Prefill | Branch)]
    texts = [node.name for node in before if not isinstance(node, Prefill)]
    keep = rng.random() < 0.1

    def some(most: int) -> list[str]:
        return rng.sample(sorted(set(texts)), min(len(set(texts)), rng.randint(0, most)))

    text: Text = ("a ", *map(Handle, some(2)), f" {name}")
    kind = rng.random()
    if kind < 0.55 and capsuled:
        at = rng.choice([None, None, 3, 4])
        return Branch(name=name, of=rng.choice(capsuled), text=text, at=at, keep=keep)
    if kind < 0.8 and (inputs := some(5)):
        wait: Wait = rng.choice(["all", "first", rng.randint(1, len(inputs))])
        return Join(name=name, inputs=tuple(inputs), wait=wait)
    if kind < 0.86 and capsuled and texts:
        return Map(
            name=name,
            of=rng.choice(capsuled),
            over=rng.choice(texts),
            text=(Item(),),
            max_items=3,
            wait=rng.choice(["all", "first", 1]),
        )
    if kind < 0.93:
        return Tool(name=name, call="x", text=text)
    return Prefill(name=name, text=text, keep=keep)


class PlainNode:
    def __init__(self, needed: int) -> None:
        self.needed = needed
        self.state = "waiting"  # ready, done, failed, cancelled
        self.text = ""
        self.items: list[str] | None = None
        self.is_expanded = False
        self.done: list[str] = []  # inputs, as they became so
        self.num_left = 0  # inputs that are not lost
        self.cause = ""  # the node that failed, or was cancelled, by itself

    @property
    def is_open(self) -> bool:
        return self.state in ("waiting", "ready")


class PlainRun:
    """The states that nodes must have after each event, without slots, queues, claims, capsules or time.

    One that is lost because of another is "failed", whatever became of that one.
    """

    def __init__(self, graph: CheckedGraph) -> None:
        self.graph = graph
        self.nodes: dict[str, PlainNode] = {}
        self.inputs = {name: list(node.takes) for name, node in graph.nodes.items()}
        self.takers = {name: list(takers) for name, takers in graph.takers.items()}
        for name, node in graph.nodes.items():
            num = len(node.takes)
            needed = num_awaited(node.wait, num) if isinstance(node, Join) else num
            self.nodes[name] = PlainNode(needed)
            self.nodes[name].num_left = num
            if not num:
                self.nodes[name].state = "ready"

    def event(self, name: str, state: str, text: str = "") -> None:
        """A node that was started has ended."""
        node = self.nodes[name]
        if node.state == "ready":
            node.state, node.text = state, text
            self.spread(name)

    def begun(self, name: str) -> None:
        """A prefill has begun: branches at a place of it go on from it."""
        for each in self.takers[name]:
            self.goes_on(each)

    def goes_on(self, name: str) -> None:
        """A node, if it is a branch at a place of a prefill, goes on from that."""
        node, spec = self.nodes[name], self.graph.nodes[name]
        if not isinstance(spec, Branch) or spec.at is None or not node.is_open:
            return
        if isinstance(self.graph.nodes[spec.of], Prefill) and spec.of not in node.done:
            node.done.append(spec.of)
            if len(node.done) == node.needed:
                node.state = "ready"

    def cancel(self) -> None:
        for node in self.nodes.values():
            if node.is_open:
                node.state = "cancelled"

    def spread(self, first: str) -> None:
        """One after the other is told of an end; when all are, what nothing needs is ended."""
        ends = [first]
        for end in ends:
            takers = [name for name in self.takers[end] if self.nodes[name].is_open]
            ends += [name for name in takers if self.is_ended_by(name, end)]
        while idle := [name for name in self.nodes if self.is_idle(name)]:
            for name in idle:
                self.nodes[name].state = "cancelled"

    def is_idle(self, name: str) -> bool:
        is_needed = any(self.nodes[each].is_open for each in self.takers[name])
        return self.nodes[name].is_open and not is_needed and name not in self.graph.outputs

    def is_ended_by(self, name: str, end: str) -> bool:
        """Tell a node of the end of an input; whether it has ended by it."""
        node, spec = self.nodes[name], self.graph.nodes[name]
        if self.nodes[end].state != "done":
            node.num_left -= 1
            if node.num_left < node.needed:
                node.state, node.cause = "failed", self.nodes[end].cause or end
            return not node.is_open
        if end in node.done:
            return False  # it went on from it before
        node.done.append(end)
        if len(node.done) < node.needed:
            return False
        if isinstance(spec, Map) and not node.is_expanded:
            return self.is_ended_by_items(name, spec)
        if not isinstance(spec, Join | Map):
            node.state = "ready"
            return False
        self.gather(name, spec)
        return True

    def gather(self, name: str, spec: Join | Map) -> None:
        node = self.nodes[name]
        node.items = [self.nodes[each].text for each in self.inputs[name] if each in node.done]
        node.text = spec.separator.join(node.items)
        node.state = "done"

    def is_ended_by_items(self, name: str, spec: Map) -> bool:
        node, over = self.nodes[name], self.nodes[spec.over]
        lines = [line.strip() for line in over.text.splitlines() if line.strip()]
        items = over.items if over.items is not None else lines
        needed = num_awaited(spec.wait, len(items))
        if len(items) > spec.max_items or needed > len(items):
            node.state = "failed"
            return True
        node.is_expanded = True
        node.needed, node.num_left, node.done = needed, len(items), []
        self.inputs[name] = [f"{name}[{i}]" for i in range(len(items))]
        for each in self.inputs[name]:
            self.nodes[each] = PlainNode(0)
            self.nodes[each].state = "ready"
            self.takers[each] = [name]
        if not items:
            self.gather(name, spec)
        return not node.is_open

    def input_text(self, name: str) -> str:
        """The text with which a node starts; of an item without its own."""
        parts = self.graph.nodes[name].text
        return "".join(
            self.nodes[part.name].text if isinstance(part, Handle) else str(part) for part in parts
        )


LOST = ("failed", "cancelled")


class Shell:
    """Carries out the effects of a run as workers would, with ends in random order, and checks each."""

    def __init__(
        self, graph: CheckedGraph, rng: Random, limits: RunLimits, before: "Shell | None" = None
    ) -> None:
        """`before`: an earlier run of the graph, which came to no end; what it has done is taken over."""
        done: dict[str, Output] = {} if before is None else before.done
        self.graph = graph
        self.rng = rng
        self.limits = limits
        self.risk = rng.choice(
            [0.0, 0.002, 0.04]
        )  # of each node to fail, and half of it to be ended
        self.now = 0.0
        self.run = Run(graph, limits, self.now, done)
        self.model = PlainRun(graph)
        self.done: dict[str, Output] = dict(
            done
        )  # what was computed, or told by a client, in order
        self.running: list[str] = []
        self.begun: set[str] = set()  # prefills that workers have
        self.late: list[str] = []  # cancelled, and the end may come all the same
        self.capsules: set[str] = set()  # that are there
        self.own_errors: dict[str, MalleeError] = {}
        self.ended: list[str] = []
        self.is_cancelled = False
        for name in done:
            if name in graph.nodes:
                self.model.goes_on(name)
        for name, output in done.items():
            self.model.event(name, "done", output.text)
            if self.run.nodes[name].leaves_capsule:
                self.capsules.add(name)
        self.carry_out()

    def carry_out(self) -> None:
        for effect in self.run.effects():
            match effect:
                case Start(names, texts):
                    self.start(names, texts)
                case Cancel(name):
                    self.running.remove(name)
                    self.late.append(name)
                case Release(name):
                    self.capsules.remove(name)  # is there, once
                case Ended(name):
                    assert name not in self.ended
                    self.ended.append(name)

    def start(self, names: tuple[str, ...], texts: tuple[Filled, ...]) -> None:
        nodes = [self.run.nodes[name] for name in names]
        assert len(names) <= self.limits.fork
        parents = {node.node.parent for node in nodes}
        assert len(parents) == 1
        assert len(names) == 1 or parents != {""}
        for node, text in zip(nodes, texts, strict=True):
            assert node.name not in self.done, "what was done is not done again"
            if node.node.parent:
                is_early = isinstance(node.node, Branch) and node.node.at is not None
                has_begun = is_early and node.node.parent in self.begun
                assert has_begun or node.node.parent in self.capsules
            said = self.model.input_text(node.name) if node.item is None else node.item[1]
            assert text == said
        self.running += names

    def step(self) -> None:
        """Something happens to a node that runs, or that was to be ended."""
        self.now += self.rng.random()
        if self.late and (not self.running or self.rng.random() < 0.5):
            name = self.late.pop(self.rng.randrange(len(self.late)))
            if self.run.nodes[name].leaves_capsule and self.rng.random() < 0.5:
                self.capsules.add(name)
                self.run.finished(name, Output("late"), self.now)
            return
        place = self.rng.randrange(len(self.running))
        name = self.running[place]
        is_prefill = isinstance(self.run.nodes[name].node, Prefill)
        if is_prefill and name not in self.begun and self.rng.random() < 0.7:
            self.begun.add(name)
            self.model.begun(name)
            self.run.started(name, self.now)
            return
        self.running.pop(place)
        if self.rng.random() < 0.5 and not is_prefill:
            self.run.first_token(name, self.now)
            self.now += self.rng.random()
        chance = self.rng.random()
        if chance < self.risk:
            self.own_errors[name] = Unavailable(f"{name} broke")
            self.model.event(name, "failed")
            self.run.lost(name, self.own_errors[name], self.now)
        elif chance < 1.5 * self.risk:
            self.model.event(name, "cancelled")
            self.run.lost(name, None, self.now)
        else:
            text = "\n".join(f"{name}.{i}" for i in range(self.rng.randint(0, 4)))
            if self.run.nodes[name].leaves_capsule:
                self.capsules.add(name)
            self.model.event(name, "done", text)
            self.done[name] = Output(text)
            self.run.finished(name, Output(text), self.now)

    def cancel(self) -> None:
        self.is_cancelled = self.run.wall_s is None
        self.model.cancel()
        self.run.end(None, self.now)

    # What must hold

    def check(self) -> None:
        assert self.run.wall_s is not None or self.running, "something is under way, or it is over"
        assert self.run.nodes.keys() == self.model.nodes.keys()
        for name, node in self.run.nodes.items():
            known = self.model.nodes[name]
            if known.state in LOST:
                assert node.status in LOST, name
            elif known.state == "ready":
                assert node.status in ("queued", "running"), name
            elif known.state == "waiting":
                assert node.status == "waiting" or known.is_expanded, name
            else:
                assert node.status == "done", name
            if node.status == "done":
                assert node.output.text == known.text
            if known.cause:
                assert node.cause == known.cause
        self.check_work()

    def check_work(self) -> None:
        """As many run as may, and none is begun before one that was ready earlier."""
        computed = [name for name in self.running if self.run.nodes[name].leaves_capsule]
        queued = [node for node in self.run.nodes.values() if node.status == "queued"]
        waiting = [node for node in queued if node.leaves_capsule]
        assert len(computed) <= self.limits.running
        assert len(self.running) - len(computed) <= self.limits.tools
        assert len(computed) == self.limits.running or not waiting
        assert len(self.running) - len(computed) == self.limits.tools or len(queued) == len(waiting)

    def check_end(self) -> None:
        assert self.run.wall_s is not None
        assert not self.running
        assert sorted(self.ended) == sorted(self.run.nodes)
        kept = {name for name in self.capsules if not self.run.nodes[name].stays}
        assert not kept, "capsules leak"
        for node in self.run.nodes.values():
            self.check_node(node)
        assert self.run.wall_s is not None
        path = self.run.path()
        assert abs(sum(seconds for _, seconds in path) - self.run.wall_s) < 1e-6
        assert all(seconds >= 0 for _, seconds in path)
        is_done = all(self.run.nodes[name].status == "done" for name in self.graph.outputs)
        known = "done" if is_done else "failed"
        assert self.run.status == ("cancelled" if self.is_cancelled else known)
        before = self.run.wall_s
        self.run.end(None, self.now + 1)
        assert (self.run.effects(), self.run.wall_s) == ([], before)

    def check_node(self, node: NodeRun) -> None:
        times = [node.ready_s, node.start_s, node.first_s, node.end_s]
        known = [each for each in times if each is not None]
        assert known == sorted(known)
        assert node.end_s is not None
        if node.after is not None and node.ready_s is not None and node.status == "done":
            assert self.run.nodes[node.after].end_s is not None
        if node.status == "failed":
            root = node.cause or node.name
            assert node.error is self.own_errors.get(root) or self.is_map(root)
            assert node.error is self.run.nodes[root].error is not None
            assert self.run.nodes[root].cause is None
        if isinstance(node.node, Join) and node.status == "done":
            assert node.output.items is not None
            assert len(node.output.items) == node.needed
            rest = iter(self.run.nodes[name].output.text for name in node.inputs)
            assert all(text in rest for text in node.output.items), "in the order of the inputs"

    def is_map(self, name: str) -> bool:
        return isinstance(self.run.nodes[name].node, Map)


def play(seed: int, num_nodes: int, limits: RunLimits) -> Shell:
    rng = Random(seed)
    shell = Shell(random_graph(rng, num_nodes), rng, limits)
    end(shell, rng.randrange(num_nodes) if rng.random() < 0.2 else -1)
    return shell


def end(shell: Shell, cancel_at: int = -1) -> None:
    """Carry a run to its end; with a cancel before a step."""
    num_steps = 0
    while shell.running or shell.late:
        if num_steps == cancel_at:
            shell.cancel()
        else:
            shell.step()
        shell.carry_out()
        shell.check()
        num_steps += 1
        assert num_steps < 8 * len(shell.run.nodes) + 8, "nobody waits for ever"
    shell.check_end()


LIMITS = st.builds(
    RunLimits, running=st.integers(1, 8), tools=st.integers(1, 4), fork=st.integers(1, 8)
)


@given(seed=st.integers(0, 1 << 32), num_nodes=st.integers(1, 60), limits=LIMITS)
def test_random_graphs_run_as_a_plain_model_says(
    seed: int, num_nodes: int, limits: RunLimits
) -> None:
    """S4, S14, part: failures, cancels and late ends at random; equal events at equal times end alike."""
    first, second = (play(seed, num_nodes, limits) for _ in range(2))
    assert first.ended == second.ended
    assert first.run.path() == second.run.path()


@given(seed=st.integers(0, 1 << 32), num_nodes=st.integers(1, 60), limits=LIMITS)
def test_a_run_goes_on_from_what_an_earlier_one_has_done(
    seed: int, num_nodes: int, limits: RunLimits
) -> None:
    """S4, part: whenever that stopped, all that was done is there at once, and is not done again."""
    rng = Random(seed)
    shell = Shell(random_graph(rng, num_nodes), rng, limits)
    for _ in range(3):  # it is resumed, and stops again
        for _ in range(rng.randrange(num_nodes)):
            if shell.running:
                shell.step()
                shell.carry_out()
        resumed = Shell(shell.graph, rng, limits, shell)
        resumed.check()
        for name, node in shell.run.nodes.items():
            if node.status == "done":
                known = resumed.run.nodes[name]
                assert (known.status, known.output) == ("done", node.output)
                assert known.is_resumed == (name in shell.done)
        order = [name for name in resumed.ended if name in shell.done]
        assert order == list(shell.done)
        shell = resumed
    end(shell)
