"""A graph as it is built: each method adds a node and gives its handle, from which later ones take."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from mallee.client.calls import Call
from mallee.graphs.graph import checked_graph
from mallee.graphs.nodes import Branch, Join, Map, Node, Prefill, Ref, Text, Tool, Turn, Wait
from mallee.protocol.errors import InvalidGraph

ToolFunction: TypeAlias = Callable[[str], Any]
"""From a call's input to a text, or a list of texts. It may be a coroutine function for an `AsyncMallee`."""


class Handle(NamedTuple):
    """A node of a graph, by its name."""

    name: str


class Item(NamedTuple):
    """The place in the text of a map where each item goes."""


GraphText: TypeAlias = "str | Handle | Sequence[str | Handle | Item]"
"""A text, the output of a node, or parts of both kinds, one after the other; in a map also `graph.item`."""
Turns: TypeAlias = Sequence[Mapping[str, GraphText]]
"""Messages with `role` and `content`, which the model's chat template renders."""


class Graph:
    """Nodes that take from each other, run by `client.run(graph)`; it may be run again.

    Names are given, or made up: `prefill-0`, `branch-1`, ... Methods raise InvalidGraph for messages with
    other fields than `role` and `content`, and nothing else: what can't run is refused by `client.run`,
    before it is sent.
    """

    item: Final = Item()

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.tools: dict[str, ToolFunction] = {}

    def prefill(
        self,
        text: GraphText = "",
        *,
        messages: Turns = (),
        keep: bool = False,
        name: str | None = None,
    ) -> Handle:
        """A text, or messages, computed once and forked. `keep`: its capsule outlives the graph."""
        made = self._name(name, "prefill")
        return self._add(Prefill(name=made, text=_text(text), messages=_turns(messages), keep=keep))

    def branch(
        self,
        of: Handle,
        text: GraphText = "",
        *,
        messages: Turns = (),
        at: int | None = None,
        max_tokens: int = 16,
        keep: bool = False,
        name: str | None = None,
        **sampling: Any,
    ) -> Handle:
        """An answer after a prefill or another branch and `text`, or `messages`.

        `at`: it goes on from so many tokens of a prefill, and begins as soon as they are there.
        `sampling`: as a fork's parameters.
        """
        return self._add(
            Branch(
                name=self._name(name, "branch"),
                of=of.name,
                text=_text(text),
                messages=_turns(messages),
                at=at,
                max_tokens=max_tokens,
                sampling=sampling,
                keep=keep,
            )
        )

    def join(
        self,
        inputs: Sequence[Handle],
        *,
        wait: Wait = "all",
        separator: str = "\n",
        name: str | None = None,
    ) -> Handle:
        """The outputs of all inputs, of the `first` that is done, or of as many as `wait` says."""
        names = [each.name for each in inputs]
        made = Join(name=self._name(name, "join"), inputs=names, wait=wait, separator=separator)
        return self._add(made)

    def tool(
        self,
        call: ToolFunction | str,
        text: GraphText = "",
        *,
        timeout_s: float = 60.0,
        max_tokens: int = 1024,
        name: str | None = None,
    ) -> Handle:
        """A call of a function here, with `text`; or by name, which the reader of the events answers."""
        called = call if isinstance(call, str) else call.__name__
        if not isinstance(call, str):
            self.tools[called] = call
        return self._add(
            Tool(
                name=self._name(name, "tool"),
                call=called,
                input=_text(text),
                timeout_s=timeout_s,
                max_tokens=max_tokens,
            )
        )

    def map(
        self,
        of: Handle,
        over: Handle,
        text: GraphText = "",
        *,
        messages: Turns = (),
        split: Literal["lines", "json"] = "lines",
        max_items: int = 64,
        max_tokens: int = 16,
        wait: Wait = "all",
        separator: str = "\n",
        name: str | None = None,
        **sampling: Any,
    ) -> Handle:
        """A branch of `of` for each item of the output of `over`.

        `text`, or `messages`, has `graph.item` where it goes.
        """
        return self._add(
            Map(
                name=self._name(name, "map"),
                of=of.name,
                over=over.name,
                text=_text(text),
                messages=_turns(messages),
                split=split,
                max_items=max_items,
                max_tokens=max_tokens,
                sampling=sampling,
                wait=wait,
                separator=separator,
            )
        )

    def _name(self, given: str | None, kind: str) -> str:
        return f"{kind}-{len(self.nodes)}" if given is None else given

    def _add(self, node: Node) -> Handle:
        self.nodes.append(node)
        return Handle(node.name)


def _text(text: GraphText) -> Text:
    if isinstance(text, str):
        return text
    parts = [text] if isinstance(text, Handle) else text
    return [_part(each) for each in parts]


def _turns(messages: Turns) -> list[Turn]:
    for turn in messages:
        if set(turn) != {"role", "content"}:
            given = ", ".join(turn)
            raise InvalidGraph(f"a message has {given}; give role and content, and no more")
    return [Turn(role=str(turn["role"]), content=_text(turn["content"])) for turn in messages]


def _part(part: str | Handle | Item) -> str | Ref:
    match part:
        case Handle(name):
            return Ref(node=name)
        case Item():
            return Ref(item=True)
        case _:
            return part


def run_graph(
    graph: Graph, outputs: Sequence[Handle], max_running: int | None, params: Mapping[str, Any]
) -> Call:
    """The call that runs a graph as a stream. Raises InvalidGraph for one that can't run."""
    names = [each.name for each in outputs]
    checked_graph(graph.nodes, names)
    body: dict[str, Any] = {
        "nodes": msgspec.to_builtins(graph.nodes),
        "outputs": names,
        "max_running": max_running,
        "stream": True,
        **params,
    }
    known = {name: value for name, value in body.items() if value not in (None, [])}
    return Call("POST", "/v1/graphs", known, cache_salt=params.get("cache_salt"))


def tell_result(graph: str, node: str, result: Mapping[str, Any], salt: str | None) -> Call:
    """The result of a tool's call."""
    body = dict(result) if salt is None else {**result, "cache_salt": salt}
    return Call("POST", f"/v1/graphs/{graph}/nodes/{node}/result", body, cache_salt=salt)
