"""`mallee sessions` at a running service."""

import json
from typing import Any

import pytest
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from mallee.cli.main import cli
from mallee.cli.remote.remote_sessions import drawn
from mallee.cli.remote.watching import watch
from mallee.client import Mallee, NotFound
from mallee.client.sessions import SessionNode, SessionTree
from mallee.protocol.errors import ConfigError


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


def text(shown: Any) -> list[str]:
    console = Console(width=100)
    with console.capture() as captured:
        console.print(shown)
    return [line.rstrip() for line in captured.get().splitlines()]


def session(name: str, *nodes: tuple[str, str | None], **more: Any) -> SessionTree:
    """One of the nodes (capsule, parent)."""
    made = [
        SessionNode(
            capsule=capsule,
            parent=parent,
            request="r",
            tokens=7,
            created=1,
            is_root=False,
            held=True,
        )
        for capsule, parent in nodes
    ]
    given = {"parent": None, "children": [], "running": 0, **more}
    return SessionTree(id=name, created=1, last_used=1, capsules=len(made), nodes=made, **given)


@pytest.mark.nats
def test_sessions_are_listed_shown_and_closed(url: str, client: Mallee) -> None:
    (first,) = client.complete("a tree", max_tokens=2, mallee={"session": "bug-7"})
    (second,) = client.complete("a tree", max_tokens=2, mallee={"session": "bug-8"})
    client.fork_session("bug-7", "bug-7b")
    listed = run("sessions", "list", "--url", url).stdout.splitlines()
    assert [line.split() for line in listed[1:]] == [
        ["bug-7", "1", "0"], ["bug-7b", "bug-7", "1", "0"], ["bug-8", "1", "0"]
    ]  # fmt: skip
    one = run("sessions", "show", "bug-7b", "--url", url).stdout.splitlines()
    assert one[0] == "bug-7b, below bug-7"
    everything = run("sessions", "show", "--url", url).stdout
    assert everything.splitlines()[0] == "bug-7"
    assert str(first.capsule) in everything
    assert str(second.capsule) in everything
    # The terminal is none here: one look is all.
    assert run("sessions", "show", "--live", "--url", url).stdout == everything
    body = json.loads(run("sessions", "show", "--url", url, "--json").stdout)
    assert [each["id"] for each in body["sessions"]] == ["bug-7", "bug-7b", "bug-8"]
    for name in ("bug-7", "bug-7b", "bug-8"):
        assert "released" in run("sessions", "close", name, "--url", url).stdout
    assert "no session" in run("sessions", "show", "--url", url).stdout
    missing = run("sessions", "show", "bug-7", "--url", url).exception
    assert isinstance(missing, NotFound)


def test_sessions_stand_below_their_parents_and_new_capsules_in_bold() -> None:
    old = session("a", ("c1", None), ("c2", "c1"))
    now = [
        session("a", ("c1", None), ("c2", "c1"), ("c3", "c1"), children=["b", "z"], running=2),
        session("b", ("c4", None), parent="a"),
        session("[red]x", parent="gone"),
    ]
    assert text(drawn(now, [old])) == [
        "a  2 running",
        "├── c1  7 tokens, held",
        "│   ├── c2  7 tokens, held",
        "│   └── c3  7 tokens, held",
        "├── session z",
        "└── b",
        "    └── c4  7 tokens, held",
        "[red]x, below gone",
    ]
    console = Console(width=100, force_terminal=True)
    with console.capture() as captured:
        console.print(drawn(now, [old]))
    bold = [line for line in captured.get().splitlines() if "\x1b[1m" in line]
    assert len(bold) == 2
    assert "c3" in bold[0]
    assert "c4" in bold[1]


def test_sessions_that_name_each_other_as_parents_are_all_shown() -> None:
    loop = [session("a", parent="b"), session("b", parent="a"), session("c", parent="b")]
    assert text(drawn(loop)) == ["a", "b", "└── c"]
    assert text(drawn([session("a", parent="a")])) == ["a"]


def test_a_service_is_looked_at_until_the_watcher_leaves() -> None:
    """A look that fails is told, and the next is tried."""
    looks: list[int | Exception] = [1, 2, ConfigError("no service answers"), 3]
    drawings: list[tuple[int, int | None]] = []

    def take() -> int:
        look = looks.pop(0)
        if isinstance(look, Exception):
            raise look
        return look

    def draw(now: int, before: int | None) -> str:
        drawings.append((now, before))
        return f"look {now}"

    def sleep(seconds: float) -> None:
        assert seconds == 0.5
        if not looks:
            raise KeyboardInterrupt

    console = Console(width=80, force_terminal=True)
    with console.capture() as captured:
        watch(take, draw, 0.5, console, sleep=sleep)
    assert drawings == [(1, None), (2, 1), (2, None), (3, 2)]
    assert "no service answers" in captured.get()
    looks[:] = [ConfigError("no service answers")]
    with pytest.raises(ConfigError, match="no service answers"):
        watch(take, draw, 0.5, console, sleep=sleep)
