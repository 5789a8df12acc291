"""`mallee sessions` and `mallee top`: what they draw of given answers."""

from typing import Any

import msgspec
import pytest
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from mallee.cli.main import cli
from mallee.cli.remote.fleet import Metrics, Sample, draw
from mallee.cli.remote.forest import MAX_DEPTH, drawn
from mallee.cli.remote.watching import watch
from mallee.client import ConnectionFailed, InvalidParameter, SessionNode, SessionTree, Worker
from mallee.protocol.errors import ConfigError
from mallee.runtime.addresses import free_port
from support.scripted_service import worker


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
            worker=None,
        )
        for capsule, parent in nodes
    ]
    given = {"parent": None, "children": [], "running": 0, "budget": None, **more}
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


# `mallee top` of given answers, and services that are not there


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


def sample(at: float, tokens: float, active: int = 0, gateway: str = "g0") -> Sample:
    given = worker("w0", device="NVIDIA H100", active_blocks=active, use=None, tiers=None)
    health = {"status": "degraded", "gateway": gateway, "broker": "down", "workers": [{}]}
    metrics = f'mallee_output_tokens_total{{gateway="{gateway}"}} {tokens}'
    return Sample.of(at, health, [msgspec.convert(given, Worker)], metrics)


def test_speeds_are_of_the_time_between_two_looks() -> None:
    before, now = sample(10.0, 100.0), sample(12.0, 400.0, active=95)
    assert now.rates(before)["output tokens/s"] == 150.0
    assert sample(14.0, 5.0).rates(now)["output tokens/s"] == 0.0  # the gateway began anew
    assert now.rates(None) == {}
    assert now.rates(sample(11.0, 100.0, gateway="g1")) == {}  # another's counters
    console = Console(width=100)
    with console.capture() as shown:
        console.print(draw(now, now.rates(before)))
    lines = shown.get().splitlines()
    assert "mallee degraded  gateway g0, broker down, 1 workers" in lines[0]
    assert "output tokens/s 150" in lines[1]
    assert lines[3].split() == [
        *("w0", "ready", "██████████", "95%", "3", "1", "5", "9", "0.5", "s", "base"),
        *("NVIDIA", "H100"),
    ]


@pytest.mark.parametrize("command", ["top", "explain", "workers", "chat"])
def test_a_service_that_is_not_there_is_told_at_once(command: str) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    answer = run(command, "--url", url)
    assert isinstance(answer.exception, ConnectionFailed)
    assert url in str(answer.exception)
    assert isinstance(run("chat", "--url", "127.0.0.1:80").exception, InvalidParameter)


def test_counters_are_summed_and_answers_are_those_that_generate() -> None:
    """Its own looks at the service, and capsules that are read, are none."""
    paths = {
        "/health": 50, "/metrics": 50, "/v1/router/workers": 50, "/v1/capsules/{capsule}": 9,
        "/v1/completions": 1, "/v1/chat/completions": 2, "/v1/capsules/{capsule}/fork": 3,
        "/v1/capsules/{capsule}/restore": 4,
    }  # fmt: skip
    lines = [
        f'mallee_http_answers_total{{endpoint="{path}",status="200"}} {num}'
        for path, num in paths.items()
    ]
    found = Metrics(
        "\n".join([*lines, 'mallee_capsules{gateway="g0",worker="w0"} 5', "mallee_x 1"])
    )
    totals = [
        found.total(f"mallee_{name}") for name in ("http_answers_total", "capsules", "x", "y")
    ]
    assert totals == [10.0, 5.0, 1.0, 0.0]
    assert found.gateway == "g0"
