"""The README's example, run verbatim against the service that `mallee serve` starts."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mallee.protocol.errors import ModelError
from mallee.worker.model.loading.source import resolve_model

pytestmark = [
    pytest.mark.alone,
    pytest.mark.ray,
    pytest.mark.nats,
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray's own pipes and sockets
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

ROOT = Path(__file__).resolve().parent.parent
URL = "http://127.0.0.1:8000"


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of a running service with one worker of the demo's model."""
    try:
        resolve_model("smollm2")
    except ModelError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    from mallee.actors.bus.broker import free_port
    from mallee.actors.config import AppConfig
    from mallee.actors.local import LocalStack

    with LocalStack(AppConfig(model="smollm2"), port=free_port()) as stack:
        yield stack.base_url


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
