"""The check of a GPU and its tests, where nothing is installed but what computing a model needs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
SERVING = (
    *("ray", "nats", "starlette", "pydantic", "openai", "textual", "uvicorn", "httpx", "httpx2"),
    *("greenlet", "prometheus_client", "opentelemetry"),
)
BLOCK = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {SERVING!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
import importlib.util
real = importlib.util.find_spec
def find_spec(name, package=None):
    return None if name.partition(".")[0] in {SERVING!r} else real(name, package)
importlib.util.find_spec = find_spec
"""


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python code in a process that can import nothing of SERVING."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "src", ROOT / "tests")))
    return subprocess.run(
        [sys.executable, "-c", BLOCK + program, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_the_check_runs_where_serving_is_not_installed(tmp_path: Path) -> None:
    """X29, part: one bench of tiny shapes on this CPU; its row is in the file."""
    out = tmp_path / "found.json"
    program = "from bench.gpu_check import main; sys.exit(main())"
    arguments = ["--tiny", "--device", "cpu", "--no-tests", "--only", "draws", "--out", str(out)]
    done = run(program, *arguments)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(out.read_text())["rows"]
    assert row["name"] == "draws"
    assert row["measured"] > 0


def test_tests_marked_gpu_are_collected_where_serving_is_not_installed() -> None:
    """X29, part: all of them; other files aren't imported."""
    program = "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    arguments = ["tests", "-m", "gpu", "--collect-only", "-p", "no:cacheprovider"]
    done = run(program, *arguments, "-p", "pytest_timeout", "-p", "anyio.pytest_plugin")
    assert done.returncode == 0, done.stdout + done.stderr
    found = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests" / "worker").rglob("test_*.py")
        if "pytest.mark.gpu" in path.read_text()
    }
    assert found == marked
    assert len(marked) >= 5
