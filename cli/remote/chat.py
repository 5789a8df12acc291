"""`mallee chat`: a conversation that branches, with a running service.

Each question and its answer is a turn; turns are a tree. What the next question continues is the turn
that is current: `/back` and `/go` move it, `/fork` asks for several answers at once.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from mallee.cli.output import print_error
from mallee.cli.remote.service import DEFAULT_URL, UrlOption, open_client
from mallee.client.sync import Branch, Branches, Mallee
from mallee.client.view import live
from mallee.protocol.errors import ConfigError, MalleeError

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

    question: str = ""
    answer: Branch = field(default_factory=lambda: Branch(0))
    parent: "Turn | None" = None


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
    params = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    with open_client(url) as client:
        client.models()  # a service that isn't there is told before the first question
        console.print(f"{url}: /help for commands, /quit to end", style="dim")
        Chat(client, console, params, system).run(_lines(console))


def _lines(console: Console) -> Iterator[str]:
    prompt = "[bold green]> [/]" if sys.stdin.isatty() else ""
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            yield console.input(prompt)


class Chat:
    """All turns, and the current one; carries out lines of a user."""

    def __init__(
        self, client: Mallee, console: Console, params: Mapping[str, Any], system: str | None = None
    ) -> None:
        self.current = Turn()
        self.turns = [self.current]
        self._client, self._console, self._params = client, console, params
        self._head = [] if system is None else [{"role": "system", "content": system}]

    def run(self, lines: Iterable[str]) -> None:
        """Until the lines, or the user, end. An error of the service ends its turn alone."""
        for line in map(str.strip, lines):
            if line.partition(" ")[0] == "/quit":
                return
            try:
                self._follow(line)
            except MalleeError as error:
                print_error(str(error))

    def _follow(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        rest = rest.lstrip()
        match command:
            case "/help":
                self._console.print(HELP, markup=False)
            case "/tree":
                self._console.print(self.draw())
            case "/back":
                steps = _number(command, rest or "1", "a number of turns", range(sys.maxsize))
                for _ in range(min(steps, len(self.turns))):
                    self.current = self.current.parent or self.current
                self._say_current()
            case "/go":
                what = f"a turn, 0 to {len(self.turns) - 1}"
                self.current = self.turns[_number(command, rest, what, range(len(self.turns)))]
                self._say_current()
            case "/fork":
                count, _, question = rest.partition(" ")
                what = f"a number of answers, 1 to {MAX_FORKS}"
                num, after = _number(command, count, what, range(1, MAX_FORKS + 1)), self.current
                if not question:  # the last one, again
                    after, question = after.parent or after, after.question
                if not question:
                    raise ConfigError("/fork N TEXT: there is no question yet")
                self._ask(after, question.strip(), num)
            case _ if line.startswith("/"):
                raise ConfigError(f"{command}: no such command; /help has all of them")
            case _ if line:
                self._ask(self.current, line, 1)

    def _ask(self, after: Turn, question: str, num: int) -> None:
        """Turns with `num` answers, shown as they come; Ctrl-C ends them there."""
        labels = [f"turn {len(self.turns) + i}" for i in range(num)]
        messages = self.messages(after, question)
        with self._client.stream(messages=messages, n=num, **self._params) as branches:
            try:
                if num > 1:
                    live(branches, _short(question), labels=labels, console=self._console)
                else:
                    self._show(branches)
            except KeyboardInterrupt:
                self._console.print(" (stopped)", style="dim", end="")
            answers = [branches.branches.get(i) or Branch(i) for i in range(num)]
        self.turns += [Turn(question, each, after) for each in answers]
        self.current = self.turns[-1]
        if num == 1 or not self._console.is_terminal:
            self._console.print()  # a live view ends its line on terminals alone
        if num > 1:
            self._console.print(f"now at {labels[-1]}; /go to another")
        else:
            self._console.print(_figures(labels[0], answers[0]), style="dim")

    def messages(self, after: Turn, question: str) -> list[dict[str, str]]:
        """All that is sent to ask `question` after a turn."""
        sent = [{"role": "user", "content": question}]
        while after.parent is not None:
            answer = {"role": "assistant", "content": after.answer.text}
            if after.answer.reasoning:
                answer["reasoning_content"] = after.answer.reasoning
            sent = [{"role": "user", "content": after.question}, answer, *sent]
            after = after.parent
        return [*self._head, *sent]

    def _show(self, branches: Branches) -> None:
        """An answer as it comes, the reasoning before it dim."""
        show = partial(self._console.print, end="", markup=False, soft_wrap=True)
        is_thinking = False
        for event in branches.events():
            is_thinking = is_thinking or bool(event.reasoning)
            show(_printable(event.reasoning), style="dim")
            if is_thinking and event.text:
                is_thinking = False
                show("\n")
            show(_printable(event.text))

    def _say_current(self) -> None:
        where = "the beginning"
        if self.current.parent is not None:
            where = f"turn {self.turns.index(self.current)}: {_short(self.current.question)}"
        self._console.print(f"now at {where}", style="dim", markup=False)

    def draw(self) -> Tree:
        root, *turns = self.turns
        nodes = {root: Tree(Text("conversation", style="bold"), guide_style="green")}
        for number, turn in enumerate(turns, 1):
            mark = " ◀" if turn is self.current else ""
            text = f"{number}  {_short(turn.question)} → {_short(turn.answer.text)}{mark}"
            above = nodes[turn.parent or root]
            nodes[turn] = above.add(Text(text, style="bold" if mark else ""))
        return nodes[root]


def _figures(label: str, answer: Branch) -> str:
    if answer.finish_reason is None:
        return label
    took = f"{answer.completion_tokens} tokens, {answer.cached_tokens} cached"
    return f"{label}, {took}, {answer.prefill_tokens} computed"


def _number(command: str, given: str, what: str, allowed: range) -> int:
    if not given.isdecimal() or int(given) not in allowed:
        raise ConfigError(f"{command} {given}: give {what}")
    return int(given)


def _short(text: str) -> str:
    flat = " ".join(_printable(text).split())
    return flat if len(flat) <= MAX_SHOWN else flat[: MAX_SHOWN - 1] + "…"


def _printable(text: str) -> str:
    """Without what would steer the terminal."""
    return "".join(each for each in text if each.isprintable() or each in "\n\t")
