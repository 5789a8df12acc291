"""A graph as it is built: each method adds a node and gives its handle, from which later ones take."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

from mallee.client.calls import Sampling, Terms
from mallee.graphs.nodes import (
    Branch,
    Handle,
    Item,
    Join,
    Map,
    Node,
    Prefill,
    Text,
    Tool,
    Turn,
    Wait,
)
from mallee.protocol.errors import InvalidGraph, shown

ToolFunction: TypeAlias = Callable[[str], Any]
"""From a call's input to a text, or a list of texts. May be a coroutine function; others run in threads."""
GraphText: TypeAlias = "str | Handle | Item | Sequence[str | Handle | Item]"
"""A text, the output of a node, in a map also `graph.item`; or several of these, one after the other."""
Turns: TypeAlias = Sequence[Mapping[str, GraphText]]
"""Messages with `role` and `content`, which the model's chat template renders."""

SAMPLING: Final = {*Sampling.__annotations__} - {*Terms.__annotations__} - {"max_tokens"}


class Graph:
    """Nodes that take from each other, run by `client.run(graph)`; it may be run again.

    Names are given, or made up: `prefill-0`, `branch-1`, ... Methods raise InvalidGraph for messages with
    other fields than `role` and `content`, and for unknown fields of sampling; what can't run for other
    reasons is refused by `client.run`, before anything is sent.
    """

    item: Final = Item()

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.tools: dict[str, ToolFunction] = {}  # by node

    def prefill(
        self,
        text: GraphText = "",
        *,
        messages: Turns = (),
        keep: bool = False,
        name: str | None = None,
    ) -> Handle:
        """A text, or messages, computed once and forked. `keep`: its capsule outlives the graph."""
        begin = self._begin("prefill", name, text, messages)
        return self._add(Prefill(**begin, keep=keep))

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
        begin = self._begin("branch", name, text, messages, sampling)
        return self._add(Branch(**begin, of=of.name, at=at, max_tokens=max_tokens, keep=keep))

    def map(
        self,
        of: Handle,
        over: Handle | Sequence[str],
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
        """A branch of `of` for each item of the output of `over`, or of a list of texts.

        `text`, or `messages`, has `graph.item` where it goes.
        """
        if not isinstance(over, Handle):
            items = json.dumps([*over])
            over = self.tool(json.loads, items, max_tokens=len(items.encode()))
        made = Map(
            **self._begin("map", name, text, messages, sampling),
            of=of.name,
            over=over.name,
            split=split,
            max_items=max_items,
            max_tokens=max_tokens,
            wait=wait,
            separator=separator,
        )
        return self._add(made)

    def join(
        self,
        inputs: Sequence[Handle],
        *,
        wait: Wait = "all",
        separator: str = "\n",
        name: str | None = None,
    ) -> Handle:
        """The outputs of all inputs, of the `first` that is done, or of as many as `wait` says."""
        names = tuple(each.name for each in inputs)
        made = Join(**self._begin("join", name), inputs=names, wait=wait, separator=separator)
        return self._add(made)

    def tool(
        self,
        call: ToolFunction,
        text: GraphText = "",
        *,
        timeout_s: float = 60.0,
        max_tokens: int = 1024,
        name: str | None = None,
    ) -> Handle:
        """A call of a function with `text`. Its result has at most `max_tokens` tokens."""
        called = getattr(call, "__name__", type(call).__name__)
        begin = self._begin("tool", name, text)
        made = Tool(**begin, call=called, timeout_s=timeout_s, max_tokens=max_tokens)
        self.tools[made.name] = call
        return self._add(made)

    def _begin(
        self,
        kind: str,
        name: str | None,
        text: GraphText = "",
        messages: Turns = (),
        sampling: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The fields that nodes have in common. Raises InvalidGraph."""
        name = f"{kind}-{len(self.nodes)}" if name is None else name
        begin = {"name": name, "text": _text(text), "messages": tuple(map(_turn, messages))}
        if sampling is None:
            return begin
        if wrong := sorted({*sampling} - SAMPLING):
            known = ", ".join(sorted(SAMPLING))
            raise InvalidGraph(
                f"node {name}: {wrong[0]} is not a field of a branch's sampling; known: {known}"
            )
        return {**begin, "sampling": sampling}

    def _add(self, node: Node) -> Handle:
        self.nodes.append(node)
        return Handle(node.name)


def _text(text: GraphText) -> Text:
    """Raises InvalidGraph for parts that are none."""
    parts = (text,) if isinstance(text, str | Handle | Item) else text
    if isinstance(parts, list | tuple) and all(isinstance(p, str | Handle | Item) for p in parts):
        return tuple(part for part in parts if part != "")
    raise InvalidGraph(f"a text is {shown(text)}: give a string, a handle, or a list of such")


def _turn(turn: Mapping[str, GraphText]) -> Turn:
    if set(turn) != {"role", "content"}:
        given = ", ".join(turn)
        raise InvalidGraph(f"a message has {given}; give role and content, and no more")
    return Turn(str(turn["role"]), _text(turn["content"]))
