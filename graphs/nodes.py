"""Nodes of graphs as they are read from JSON, and what one takes from another.

`takes` of a node are those whose state or output it takes, each once, its parent first.

A text is a string, or a list of parts: strings as they are, `{"node": name}` for the output of another node,
and in a map `{"item": true}`. There are no templates: braces in a text stay braces. Where messages stand
instead of a text, the model's chat template renders them.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, TypeAlias

import msgspec


class Ref(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a text: the output of `node`, or the item that a map is at. One of the two is given."""

    node: str = ""
    item: bool = False


Text: TypeAlias = str | list[str | Ref]
ROLES: Final = ("system", "user", "assistant")


class Turn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message of a conversation; its role is one of `ROLES`."""

    role: str
    content: Text


Filled: TypeAlias = str | list[dict[str, str]]
"""The beginning of a node, its parts filled in: a text, or messages with `role` and `content`."""

Wait: TypeAlias = Literal["all", "first"] | int
"""The inputs that are waited for: all of them, the first that is done, or as many as are done first."""


class _Node(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"
):
    name: str

    @property
    def parent(self) -> str:
        """The node whose capsule it goes on from; empty: none."""
        return ""


class Worded(_Node, frozen=True, kw_only=True):
    """A node that begins with a text, or with messages instead."""

    text: Text = ""
    messages: list[Turn] = []


class Prefill(Worded, frozen=True, kw_only=True, tag="prefill"):
    """A text, or an open conversation, that is computed once. Branches fork its capsule; it has no output.

    `keep`: the capsule stays after the graph, here and in a branch.
    """

    keep: bool = False

    @property
    def takes(self) -> list[str]:
        return list(dict.fromkeys(refs(self)))


class Branch(Worded, frozen=True, kw_only=True, tag="branch"):
    """An answer after the capsule of `of`, a prefill or a branch, and `text` or `messages`: its output.

    With `at` it goes on from the first so many tokens of the capsule; those of a prefill need not all be
    computed for it to begin. `sampling` has the fields of a fork that say how tokens are drawn, and when it
    stops.
    """

    of: str
    at: int | None = None
    max_tokens: int = 16
    sampling: dict[str, Any] = {}
    keep: bool = False

    @property
    def parent(self) -> str:
        return self.of

    @property
    def takes(self) -> list[str]:
        return list(dict.fromkeys((self.of, *refs(self))))


class Join(_Node, frozen=True, kw_only=True, tag="join"):
    """The outputs of `inputs` that were waited for, in the order in which they are named here.

    Once it has them, those of the others that nothing else waits for are ended.
    """

    inputs: list[str]
    wait: Wait = "all"
    separator: str = "\n"

    @property
    def takes(self) -> list[str]:
        return self.inputs


class Tool(_Node, frozen=True, kw_only=True, tag="tool"):
    """A call that the client carries out: `call` names it, its output is what the client says.

    `timeout_s` is the time from the call to its result, of at most `max_tokens` tokens.
    """

    call: str
    input: Text = ""
    timeout_s: float = 60.0
    max_tokens: int = 1024

    @property
    def takes(self) -> list[str]:
        return list(dict.fromkeys(refs(self)))


class Map(Worded, frozen=True, kw_only=True, tag="map"):
    """A branch of `of` for each item of the output of `over`; its output is their outputs, in order.

    Items of a join and a map are their inputs' outputs, and those of a tool what its client listed; another
    output is split by `split`. Waits as a join does.
    """

    of: str
    over: str
    split: Literal["lines", "json"] = "lines"
    max_items: int = 64
    max_tokens: int = 16
    sampling: dict[str, Any] = {}
    wait: Wait = "all"
    separator: str = "\n"

    @property
    def at(self) -> None:
        """Its branches go on from all of the capsule."""

    @property
    def parent(self) -> str:
        return self.of

    @property
    def takes(self) -> list[str]:
        return list(dict.fromkeys((self.of, self.over, *refs(self))))


Node: TypeAlias = Prefill | Branch | Join | Tool | Map


def parts(text: Text) -> list[str | Ref]:
    """A text as a list."""
    return [text] if isinstance(text, str) else text


def texts_of(node: Node) -> dict[str, Text]:
    """The texts with which a node begins, by the fields that they stand in; a join has none."""
    match node:
        case Join():
            return {}
        case Tool():
            return {"input": node.input}
        case _ if node.messages:
            return {f"messages[{i}].content": turn.content for i, turn in enumerate(node.messages)}
        case _:
            return {"text": node.text}


def filled(node: Node, fill: Callable[[Text], str]) -> Filled:
    """The beginning of a node, where `fill` gives a text as a string."""
    if isinstance(node, Worded) and node.messages:
        return [{"role": turn.role, "content": fill(turn.content)} for turn in node.messages]
    return "".join(map(fill, texts_of(node).values()))


def refs(node: Node) -> Iterator[str]:
    """The nodes that its texts have the outputs of, as often as they have them."""
    for text in texts_of(node).values():
        yield from (part.node for part in parts(text) if isinstance(part, Ref) and part.node)


def num_awaited(wait: Wait, n: int) -> int:
    """The number of inputs, of `n`, that are waited for."""
    if wait == "all":
        return n
    return 1 if wait == "first" else wait
