"""The README's example, run verbatim against the service that `mallee serve` starts."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mallee.actors.config import AppConfig
from mallee.protocol.errors import ModelError
from mallee.worker.model.loading.source import resolve_model
from support.serving import serving

pytestmark = [
    pytest.mark.process,
    pytest.mark.ray,
    pytest.mark.nats,
    pytest.mark.model,
    pytest.mark.slow,
]

ROOT = Path(__file__).resolve().parent.parent
URL = "http://127.0.0.1:8000"


@pytest.fixture
def service() -> Iterator[str]:
    """URL of a running service with one worker of the demo's model."""
    try:
        resolve_model("smollm2")
    except ModelError as error:
        pytest.skip(str(error))
    with serving(AppConfig(model="smollm2")) as url:
        yield url


def test_the_readmes_example_runs_verbatim(service: str) -> None:
    """D40, part: only the port is another. It prints texts, then a line a branch."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 12
    assert code.count(URL) == 1
    done = subprocess.run(
        [sys.executable, "-c", code.replace(URL, service)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert {line[:2] for line in lines} >= {"0 ", "1 "}
    ends = [line.split() for line in lines if line.startswith("w0 ")]
    assert len(ends) == 2
    for _, cached, computed, ttft_ms in ends:
        assert int(cached) > 2000
        assert int(computed) < 20
        assert float(ttft_ms) > 0
