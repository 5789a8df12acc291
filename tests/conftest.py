"""Options of the whole suite."""

import atexit
import gc
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from support.lanes import LANDING, has_gpu_tests, is_in_real_time, lane_of
from support.processor_time import pytest_pyfunc_call  # noqa: F401 (a hook)

# A machine with a GPU may have no more than the tests marked `gpu` need: none of these has coroutines.
HAS_VIRTUAL_TIME = all(find_spec(name) is not None for name in ("greenlet", "httpx", "httpx2"))
if HAS_VIRTUAL_TIME:
    from support.virtual import threads

    threads.install()  # before anything that keeps a function of `time` is imported

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores; before torch is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Without a GPU our Triton kernels are interpreted: it has to know before any package imports it.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# gRPC's handlers of forks may end a child that is about to become another program.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# What services store is not the user's, and goes with the tests.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="mallee-state-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

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


def pytest_configure(config: pytest.Config) -> None:
    """On a device warnings of CUDA's packages, which change with it, are shown and no faults."""
    if str(config.getoption("markexpr")) == "gpu":
        config.addinivalue_line("filterwarnings", "default")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Don't import files of other lanes, where one lane is asked for: their imports take half a minute.

    The same for `-m gpu`, where what the other files import may not be installed.
    """
    asked = str(config.getoption("markexpr"))
    if asked == "gpu":
        return None if has_gpu_tests(collection_path) else True
    lane = "landing" if asked.startswith(LANDING) else _LANES.get(asked)
    if lane is None or not collection_path.name.startswith("test_"):
        return None
    return None if lane_of(collection_path) == lane else True


def pytest_collection_finish() -> None:
    """Leave what is loaded by now out of garbage collections: each replay runs a full one."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    """Loggers as they were, afterwards: a command that runs in this process sets them up for good."""
    root, ours = logging.getLogger(), logging.getLogger("mallee")
    handlers, levels = list(root.handlers), (root.level, ours.level)
    yield
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


@pytest.fixture(scope="module")
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, object]]:
    """The event loop of `async def` tests and fixtures: in virtual time, but for files marked otherwise."""
    if is_in_real_time(Path(request.path)):
        return "asyncio", {}
    assert HAS_VIRTUAL_TIME, "tests with coroutines need greenlet, httpx and httpx2: make setup"
    from support.virtual.loop import VirtualLoop

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
