"""Options of the whole suite."""

import os

import pytest
from hypothesis import settings

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores; before torch is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("long", deadline=None, max_examples=2000)
settings.load_profile("dev")  # or as --hypothesis-profile says


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where model tests compute: cpu, cuda, cuda:1")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The event loop that runs `async def` tests and fixtures."""
    return "asyncio"


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The torch device of model tests; skips where it is not at hand."""
    name = str(request.config.getoption("--device"))
    if name.split(":")[0] == "cuda":
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip(f"--device {name}: no CUDA device here")
    return name
