"""The arrows between folders (docs: architecture) and what each floor may load."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "protocol",
    "traces",
    "figures",
    "router",
    "worker",
    "mocker",
    "synth",
    "client",
    "actors",
    "cli",
)

# What modules whose name starts with the key may import of ours. The longest key that fits counts.
ARROWS: dict[str, set[str]] = {
    "protocol": {"protocol"},
    "traces": {"protocol", "traces"},
    "figures": {"protocol", "figures"},
    "router": {"protocol", "router"},
    "worker.kv": {"protocol", "worker.kv"},
    "worker.sched": {"protocol", "worker.kv", "worker.sched"},
    "worker.forward": {"protocol", "worker.kv", "worker.forward"},
    "worker.model": {"protocol", "worker.kv", "worker.forward", "worker.model"},
    "worker": {"protocol", "worker"},  # engine and what belongs to it: never worker.model (below)
    "mocker": {"protocol", "traces", "figures", "worker", "router", "mocker"},
    "synth": {"protocol", "traces", "figures", "synth"},
    "client": {"protocol", "client"},
    "actors": {*PACKAGES, ""} - {"cli"},
    "cli": {*PACKAGES, ""},
}
FORBIDDEN: dict[str, set[str]] = {
    "worker": {"worker.model"},
    "mocker": {"worker.model"},
}
# Third-party packages that whole floors must not name, not even lazily.
HEAVY = {"torch", "transformers", "ray", "nats", "fastapi", "uvicorn", "starlette"}
LIGHT_FLOORS = (
    *("protocol", "traces", "figures", "router", "worker.kv", "worker.sched", "mocker", "synth"),
    "client",
)
TORCH_FREE = (
    "worker.engine",
    "worker.jobs",
    "worker.forward",
    "worker.sampling",
    "worker.intake",
    "worker.records",
    "worker.requests",
    "worker.updates",
    "worker.passes",
)


def modules() -> list[tuple[str, Path]]:
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = list(path.relative_to(ROOT).with_suffix("").parts)
            if parts[-1] == "__init__":
                parts.pop()
            found.append((".".join(parts), path))
    return found


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def starts(name: str, prefix: str) -> bool:
    return prefix == "" or name == prefix or name.startswith(prefix + ".")


def rule(name: str) -> str:
    return max((key for key in ARROWS if starts(name, key)), key=len)


def test_every_module_is_found() -> None:
    assert len(modules()) > 30


@pytest.mark.parametrize(("name", "path"), modules(), ids=[name for name, _ in modules()])
def test_imports_follow_the_arrows(name: str, path: Path) -> None:
    key = rule(name)
    for target in sorted(imports(path)):
        if target == "mallee" or not starts(target, "mallee"):
            continue
        ours = target.removeprefix("mallee.")
        if ours == "__version__":
            continue
        assert any(starts(ours, allowed) for allowed in ARROWS[key]), f"{name} imports {target}"
        banned = FORBIDDEN.get(key, set())
        assert not any(starts(ours, b) for b in banned), f"{name} imports {target}"


@pytest.mark.parametrize(("name", "path"), modules(), ids=[name for name, _ in modules()])
def test_light_floors_never_name_heavy_packages(name: str, path: Path) -> None:
    if not any(starts(name, floor) for floor in (*LIGHT_FLOORS, *TORCH_FREE)):
        return
    tops = {target.split(".")[0] for target in imports(path)}
    assert not tops & HEAVY, f"{name} imports {tops & HEAVY}"


def loaded_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(' '.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "package",
    ["protocol.messages", "router.router", "worker.kv.tree", "worker.sched.scheduler", "mocker.forward",
     "synth", "worker.engine"],
)  # fmt: skip
def test_the_core_loads_no_torch_ray_or_networking(package: str) -> None:
    """D13, part: the engine can be imported and run without ray, nats or fastapi."""
    loaded = loaded_after(f"import mallee.{package}")
    assert not loaded & {"torch", "ray", "nats", "fastapi", "asyncio"}
    assert "numba" in loaded or "socket" not in loaded  # numba loads it, and opens none


def test_the_client_is_cheap_to_import() -> None:
    """`import mallee.client` takes less than 150 ms and loads no torch, ray, numba or numpy."""
    loaded = loaded_after("import mallee.client")
    assert not loaded & {"torch", "ray", "numba", "numpy", "nats", "fastapi", "transformers"}
    code = (
        "import time; t = time.perf_counter(); import mallee.client; print(time.perf_counter() - t)"
    )
    times = [
        float(subprocess.check_output([sys.executable, "-c", code], timeout=60)) for _ in range(5)
    ]
    assert min(times) < 0.150
