"""Options of the whole suite."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from support.lanes import LANDING, is_in_real_time, lane_of
from support.processor_time import pytest_pyfunc_call  # noqa: F401 (a hook)
from support.virtual import threads
from support.virtual.loop import VirtualLoop

threads.install()  # before anything that keeps a function of `time` is imported

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores; before torch is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Without a GPU our Triton kernels are interpreted: it has to know before any package imports it.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# gRPC's handlers of forks may end a child that is about to become another program.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# Ray's own processes start slowly where the machine is busy; after 30 s it would give up.
os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")

_LANES = {"process": "nightly", "smoke": "smoke"}  # by the expression that asks for them

settings.register_profile(
    "all", deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.register_profile(
    "landing",
    settings.get_profile("all"),
    max_examples=30,
    derandomize=True,
    database=None,
    print_blob=True,
)
settings.register_profile("quick", settings.get_profile("landing"), max_examples=10)
settings.register_profile("nightly", settings.get_profile("all"), max_examples=100, print_blob=True)
settings.register_profile("stories", settings.get_profile("nightly"), max_examples=500)
settings.register_profile("long", settings.get_profile("all"), max_examples=2000)
settings.load_profile("landing")  # or as --hypothesis-profile says


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where model tests compute: cpu, cuda, cuda:1")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Don't import files of other lanes, where one lane is asked for: their imports take half a minute."""
    asked = str(config.getoption("markexpr"))
    lane = "landing" if asked.startswith(LANDING) else _LANES.get(asked)
    if lane is None or not collection_path.name.startswith("test_"):
        return None
    return None if lane_of(collection_path) == lane else True


def pytest_collection_finish() -> None:
    """Leave what is loaded by now out of garbage collections: each replay runs a full one."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, object]]:
    """The event loop of `async def` tests and fixtures: in virtual time, but for files marked otherwise."""
    if is_in_real_time(Path(request.path)):
        return "asyncio", {}
    threads.step_engines()
    return "asyncio", {"loop_factory": VirtualLoop}


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The torch device of model tests; skips where it is not at hand."""
    name = str(request.config.getoption("--device"))
    if name.split(":")[0] == "cuda":
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip(f"--device {name}: no CUDA device here")
    return name


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch computes in one thread."""
    from support.torch_threads import torch_threads  # torch is only loaded where it is used

    with torch_threads():
        yield


@pytest.fixture
def small_window_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools of sliding windows have hardly more blocks than one row needs, so that they run out."""
    from mallee.protocol import model

    monkeypatch.setattr(model, "MIN_WINDOW_BLOCKS", 1)
    monkeypatch.setattr(model, "WINDOW_SHARE", 1000)
