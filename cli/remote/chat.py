"""`mallee chat`: a conversation that branches, with a running service.

Each question and its answer is a turn; turns are a tree. What the next question continues is the turn
that is current: `/back` and `/go` move it, `/fork` asks for several answers at once.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text
from rich.tree import Tree

from mallee.cli.output import print_error
from mallee.cli.remote.service import DEFAULT_URL, UrlOption, open_client
from mallee.client.sync import Branch, Mallee
from mallee.client.view import live
from mallee.protocol.errors import MalleeError

MAX_FORKS: Final = 16
MAX_SHOWN: Final = 60
HELP: Final = """\
TEXT            ask
/fork N [TEXT]  N answers to TEXT, or to the last question again
/back [N]       go back N turns: the next question begins another branch
/go TURN        go to a turn, by its number in the tree
/tree           draw all turns
/help           this
/quit           end (also Ctrl-D)"""


@dataclass(slots=True, eq=False)
class Turn:
    """A question and its answer, after those of `parent`; the root has neither."""

    number: int
    question: str = ""
    answer: str = ""
    parent: "Turn | None" = None
    reasoning: str = ""
    children: list["Turn"] = field(default_factory=list)

    def path(self) -> list["Turn"]:
        """The turns up to this one, without the root."""
        found, turn = [], self
        while turn.parent is not None:
            found.append(turn)
            turn = turn.parent
        return found[::-1]


class Conversation:
    """All turns, and the current one."""

    def __init__(self, system: str | None = None) -> None:
        self.root = self.current = Turn(0)
        self.turns = [self.root]
        self._system = system

    def messages(self, after: Turn, question: str) -> list[dict[str, str]]:
        """All that is sent to ask `question` after a turn."""
        head = [] if self._system is None else [{"role": "system", "content": self._system}]
        said: list[dict[str, str]] = []
        for turn in after.path():
            answer = {"role": "assistant", "content": turn.answer}
            if turn.reasoning:
                answer["reasoning_content"] = turn.reasoning
            said += [{"role": "user", "content": turn.question}, answer]
        return [*head, *said, {"role": "user", "content": question}]

    def add(self, parent: Turn, question: str, answer: str, reasoning: str = "") -> Turn:
        """A new turn, now the current one."""
        turn = Turn(len(self.turns), question, answer, parent, reasoning=reasoning)
        parent.children.append(turn)
        self.turns.append(turn)
        self.current = turn
        return turn

    def back(self, steps: int) -> None:
        """As far as the root."""
        for _ in range(steps):
            self.current = self.current.parent or self.root

    def draw(self) -> Tree:
        tree = Tree(Text("conversation", style="bold"), guide_style="green")
        todo = [(tree, turn) for turn in self.root.children]
        while todo:
            above, turn = todo.pop(0)
            mark = " ◀" if turn is self.current else ""
            text = f"{turn.number}  {_short(turn.question)} → {_short(turn.answer)}{mark}"
            node = above.add(Text(text, style="bold" if mark else ""))
            todo += [(node, child) for child in turn.children]
        return tree


def chat(
    url: UrlOption = DEFAULT_URL,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0: greedy.")] = 0.7,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answers.")] = None,
) -> None:
    """Talk with a running service; /fork and /back branch the conversation, /tree draws it.

    Example: mallee chat --system "You answer in one line." --temperature 0
    """
    console = Console(highlight=False)
    params: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    with open_client(url) as client:
        client.models()  # a service that isn't there is told before the first question
        console.print(f"{url}: /help for commands, /quit to end", style="dim")
        Chat(client, Conversation(system), console, params).run(_lines(console))


def _lines(console: Console) -> Iterator[str]:
    is_asked = sys.stdin.isatty()
    while True:
        try:
            yield console.input("[bold green]> [/]" if is_asked else "")
        except (EOFError, KeyboardInterrupt):
            return


class Chat:
    """Carries out lines of a user."""

    def __init__(
        self,
        client: Mallee,
        conversation: Conversation,
        console: Console,
        params: dict[str, Any],
    ) -> None:
        self._client = client
        self._conversation = conversation
        self._console = console
        self._params = params
        self._commands: dict[str, Callable[[str], None]] = {
            "/fork": self._fork,
            "/back": self._back,
            "/go": self._go,
            "/tree": lambda _: self._console.print(self._conversation.draw()),
            "/help": lambda _: self._console.print(HELP, markup=False),
        }

    def run(self, lines: Iterator[str]) -> None:
        """Until the lines, or the user, end. An error of the service ends its turn alone."""
        for line in lines:
            word, _, rest = line.strip().partition(" ")
            if word == "/quit":
                return
            try:
                if word.startswith("/"):
                    self._command(word, rest.strip())
                elif word:
                    self._ask(line.strip())
            except MalleeError as error:
                print_error(str(error))

    def _command(self, word: str, rest: str) -> None:
        if word in self._commands:
            self._commands[word](rest)
        else:
            print_error(f"{word}: no such command; /help has all of them")

    def _ask(self, question: str) -> None:
        """One answer, shown as it comes; Ctrl-C ends it there."""
        before = self._conversation.current
        messages = self._conversation.messages(before, question)
        branch, was_thinking = None, False
        with self._client.stream(messages=messages, **self._params) as branches:
            try:
                for event in branches.events():
                    if event.reasoning:
                        was_thinking = True
                        self._show(event.reasoning, style="dim")
                    if event.text and was_thinking:
                        was_thinking = False
                        self._console.print()
                    self._show(event.text)
            except KeyboardInterrupt:
                self._console.print(" (stopped)", style="dim", end="")
            branch = branches.branches.get(0)
        self._console.print()
        answer, reasoning = ("", "") if branch is None else (branch.text, branch.reasoning)
        turn = self._conversation.add(before, question, answer, reasoning)
        self._console.print(_figures(turn, branch), style="dim")

    def _show(self, text: str, *, style: str | None = None) -> None:
        shown = _printable(text)
        self._console.print(
            shown, style=style, end="", markup=False, highlight=False, soft_wrap=True
        )

    def _fork(self, rest: str) -> None:
        count, _, question = rest.partition(" ")
        if not count.isdecimal() or not 1 <= int(count) <= MAX_FORKS:
            print_error(f"/fork {escape(count)}: give a number of answers, 1 to {MAX_FORKS}")
            return
        before = self._conversation.current
        if not question.strip():  # the last question, again
            if before.parent is None:
                print_error("/fork N TEXT: there is no question yet")
                return
            before, question = before.parent, before.question
        messages = self._conversation.messages(before, question)
        labels = [f"turn {len(self._conversation.turns) + i}" for i in range(int(count))]
        params = {**self._params, "n": int(count)}
        with self._client.stream(messages=messages, **params) as branches:
            try:
                live(branches, _short(question), labels=labels, console=self._console)
            except KeyboardInterrupt:
                self._console.print(" (stopped)", style="dim", end="")
            answers = [branches.branches[index] for index in sorted(branches.branches)]
        if not self._console.is_terminal:
            self._console.print()  # a live view ends its line on terminals alone
        for branch in answers:
            self._conversation.add(before, question, branch.text, branch.reasoning)
        self._console.print(f"now at turn {self._conversation.current.number}; /go to another")

    def _back(self, rest: str) -> None:
        if rest and not rest.isdecimal():
            print_error(f"/back {escape(rest)}: give a number of turns")
            return
        self._conversation.back(min(int(rest or 1), len(self._conversation.turns)))
        self._say_current()

    def _go(self, rest: str) -> None:
        turns = self._conversation.turns
        if not rest.isdecimal() or int(rest) >= len(turns):
            print_error(f"/go {escape(rest)}: give a turn, 0 to {len(turns) - 1}")
            return
        self._conversation.current = turns[int(rest)]
        self._say_current()

    def _say_current(self) -> None:
        turn = self._conversation.current
        where = f"turn {turn.number}: {_short(turn.question)}" if turn.parent else "the beginning"
        self._console.print(f"now at {where}", style="dim", markup=False)


def _figures(turn: Turn, branch: Branch | None) -> str:
    told = f"turn {turn.number}"
    if branch is not None and branch.usage is not None:
        told += f", {branch.usage.completion_tokens} tokens"
    if branch is not None and branch.finish_reason is not None:
        told += f", {branch.cached_tokens} cached, {branch.prefill_tokens} computed"
    return told


def _short(text: str) -> str:
    flat = " ".join(_printable(text).split())
    return flat if len(flat) <= MAX_SHOWN else flat[: MAX_SHOWN - 1] + "…"


def _printable(text: str) -> str:
    """Without what would steer the terminal."""
    return "".join(each for each in text if each.isprintable() or each in "\n\t")
