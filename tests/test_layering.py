"""The shape of the tree: arrows between packages, full folders, circles, and what each floor may load."""

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from support.imports import HEAVY, ROOT, reached
from support.lanes import is_in_real_time

# What modules whose name starts with the key may import of ours. The longest key that fits counts.
ARROWS: dict[str, set[str]] = {
    "protocol": {"protocol"},
    "traces": {"protocol", "traces"},
    "figures": {"protocol", "figures"},
    "figures.replays": {"protocol", "traces", "mocker", "figures"},
    "router": {"protocol", "router"},
    "worker.kv": {"protocol", "worker.kv"},
    "worker.transfer": {"protocol", "worker.kv", "worker.transfer"},
    "worker.capsules": {"protocol", "worker.kv", "worker.transfer", "worker.capsules"},
    "worker.storage": {"protocol", "worker.storage"},
    "worker.sched": {
        *("protocol", "worker.kv", "worker.transfer", "worker.forward", "worker.sched"),
    },
    "worker.forward": {"protocol", "worker.kv", "worker.forward"},
    "worker.memory": {"protocol", "worker.memory"},
    "worker.gaps": set(),
    "worker.model": {
        *("protocol", "worker.kv", "worker.transfer", "worker.memory", "worker.forward"),
        "worker.gaps",
        "worker.model",
    },
    "worker": {"protocol", "worker"},  # engine and what belongs to it: never worker.model (below)
    "sessions": {"protocol", "worker", "sessions"},
    "mocker": {"protocol", "traces", "worker", "router", "mocker"},
    "synth": {"protocol", "traces", "figures", "synth"},
    "graphs": {"protocol", "graphs"},
    "search": {"protocol", "search"},
    "client": {"protocol", "graphs", "search", "client"},
    "runtime": {"protocol", "runtime"},
    "gateway": {"protocol", "router", "worker", "sessions", "runtime", "gateway"},
    "api": {"protocol", "router", "search", "runtime", "gateway", "api"},
    "actors": {
        *("protocol", "router", "worker", "mocker", "runtime", "gateway", "api", "actors"),
    },
    "testing": {"protocol", "worker", "testing"},
    "testing.nodes": {"protocol", "runtime", "actors", "testing"},
    "cli": {""},
}
FORBIDDEN: dict[str, set[str]] = {
    **{name: {"worker.model"} for name in ("worker", "mocker", "sessions", "gateway")},
    "api": {"runtime.telemetry"},  # it is given what it counts with
    **{name: {"figures.replays"} for name in ("figures", "synth")},
}
PACKAGES = tuple(name for name in dict.fromkeys(key.split(".")[0] for key in ARROWS))

# Rooms of a package by floor: each imports from floors below its own, and from itself.
FLOORS: dict[str, tuple[tuple[str, ...], ...]] = {
    "runtime": (("addresses", "config", "proxy", "tasks"), ("bus", "transport", "telemetry")),
    "actors": (
        ("autoscaling", "cluster", "kv_transfer"),
        ("hosting", "secret"),
        ("build",),
        ("mock", "front"),
        ("foreign",),
        ("checks",),
        ("app",),
        ("local",),
    ),
}

# Third-party packages that whole floors must not name, not even lazily.
LIGHT_FLOORS = (
    *("protocol", "traces", "figures", "router", "worker.kv", "worker.sched", "mocker", "synth"),
    *("worker.transfer", "worker.storage", "sessions", "graphs", "search", "client"),
)
TORCH_FREE = (
    "worker.capsule_commands",
    "worker.capsules",
    "worker.engine",
    "worker.forward",
    "worker.gaps",
    "worker.sampling",
    "worker.memory.budget",
    "worker.admission",
    "worker.records",
    "worker.requests",
    "worker.updates",
    "worker.passes",
)
# `worker.kv` and `worker.transfer` count holders, copy and give up blocks. These words are of those who
# decide whose state stays for how long: in names, texts and comments there they would be a policy in the
# wrong place.
POLICY = re.compile(
    r"(?<![a-z])(un)?pin(s|ned|ning)?(?![a-z])|tenant|retain|retention|replaceable"
    r"|(?<![a-z])(ttl|quota|session|api_?key)s?(?![a-z])",
    re.IGNORECASE,
)
# Its files that name capsules in code: they pass on what others say of them, as events and as records.
CAPSULES_BY_NAME = {"worker.kv.journal", "worker.transfer"}

MAX_MODULES = 13
QUESTION = re.compile(r"(What|Who|Whoever|Whose|Whom|Where|How|When|Which|Whatever|Why)\b")
QUESTION_TEXT = re.compile(rf'"""\s*{QUESTION.pattern}')  # spares parsing every test


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def modules() -> dict[str, Path]:
    """Every module of ours by its name within `mallee`."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = list(path.relative_to(ROOT).with_suffix("").parts)
            if parts[-1] == "__init__":
                parts.pop()
            found[".".join(parts)] = path
    return found


def imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def ours(path: Path) -> set[str]:
    """All that a file imports from `mallee`, lazily or for types only included."""
    names = set(imported(ast.walk(parsed(path))))
    return {n.removeprefix("mallee.") for n in names if n.startswith("mallee.")} - {"__version__"}


def starts(name: str, prefix: str) -> bool:
    return prefix == "" or name == prefix or name.startswith(prefix + ".")


def test_every_module_is_found() -> None:
    assert len(modules()) > 250


def test_every_package_is_linked_from_the_sources() -> None:
    """A link that was committed as a file imports nowhere but in a folder of its own."""
    links = {path.name: path for path in (ROOT / "src/mallee").iterdir()}
    not_linked = [
        name
        for name in PACKAGES
        if name not in links or not links[name].is_symlink() or links[name].resolve() != ROOT / name
    ]
    assert not_linked == []


def test_imports_are_absolute() -> None:
    offenders = [
        name
        for name, path in modules().items()
        if any(isinstance(n, ast.ImportFrom) and n.level for n in ast.walk(parsed(path)))
    ]
    assert not offenders


def test_packages_import_along_the_arrows() -> None:
    offenders = []
    for name, path in modules().items():
        key = max((key for key in ARROWS if starts(name, key)), key=len)
        for target in sorted(ours(path)):
            is_allowed = any(starts(target, allowed) for allowed in ARROWS[key])
            is_forbidden = any(starts(target, one) for one in FORBIDDEN.get(key, ()))
            if not is_allowed or is_forbidden:
                offenders.append(f"{name} imports {target}")
    assert not offenders


@pytest.mark.parametrize("package", FLOORS)
def test_rooms_import_from_floors_below(package: str) -> None:
    floors = {room: floor for floor, rooms in enumerate(FLOORS[package]) for room in rooms}
    offenders = set()
    for name, path in modules().items():
        if not name.startswith(f"{package}."):
            continue
        room = name.split(".")[1]
        assert room in floors, f"{package}/{room} has no floor"
        for target in ours(path):
            if not target.startswith(f"{package}."):
                continue
            other = target.split(".")[1]
            if floors[other] >= floors[room] and other != room:
                offenders.add(f"{name} imports mallee.{package}.{other}")
    assert not offenders


def test_product_code_imports_no_tests_and_no_benches() -> None:
    offenders = [
        name
        for name, path in modules().items()
        if {n.split(".")[0] for n in imported(ast.walk(parsed(path)))}
        & {"tests", "support", "bench"}
    ]
    assert not offenders


def words_of(path: Path) -> str:
    """The text of a file without its own docstring if it is a package's: that says what it must not know."""
    text = path.read_text()
    return text.partition('"""\n\n')[2] if path.name == "__init__.py" else text


def test_the_kv_mechanism_has_no_word_of_policy() -> None:
    """F23: nothing of pins, retention, tenants, times to live or quotas in `worker.kv` and `worker.transfer`.

    Capsules are names to them: they import nothing of them (the arrows above), and only journal and
    transfers, which hand on events and records, name them in code.
    """
    rooms = ("worker.kv", "worker.transfer")
    kv = {n: path for n, path in modules().items() if any(starts(n, room) for room in rooms)}
    assert len(kv) > 20
    offenders = [
        f"{name}:{number} {line.strip()}"
        for name, path in kv.items()
        for number, line in enumerate(words_of(path).splitlines(), 1)
        if POLICY.search(line)
    ]
    for name, path in kv.items():
        if not any(starts(name, allowed) for allowed in CAPSULES_BY_NAME):
            names = {n.id for n in ast.walk(parsed(path)) if isinstance(n, ast.Name)}
            names |= {n.attr for n in ast.walk(parsed(path)) if isinstance(n, ast.Attribute)}
            names |= {n.arg for n in ast.walk(parsed(path)) if isinstance(n, ast.arg)}
            offenders += [f"{name} names {each}" for each in names if "capsule" in each.lower()]
    assert not offenders
    assert all(map(POLICY.search, ("a pinned block", "max_ttl_s", "by_tenant", "x.retention")))
    assert not POLICY.search("a spinning mapping, settled")


def test_light_floors_name_no_heavy_packages() -> None:
    offenders = []
    for name, path in modules().items():
        if any(starts(name, floor) for floor in (*LIGHT_FLOORS, *TORCH_FREE)):
            tops = {target.split(".")[0] for target in imported(ast.walk(parsed(path)))}
            offenders += [f"{name} imports {heavy}" for heavy in sorted(tops & HEAVY)]
    assert not offenders


def test_no_files_import_each_other() -> None:
    """At import time, later, or for types alone; directly or through others."""
    known = modules()
    graph = {
        name: {
            target if target in known else target.rpartition(".")[0]
            for target in (n.removeprefix("mallee.") for n in imported(ast.walk(parsed(path))))
        }
        & known.keys() - {name}
        for name, path in known.items()
    }
    assert not circles(graph)


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Groups of nodes that all reach each other."""
    reach = {node: reached(graph, graph[node]) for node in graph}
    groups: list[set[str]] = []
    for node in graph:
        group = {other for other in reach[node] if node in reach[other]}
        if group and group not in groups:
            groups.append(group)
    return groups


def test_folders_hold_about_a_dozen_modules() -> None:
    counts: dict[str, int] = {}
    for path in [*modules().values(), *(ROOT / "bench").rglob("*.py")]:
        if path.name not in ("__init__.py", "__main__.py"):
            folder = str(path.parent.relative_to(ROOT))
            counts[folder] = counts.get(folder, 0) + 1
    offenders = {f: n for f, n in counts.items() if n > MAX_MODULES}
    assert not offenders


def asking(path: Path) -> Iterator[str]:
    """Docstrings of a file that begin with a question word."""
    if not QUESTION_TEXT.search(path.read_text()):
        return
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(parsed(path)):
        if isinstance(node, kinds) and QUESTION.match(ast.get_docstring(node) or ""):
            yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def test_no_docstring_begins_with_a_question_word() -> None:
    folders = (*PACKAGES, "bench", "tests")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    offenders = [place for path in paths for place in asking(path)]
    assert not offenders


def test_no_test_and_no_bench_changes_the_import_path() -> None:
    paths = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "bench").rglob("*.py")]
    pattern = re.compile(r"^\s*sys\.path\b", re.MULTILINE)
    assert not [path for path in paths if pattern.search(path.read_text())]


# Real time, child processes and real sockets: for files of the nightly lane and of the smoke, and for those
# marked `real_time`, which are not on the loop in virtual time yet.
REAL = {
    *("time.sleep", "socket.socket", "socket.create_connection", "os.fork"),
    *("subprocess.run", "subprocess.Popen", "subprocess.check_output", "subprocess.check_call"),
    *("asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell"),
    *("multiprocessing.Process", "multiprocessing.get_context"),
}


REAL_TEXT = re.compile(
    r"sleep\(|subprocess|socket\.|fork|multiprocessing"
)  # spares parsing every test


def real_calls(tree: ast.Module) -> Iterator[str]:
    """Calls of `REAL` in a test file, and sleeps: `support.waiting.elapse` is for virtual time alone."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        sleeps = name == "asyncio.sleep" and ast.unparse(node.args[0]) != "0"
        if name in REAL or sleeps:
            yield f"{node.lineno}: {name}"


def test_real_time_and_processes_are_in_files_marked_so() -> None:
    offenders = [
        f"{path.relative_to(ROOT)}:{call}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if REAL_TEXT.search(path.read_text())
        and not is_in_real_time(path)
        and path.name != "test_virtual_time.py"
        for call in real_calls(parsed(path))
    ]
    assert not offenders
    found = [*real_calls(ast.parse("time.sleep(1)\nasyncio.sleep(0)\nasyncio.sleep(0.1)"))]
    assert found == ["1: time.sleep", "3: asyncio.sleep"]
