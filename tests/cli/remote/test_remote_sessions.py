"""`mallee sessions` at a running service."""

from typing import Any

import pytest
from rich.console import Console

from mallee.cli.remote.forest import MAX_DEPTH, drawn
from mallee.cli.remote.watching import watch
from mallee.client.sessions import SessionNode, SessionTree
from mallee.protocol.errors import ConfigError


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


def test_sessions_stand_below_their_parents_and_new_capsules_in_bold() -> None:
    old = session("a", ("c1", None), ("c2", "c1"))
    now = [
        session("a", ("c1", None), ("c2", "c1"), ("c3", "c1"), children=["b", "z"], running=2),
        session("b", ("c4", None), parent="a"),
        session("[red]x", parent="gone"),
    ]
    assert text(drawn(now, [old])) == [
        "a  2 running",
        "├── c1  7 tokens, held, 2 branches",
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
    assert text(drawn(loop)) == ["a, below b", "b, below a", "└── c"]
    assert text(drawn([session("a", parent="a")])) == ["a"]


def test_a_run_of_capsules_stays_in_its_column_and_forks_are_indented() -> None:
    nodes = [("c1", None), ("c2", "c1"), ("c3", "c2"), ("c4", "c2"), ("c5", "c4"), ("c6", None)]
    assert text(drawn([session("a", *nodes)])) == [
        "a",
        "├── c1  7 tokens, held",
        "├── ↓ c2  7 tokens, held, 2 branches",
        "│   ├── c3  7 tokens, held",
        "│   ├── c4  7 tokens, held",
        "│   └── ↓ c5  7 tokens, held",
        "└── c6  7 tokens, held",
    ]


def test_what_lies_too_deep_names_what_it_is_below() -> None:
    """Nothing is left out, whatever the depth of forks and of sessions."""
    comb = [("c0", None)]
    for depth in range(60):
        comb += [(f"c{depth + 1}", f"c{depth}"), (f"x{depth}", f"c{depth}")]
    lines = text(drawn([session("a", *comb)]))
    assert len(lines) == 1 + len(comb)
    assert max(line.index("── ") for line in lines[1:]) <= 4 * MAX_DEPTH
    below = [line.split("── ")[1] for line in lines if "below" in line]
    assert below[0] == "below c11: c12  7 tokens, held, 2 branches"
    assert len(below) == 2 * (60 - MAX_DEPTH + 1)
    chain = [session(f"s{i:02}", parent=f"s{i - 1:02}" if i else None) for i in range(60)]
    lines = text(drawn(chain))
    assert [line for line in lines if "─" not in line] == [
        "s00", "s12, below s11", "s24, below s23", "s36, below s35", "s48, below s47"
    ]  # fmt: skip
    assert len(lines) == 60


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
