"""`examples/self_repair.py`: its sandbox, which is a process, and the whole command."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from anyio.to_thread import run_sync

from examples import self_repair
from examples.self_repair import CODE, TESTS, fault_of, main
from support.repairs import GOOD, MODEL
from support.tiny_fleet import tiny_api
from support.waiting import until

pytestmark = pytest.mark.process


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
