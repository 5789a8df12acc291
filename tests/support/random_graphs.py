"""Random graphs, and a plain model of their runs."""

from random import Random

from mallee.graphs.graph import Graph, checked_graph
from mallee.graphs.nodes import (
    Branch,
    Join,
    Map,
    Node,
    Prefill,
    Ref,
    Tool,
    Wait,
    num_awaited,
    parts,
)


def random_graph(rng: Random, num_nodes: int) -> Graph:
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

    text: list[str | Ref] = ["a ", *(Ref(node=each) for each in some(2)), f" {name}"]
    kind = rng.random()
    if kind < 0.55 and capsuled:
        at = rng.choice([None, None, 3, 4])
        return Branch(name=name, of=rng.choice(capsuled), text=text, at=at, keep=keep)
    if kind < 0.8 and (inputs := some(5)):
        wait: Wait = rng.choice(["all", "first", rng.randint(1, len(inputs))])
        return Join(name=name, inputs=inputs, wait=wait)
    if kind < 0.86 and capsuled and texts:
        return Map(
            name=name,
            of=rng.choice(capsuled),
            over=rng.choice(texts),
            text=[Ref(item=True)],
            max_items=3,
            wait=rng.choice(["all", "first", 1]),
        )
    if kind < 0.93:
        return Tool(name=name, call="x", input=text)
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

    def __init__(self, graph: Graph) -> None:
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
        spec = self.graph.nodes[name]
        text = spec.input if isinstance(spec, Tool) else getattr(spec, "text", "")
        return "".join(
            part if isinstance(part, str) else self.nodes[part.node].text for part in parts(text)
        )
