"""`mallee chat`: a conversation that branches."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from mallee.actors.addresses import free_port
from mallee.cli.main import cli
from mallee.cli.remote.chat import Chat, Conversation
from mallee.client import Branch, BranchEvent, ConnectionFailed, InvalidParameter, Mallee


def talk(url: str, *lines: str, options: tuple[str, ...] = ()) -> Result:
    command = ["chat", "--url", url, "--max-tokens", "6", *options]
    return CliRunner().invoke(cli, command, input="\n".join(lines) + "\n")


@pytest.mark.nats
def test_a_conversation_branches_and_is_drawn(url: str) -> None:
    """Turns, forks, ways back, the tree; a question goes on from where it is asked."""
    answer = talk(url, "one", "/fork 2 two", "/go 1", "three", "/back 9", "four", "/tree", "/quit")
    assert answer.exit_code == 0, answer.output
    lines = answer.stdout.splitlines()
    tree = lines[lines.index("conversation") :]
    shape = [
        (len(line) - len(line.lstrip("│├└─ ")), line.lstrip("│├└─ ").split(" → ")[0])
        for line in tree[1:]
    ]
    assert shape == [
        *[(4, "1  one"), (8, "2  two"), (8, "3  two"), (8, "4  three"), (4, "5  four")]
    ]
    assert tree[5].endswith("◀")
    assert sum("◀" in line for line in tree) == 1
    assert "turn 1, 6 tokens, 0 cached" in answer.stdout
    forks = [line for line in lines if "computed" in line and line.startswith(("├", "└"))]
    assert [line.split()[-3:-1] for line in forks][1] == ["computed", "0"]  # the second shares all


@pytest.mark.nats
def test_the_same_seed_gives_the_same_answer_again(url: str) -> None:
    asked = ("tell", "/back", "tell", "/fork 2", "/tree")
    lines = talk(url, *asked, options=("--seed", "7", "--temperature", "1")).stdout.splitlines()
    tree = lines[lines.index("conversation") + 1 :]
    said = [line.split(" → ")[1].removesuffix(" ◀") for line in tree]
    assert len(said) == 4
    assert said[0] == said[1] == said[2]  # branch 0 of a fork draws as one alone
    assert said[3] != said[2]


@pytest.mark.nats
def test_mistakes_are_told_and_the_conversation_goes_on(url: str) -> None:
    answer = talk(
        url, "/fork 2", "/fork x", "/fork 99 hi", "/go 7", "/back x", "/what", "hi", "/help"
    )
    for told in (
        "there is no question yet",
        "/fork x: give a number",
        "/fork 99: give a number",
        "/go 7: give a turn, 0 to 0",
        "/back x: give a number",
        "/what: no such command",
    ):
        assert told in answer.stderr
    assert "turn 1, 6 tokens" in answer.stdout
    assert "/fork N [TEXT]" in answer.stdout
    too_long = talk(url, "a " * 5000, "hi")
    assert "tokens that this model serves" in " ".join(too_long.stderr.split())
    assert "turn 1, 6 tokens" in too_long.stdout


def test_a_service_that_is_not_there_is_told_at_once() -> None:
    answer = talk(f"http://127.0.0.1:{free_port()}", "hi")
    assert isinstance(answer.exception, ConnectionFailed)
    assert isinstance(talk("127.0.0.1:80", "hi").exception, InvalidParameter)


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

    def __iter__(self) -> Iterator[BranchEvent]:
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
