"""`examples/self_repair.py`: its tree frame by frame, and whole runs over a tiny model."""

import io
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from examples import self_repair
from examples.self_repair import (
    CODE,
    STRATEGIES,
    TESTS,
    Attempt,
    Proposal,
    Repair,
    code_of,
    draw,
    repair,
)
from mallee.client import AsyncMallee
from support.repairs import GOOD, MODEL
from support.tiny_fleet import tiny_api
from support.waiting import elapse, until

GOLDEN = Path(__file__).with_name("golden_repair_frames.txt")

REASONS = {
    GOOD: "",
    GOOD.replace("~half", "half"): "test_even: AssertionError: 3.0 != 2.5",
    "def median(values:": "SyntaxError: '(' was never closed",
    CODE: "test_empty: IndexError",
}


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of candidates end as a table says, without the sandbox's process."""

    async def fault_of(code: str, tests: str) -> str:
        await elapse(0.001)
        return REASONS[code]

    monkeypatch.setattr(self_repair, "fault_of", fault_of)


def test_code_is_found_in_an_answer() -> None:
    assert code_of("x = 1\n```\nThat is all.") == "x = 1\n"
    assert code_of("Here it is:\n```python\nx = 1\n```\nThat is all.") == "x = 1\n"
    assert code_of("x = 1") == "x = 1"


FRAMES = [
    [Attempt("smallest change"), Attempt("anew")],
    [
        Attempt("smallest change", "def median(values):\n    ordered = so", "writing"),
        Attempt("anew", "Sure:\n```python\ndef median(values):\n    if not values:\n", "writing"),
    ],
    [
        Attempt("smallest change", CODE, "failed", "test_even: AssertionError: 3 != 2.5"),
        Attempt("anew", GOOD, "testing"),
        Attempt(
            "library", f"import statistics\n\n\ndef median(v):\n    x = {'1 + ' * 40}1", "writing"
        ),
    ],
    [
        Attempt("smallest change", CODE, "failed", "test_even: AssertionError: 3 != 2.5"),
        Attempt("anew", GOOD, "passed"),
        Attempt("library", "import statistics\n", "pruned"),
    ],
]


def test_frames_are_drawn_as_before() -> None:
    """D34, part: a snapshot of the renderer: all states, reasons, and the ends of long texts.

    To make it anew: PYTHONPATH=src:tests:. python tests/examples/test_self_repair.py
    """
    assert frames() == GOLDEN.read_text()


def frames() -> str:
    console = Console(file=io.StringIO(), record=True, width=72, color_system=None)
    for attempts in FRAMES:
        console.print(draw("prompt of 300 tokens", attempts))
    return console.export_text()


class OneAfterTheOthers:
    """Proposes codes as the model's text grows: branch 0's once three have failed, branch 4's never ends."""

    codes: Sequence[str] = (*REASONS, GOOD)

    def __init__(self) -> None:
        self.agent: Repair | None = None

    def __call__(self, index: int, text: str, is_over: bool) -> Proposal:
        assert self.agent is not None
        num_failed = sum(each.state == "failed" for each in self.agent.attempts)
        is_due = index in (1, 2, 3) or (index == 0 and num_failed == 3)
        is_whole = is_over or (is_due and len(text) >= len(self.codes[index]))
        return Proposal(self.codes[index][: None if is_whole else len(text)], is_whole)


async def test_one_branch_passes_the_others_fail_or_are_pruned(tested: None) -> None:
    """D34: five branches over one prefill, tested while others are written; the winner ends the rest."""
    frames: list[str] = []
    propose = OneAfterTheOthers()

    def show(attempts: Sequence[Attempt]) -> None:
        frames.append(" ".join(each.state for each in attempts))

    async with tiny_api(MODEL, 1, num_blocks=20_000) as (http, fleet):
        async with AsyncMallee(str(http.base_url)) as client, client.session() as session:
            capsule = await session.prefill("Mend this.")
            agent = propose.agent = Repair(capsule, TESTS, propose, show=show)
            winner = await agent.run(max_tokens=12_000, seed=1)
            (engine,) = fleet.engines.values()
            await until(lambda: not engine.branches)
            assert winner is agent.attempts[0]
            drawn = engine.stats().num_output_tokens
            left = [each.id async for each in client.capsules() if each.id != capsule.id]
            assert left == []
        assert capsule.prefill_tokens == capsule.tokens
        suffixes = [self_repair.SUFFIX.format(instruction=each) for each in STRATEGIES.values()]
        assert engine.stats().num_prefill_tokens == capsule.tokens + sum(map(len, suffixes))
        assert engine.stats().capsules.kept == 0
    assert drawn < 5 * 12_000
    assert [each.state for each in agent.attempts] == ["passed", *["failed"] * 3, "pruned"]
    assert [each.reason for each in agent.attempts[1:4]] == [*list(REASONS.values())[1:]]
    assert frames[0].split() == ["writing", *["waiting"] * 4]
    assert any("testing" in frame and "writing" in frame for frame in frames)


async def test_the_tree_is_drawn_live_in_a_terminal(tested: None) -> None:
    """D34, part: without a screen, frames go to a file as to a terminal."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, height=40)
    async with tiny_api(MODEL, 1, num_blocks=8192) as (http, _):
        script = self_repair.scripted([GOOD, CODE, CODE, CODE, CODE])
        found = await repair(
            *(str(http.base_url), CODE, TESTS),
            console=console,
            propose=script,
            max_tokens=400,
            seed=1,
        )
    assert found == GOOD
    assert out.getvalue().count("smallest change") > 2
    assert "of them computed; passed: smallest change" in out.getvalue()
    assert GOOD in out.getvalue()


if __name__ == "__main__":
    GOLDEN.write_text(frames())
