"""Lines at the head of a system prompt that change from request to request, such as a bill or a date.

One of them makes all that follows it new, so nothing of an earlier prompt can be used again. They are found
by comparing a system prompt with those before it, of the same client alone; Claude Code's billing line is
known without that. Belongs to one gateway: another has seen other prompts.
"""

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import xxhash

from mallee.api.text.conversation import Message

HEAD_LINES: Final = 8  # of a prompt, in which a line may change
MAX_CHANGED: Final = 2  # lines at once; with more it is another prompt
LEAST_SAME: Final = 64  # characters beside them
MAX_LINES: Final = 4096  # of a prompt that is compared
MAX_CLIENTS: Final = 1024
PROMPTS_OF_A_CLIENT: Final = 4
MAX_SHOWN: Final = 120

_BILL: Final = re.compile(r"\s*x-anthropic-billing-header:", re.IGNORECASE)


class Head(NamedTuple):
    """`changed`: the line by which the prompt differs from one before it, if it still stands in front."""

    messages: tuple[Message, ...]
    changed: str = ""


class _Prompt(NamedTuple):
    """Digests of its lines, and those of them that have changed so far."""

    lines: tuple[int, ...]
    changing: frozenset[int] = frozenset()


class Heads:
    """System prompts of late, oldest out first. `moves`: lines that change go behind the conversation.

    Safe to use from several threads.
    """

    def __init__(self, *, moves: bool) -> None:
        self._moves = moves
        self._clients: OrderedDict[str, tuple[_Prompt, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def settle(self, messages: Sequence[Message], client: str, *, remembers: bool = True) -> Head:
        """The messages to render, those before the answer. Only prompts of one `client` are compared."""
        given = tuple(messages)
        if not given or given[0].role != "system":
            return Head(given)
        lines = given[0].text.split("\n")
        if len(lines) > MAX_LINES:
            return Head(given)
        found, differs = self._compared(lines, client, remembers=remembers)
        bills = {i for i, line in enumerate(lines[:HEAD_LINES]) if _BILL.match(line)}
        changing = sorted(found.changing | bills)
        if not changing:
            return Head(given)
        if self._moves:
            moved = _moved(given, lines, changing)
            if moved is not None:
                return Head(moved)
        return Head(given, lines[min(differs)][:MAX_SHOWN] if differs else "")

    def _compared(
        self, lines: list[str], client: str, *, remembers: bool
    ) -> tuple[_Prompt, list[int]]:
        """The prompt, and the lines in which it differs from the youngest like it."""
        prompt = _Prompt(
            tuple(xxhash.xxh3_64_intdigest(line.encode("utf-8", "replace")) for line in lines)
        )
        num_chars = sum(map(len, lines))
        with self._lock:
            before = self._clients.get(client, ())
            differs: list[int] = []
            for earlier in before:
                if len(earlier.lines) != len(lines):
                    continue
                pairs = enumerate(zip(earlier.lines, prompt.lines, strict=True))
                differs = [i for i, (one, other) in pairs if one != other]
                is_like = len(differs) <= MAX_CHANGED and all(i < HEAD_LINES for i in differs)
                if is_like and num_chars - sum(len(lines[i]) for i in differs) >= LEAST_SAME:
                    prompt = prompt._replace(changing=earlier.changing | frozenset(differs))
                    before = tuple(each for each in before if each is not earlier)
                    break
                differs = []
            if remembers:
                self._clients[client] = (prompt, *before)[:PROMPTS_OF_A_CLIENT]
                self._clients.move_to_end(client)
                if len(self._clients) > MAX_CLIENTS:
                    self._clients.popitem(last=False)
        return prompt, differs


def _moved(
    messages: tuple[Message, ...], lines: list[str], changing: list[int]
) -> tuple[Message, ...] | None:
    """The messages with these lines of the first one at the end of the last; None: there is no other."""
    if len(messages) < 2 or messages[-1].role == "assistant":
        return None
    rest = "\n".join(line for i, line in enumerate(lines) if i not in changing)
    first = (replace(messages[0], text=rest),) if rest.strip() else ()
    behind = "\n".join(lines[i] for i in changing)
    last = replace(messages[-1], text=f"{messages[-1].text}\n\n{behind}")
    return (*first, *messages[1:-1], last)
