"""Modules that importing a part of the package loads: each part in a fresh process."""

import subprocess
import sys

import pytest

from support.imports import HEAVY, ROOT, linked, module_of

pytestmark = pytest.mark.smoke

CORE = (
    *("protocol", "router", "worker.kv", "worker.sched", "worker.engine", "worker.storage"),
    *("sessions", "mocker", "graphs", "synth", "search"),
)
SHELLS = {"search.runner"}  # beside the core that they drive by asyncio


def core_modules() -> list[str]:
    """Names within `mallee` of all modules of `CORE`."""
    packages = linked()
    paths = (path for package in packages for path in sorted((ROOT / package).rglob("*.py")))
    modules = (
        module_of(str(path.relative_to(ROOT)), packages).removeprefix("mallee.")
        for path in paths
        if path.name != "__main__.py"
    )
    found = {n for n in modules if any(n == part or n.startswith(part + ".") for part in CORE)}
    return sorted(found - SHELLS)


def loaded_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(' '.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.split())


def test_the_core_loads_no_torch_ray_or_networking() -> None:
    """D13, part: every module of the core can be imported without ray, nats, asyncio or torch."""
    names = core_modules()
    assert len(names) > 100
    loaded = loaded_after("\n".join(f"import mallee.{name}" for name in names))
    assert not loaded & {*HEAVY, "asyncio"}


def test_planning_and_forks_load_no_sockets() -> None:
    """D13, part: nor does the engine load numba, which brings the socket module with it."""
    names = ("protocol.messages", "worker.engine", "mocker.engine", "synth")
    loaded = loaded_after("\n".join(f"import mallee.{name}" for name in names))
    assert not loaded & {"socket", "numba"}


def test_the_client_is_cheap_to_import() -> None:
    """`import mallee.client` takes less than 150 ms and loads no torch, ray, numba or numpy."""
    loaded = loaded_after("import mallee.client")
    assert not loaded & {"torch", "ray", "numba", "numpy", "nats", "fastapi", "transformers"}
    clock = "time.process_time()"  # which other processes don't advance
    code = f"import time; t = {clock}; import mallee.client; print({clock} - t)"
    times = [
        float(subprocess.check_output([sys.executable, "-c", code], timeout=60)) for _ in range(5)
    ]
    assert min(times) < 0.150
