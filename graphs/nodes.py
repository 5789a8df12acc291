"""Nodes of graphs, and what one takes from another.

A text is a tuple of parts: strings as they are, handles for the outputs of other nodes, and in a map
`Item()` for the item. There are no templates: braces in a text stay braces. Where messages stand instead of a
text, the model's chat template renders them.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec


class Handle(NamedTuple):
    """A node of a graph, by its name."""

    name: str


class Item(NamedTuple):
    """The place in the text of a map where each item goes."""


Text: TypeAlias = tuple[str | Handle | Item, ...]
Filled: TypeAlias = str | list[dict[str, str]]
"""The beginning of a node, its parts filled in: a text, or messages with `role` and `content`."""

Wait: TypeAlias = Literal["all", "first"] | int
"""The inputs that are waited for: all of them, the first that is done, or as many as are done first."""


class Turn(NamedTuple):
    """A message of a conversation."""

    role: str
    content: Text


class Node(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A step of a graph. It begins with a text, or with messages instead."""

    name: str
    text: Text = ()
    messages: tuple[Turn, ...] = ()

    @property
    def parent(self) -> str:
        """The node whose capsule it goes on from; empty: none."""
        return ""

    @property
    def texts(self) -> list[Text]:
        """The texts with which it begins."""
        return [turn.content for turn in self.messages] or [self.text]

    @property
    def reads(self) -> list[str]:
        """The nodes whose outputs it takes, as often as it does."""
        return [part.name for text in self.texts for part in text if isinstance(part, Handle)]

    @property
    def takes(self) -> list[str]:
        """The nodes whose capsule or output it takes, each once, its parent first."""
        return list(dict.fromkeys([self.parent, *self.reads] if self.parent else self.reads))

    def filled(self, fill: Callable[[Text], str]) -> Filled:
        """Its beginning, where `fill` gives a text as a string."""
        if self.messages:
            return [{"role": turn.role, "content": fill(turn.content)} for turn in self.messages]
        return fill(self.text)


class Prefill(Node, frozen=True, kw_only=True):
    """A text, or an open conversation, that is computed once. Branches fork its capsule; it has no output.

    `keep`: the capsule stays after the graph, here and in a branch.
    """

    keep: bool = False


class Drawn(Node, frozen=True, kw_only=True):
    """Answers after the capsule of `of`, a prefill or a branch, and `text` or `messages`.

    With `at` it goes on from the first so many tokens of the capsule; those of a prefill need not all be
    computed for it to begin. `sampling`: the fields of a fork that say how tokens are drawn.
    """

    of: str
    at: int | None = None
    max_tokens: int = 16
    sampling: dict[str, Any] = {}

    @property
    def parent(self) -> str:
        return self.of


class Branch(Drawn, frozen=True, kw_only=True):
    """One answer, which is its output."""

    keep: bool = False


class Map(Drawn, frozen=True, kw_only=True):
    """An answer for each item of the output of `over`; its output is theirs, in order.

    Items of a join and a map are their inputs' outputs, and those of a tool the list that it gave; another
    output is split by `split`. Waits as a join does.
    """

    over: str
    split: Literal["lines", "json"] = "lines"
    max_items: int = 64
    wait: Wait = "all"
    separator: str = "\n"

    @property
    def reads(self) -> list[str]:
        return [self.over, *super().reads]


class Join(Node, frozen=True, kw_only=True):
    """The outputs of `inputs` that were waited for, in the order in which they are named here.

    Once it has them, those of the others that nothing else waits for are ended.
    """

    inputs: tuple[str, ...]
    wait: Wait = "all"
    separator: str = "\n"

    @property
    def reads(self) -> list[str]:
        return list(self.inputs)


class Tool(Node, frozen=True, kw_only=True):
    """A call of a function with its text: `call` names it. Its result has at most `max_tokens` tokens."""

    call: str
    timeout_s: float = 60.0
    max_tokens: int = 1024


def num_awaited(wait: Wait, n: int) -> int:
    """The number of inputs, of `n`, that are waited for."""
    if wait == "all":
        return n
    return 1 if wait == "first" else wait
