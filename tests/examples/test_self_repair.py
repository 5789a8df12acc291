"""`examples/self_repair.py`: its sandbox, its tree frame by frame, and whole runs over a tiny model."""

import io
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from anyio.to_thread import run_sync
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
    fault_of,
    main,
    repair,
)
from mallee.client import AsyncMallee
from mallee.testing.random_model import random_model
from support.tiny_fleet import tiny_api
from support.waiting import until

GOLDEN = Path(__file__).with_name("golden_repair_frames.txt")
MODEL = random_model("llama", 5, max_position_embeddings=16384, eos_token_id=None)

GOOD = """\
def median(values):
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values")
    half = len(ordered) // 2
    return (ordered[half] + ordered[~half]) / 2
"""
LOOP = "def median(values):\n    while True:\n        pass\n"
FAULTS = {
    CODE: "test_empty: IndexError: list index out of range",
    GOOD.replace("~half", "half"): "test_even: AssertionError: 3.0 != 2.5",
    LOOP: "more than 1 s of processor time",
    "import numpy": "ModuleNotFoundError: No module named 'numpy'",
    "def median(values:": "SyntaxError: '(' was never closed (candidate, line 1)",
    "values = 'a' * (1 << 30)": "MemoryError: ",
    "open('a', 'w').write('a' * 100_000)": "OSError: [Errno 27] File too large",
    "open('OUTSIDE', 'w')": "PermissionError: a write outside its folder is refused: OUTSIDE",
    "import os; os.remove('OUTSIDE')": "PermissionError: os.remove is refused",
    "import os; os.fork()": "PermissionError: os.fork is refused",
    "import socket; socket.socket()": "PermissionError: socket.__new__ is refused",
    "import os; os.abort()": "ended by SIGABRT",
    "import os; os._exit(0)": "ended before its tests",
    "raise SystemExit(0)": "SystemExit: 0",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The place of temporary folders: at the end none is left, and no process of ours."""
    made = tmp_path / "temporary"
    made.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(made))
    monkeypatch.setattr(self_repair, "WALL_S", 60.0)  # a busy machine takes long over a second
    before = set(psutil.Process().children(recursive=True))
    yield made
    assert not list(made.iterdir())
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.mark.parametrize("code", FAULTS)
async def test_a_candidate_fails_by_its_own_reason(code: str, folder: Path, tmp_path: Path) -> None:
    """D34, part: errors, endless loops, memory, files and programs; nothing outlives its test."""
    outside = tmp_path / "precious"
    outside.write_text("kept")
    fault = await fault_of(code.replace("OUTSIDE", str(outside)), TESTS)
    assert fault.strip() == FAULTS[code].replace("OUTSIDE", str(outside)).strip()
    assert outside.read_text() == "kept"


async def test_one_that_sleeps_is_killed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D34, part: by the time limit, as it takes no processor time."""
    monkeypatch.setattr(self_repair, "WALL_S", 0.5)
    assert await fault_of("import time; time.sleep(60)", TESTS) == "no end within 0.5 s"


async def test_code_that_is_right_passes_and_sees_no_environment(folder: Path) -> None:
    """D34, part: it may use the standard library, print, and write in its folder."""
    lines = "import os, statistics\nassert not os.environ.get('HOME')\nprint('hello')\n"
    assert await fault_of(lines + "open('notes', 'w').write('a')\n" + GOOD, TESTS) == ""


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

    codes: Sequence[str] = (GOOD, GOOD.replace("~half", "half"), LOOP, "def median(values:", GOOD)

    def __init__(self) -> None:
        self.agent: Repair | None = None

    def __call__(self, index: int, text: str, is_over: bool) -> Proposal:
        assert self.agent is not None
        num_failed = sum(each.state == "failed" for each in self.agent.attempts)
        is_due = index in (1, 2, 3) or (index == 0 and num_failed == 3)
        is_whole = is_over or (is_due and len(text) >= len(self.codes[index]))
        return Proposal(self.codes[index][: None if is_whole else len(text)], is_whole)


async def test_one_branch_passes_the_others_fail_or_are_pruned(folder: Path) -> None:
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
            left = [each.capsule for each in await client.capsules() if each.id != capsule.id]
            assert left == []
        assert capsule.prefill_tokens == capsule.tokens
        suffixes = [self_repair.SUFFIX.format(instruction=each) for each in STRATEGIES.values()]
        assert engine.stats().num_prefill_tokens == capsule.tokens + sum(map(len, suffixes))
        assert engine.stats().capsules.kept == 0
    assert drawn < 5 * 12_000
    assert [each.state for each in agent.attempts] == ["passed", *["failed"] * 3, "pruned"]
    assert [each.reason for each in agent.attempts[1:4]] == [
        "test_even: AssertionError: 3.0 != 2.5",
        "more than 1 s of processor time",
        "SyntaxError: '(' was never closed (candidate, line 1)",
    ]
    assert frames[0].split() == ["writing", *["waiting"] * 4]
    assert any("testing" in frame and "writing" in frame for frame in frames)


async def test_the_example_runs_with_a_script(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """D34, part: the whole command, whose lines end with the code; without a script nothing passes."""
    script = tmp_path / "script.json"
    script.write_text(json.dumps([GOOD, "x = 1", "x = 1", "x = 1", GOOD + "# " + "-" * 3000]))
    async with tiny_api(MODEL, 1, num_blocks=8192) as (http, fleet):
        asked = ["--url", str(http.base_url), "--seed", "1"]
        assert await run_sync(main, [*asked, "--tokens", "2000", "--scripted", str(script)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert await run_sync(main, [*asked, "--tokens", "8"]) == 1
        (engine,) = fleet.engines.values()
        await until(lambda: not engine.branches and not engine.stats().capsules.kept)
    assert "smallest change  passed" in lines
    assert "passed: smallest change" in lines[-len(GOOD.splitlines()) - 2]
    assert lines[-len(GOOD.splitlines()) - 1 : -1] == GOOD.splitlines()
    assert capsys.readouterr().out.endswith("no strategy passed\n")


async def test_the_tree_is_drawn_live_in_a_terminal(folder: Path) -> None:
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
