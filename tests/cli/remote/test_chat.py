"""`mallee chat`: a conversation that branches."""

from collections.abc import Iterator
from typing import Any, cast

from rich.console import Console

from mallee.cli.remote.chat import Chat, Turn
from mallee.client import Branch, BranchEvent, Mallee


def chat(answers: "Answers | None" = None, system: str | None = None) -> tuple[Chat, Console]:
    looks: dict[str, Any] = {"color_system": "standard", "force_terminal": True} if answers else {}
    console = Console(width=60, highlight=False, **looks)
    return Chat(cast(Mallee, Scripted(answers)), console, {}, system), console


def add(chat: Chat, parent: Turn, question: str, answer: str) -> Turn:
    chat.current = Turn(question, Branch(0, answer), parent)
    chat.turns.append(chat.current)
    return chat.current


def test_what_is_sent_is_the_path_to_the_turn() -> None:
    said, console = chat(system="be brief")
    first = add(said, said.current, "a", "A")
    add(said, first, "b", "B")
    add(said, first, "c", "\x1b[2JC\x07")
    assert said.messages(said.current, "d") == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "\x1b[2JC\x07"},
        {"role": "user", "content": "d"},
    ]
    with console.capture() as shown:
        said.run(["/tree"])
    assert shown.get().splitlines()[-1] == "    └── 3  c → [2JC ◀"
    said.run(["/back"])
    assert said.current is first
    said.run(["/back 5"])
    assert said.current is said.turns[0]


class Answers:
    """Branches of a client, as far as a chat looks at them; `interrupted` breaks off after the events."""

    def __init__(self, events: list[BranchEvent], *, interrupted: bool = False) -> None:
        self.branches: dict[int, Branch] = {}
        self.is_closed = False
        self._events, self._interrupted = events, interrupted

    def __enter__(self) -> "Answers":
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True

    def events(self) -> Iterator[BranchEvent]:
        for event in self._events:
            self.branches.setdefault(event.index, Branch(event.index)).take(event, 1.0)
            yield event
        if self._interrupted:
            raise KeyboardInterrupt

    def wait(self) -> list[Branch]:
        return [self.branches[index] for index in sorted(self.branches)]


class Scripted:
    def __init__(self, answers: Answers | None) -> None:
        self.answers = answers

    def stream(self, **_: Any) -> Answers | None:
        return self.answers


def event(index: int, text: str, reasoning: str = "") -> BranchEvent:
    return BranchEvent(index, text, None, None, None, None, None, reasoning=reasoning)


def test_reasoning_is_shown_dim_and_sent_back_as_such() -> None:
    said, console = chat(Answers([event(0, "", "hm[b]"), event(0, "yes")]))
    with console.capture() as shown:
        said.run(["a"])
    assert "\x1b[2mhm[b]\x1b[0m\nyes" in shown.get()
    assert said.messages(said.current, "b")[1] == {
        "role": "assistant", "content": "yes", "reasoning_content": "hm[b]",
    }  # fmt: skip


def test_an_interrupted_fork_keeps_what_came_and_the_conversation() -> None:
    answers = Answers([event(1, "B"), event(0, "A")], interrupted=True)
    said, console = chat(answers)
    with console.capture() as shown:
        said.run(["/fork 2 a"])
    assert [turn.answer.text for turn in said.turns[1:]] == ["A", "B"]
    assert "(stopped)" in shown.get()
    assert answers.is_closed
