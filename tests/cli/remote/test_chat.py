"""`mallee chat`: a conversation that branches."""

from collections.abc import Iterator
from typing import Any, cast

from rich.console import Console

from mallee.cli.remote.chat import Chat, Conversation
from mallee.client import Branch, BranchEvent, Mallee


def test_what_is_sent_is_the_path_to_the_turn() -> None:
    conversation = Conversation("be brief")
    first = conversation.add(conversation.root, "a", "A")
    conversation.add(first, "b", "B")
    conversation.add(first, "c", "\x1b[2JC\x07")
    assert conversation.messages(conversation.current, "d") == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "\x1b[2JC\x07"},
        {"role": "user", "content": "d"},
    ]
    console = Console(width=60)
    with console.capture() as shown:
        console.print(conversation.draw())
    assert shown.get().splitlines()[-1] == "    └── 3  c → [2JC ◀"
    conversation.back(1)
    assert conversation.current is first
    conversation.back(5)
    assert conversation.current is conversation.root


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
    def __init__(self, answers: Answers) -> None:
        self.answers = answers

    def stream(self, **_: Any) -> Answers:
        return self.answers


def event(index: int, text: str, reasoning: str = "") -> BranchEvent:
    return BranchEvent(index, text, None, None, None, None, None, reasoning=reasoning)


def test_reasoning_is_shown_dim_and_sent_back_as_such() -> None:
    conversation, console = (
        Conversation(),
        Console(width=60, color_system="standard", force_terminal=True),
    )
    answers = Answers([event(0, "", "hm[b]"), event(0, "yes")])
    with console.capture() as shown:
        Chat(cast(Mallee, Scripted(answers)), conversation, console, {}).run(iter(["a"]))
    assert "\x1b[2mhm[b]\x1b[0m\nyes" in shown.get()
    assert conversation.messages(conversation.current, "b")[1] == {
        "role": "assistant", "content": "yes", "reasoning_content": "hm[b]",
    }  # fmt: skip


def test_an_interrupted_fork_keeps_what_came_and_the_conversation() -> None:
    conversation, console = Conversation(), Console(width=60)
    answers = Answers([event(1, "B"), event(0, "A")], interrupted=True)
    with console.capture() as shown:
        Chat(cast(Mallee, Scripted(answers)), conversation, console, {}).run(iter(["/fork 2 a"]))
    assert [turn.answer for turn in conversation.turns[1:]] == ["A", "B"]
    assert "(stopped)" in shown.get()
    assert answers.is_closed
