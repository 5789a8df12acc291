"""The import graph of all Python files: product, benches, examples, tests and their support.

Files are named by their paths within the root. A file depends on modules of ours that it imports, lazily or
for types only included; on those that it names in a string (`python -m`, Ray's import paths, patches); on the
packages above these; and a test on the conftest.py of its folder and of those above.

Lazy imports of files that every test loads (`EVERYWHERE`) don't count: these prepare modules for tests that
load them anyway.
"""

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

ROOT = Path(__file__).resolve().parents[2]

EVERYWHERE: Final = ("tests/conftest.py", "tests/support/virtual/")

_MODULE = re.compile(r"\b(?:mallee|bench|examples|support)(?:\.\w+)+")
_OTHERS = ("src/mallee", "bench", "examples", "tests")  # folders beside the linked packages
# Third-party packages that light parts of the product must not load.
HEAVY: Final = frozenset(
    ("torch", "transformers", "ray", "nats", "fastapi", "uvicorn", "starlette")
)

Graph = Mapping[str, Collection[str]]


class Source(NamedTuple):
    """Names in one file.

    `modules` are imported, or named in a string; each perhaps with a name within the module. `strings` are
    all but docstrings.
    """

    modules: frozenset[str]
    strings: tuple[str, ...]


def linked(root: Path = ROOT) -> list[str]:
    """The top-level folders that import as `mallee.`..."""
    return sorted(path.name for path in (root / "src" / "mallee").iterdir() if path.is_symlink())


def sources(root: Path = ROOT) -> dict[str, Source]:
    """Every Python file of ours."""
    paths = (path for folder in (*linked(root), *_OTHERS) for path in _files(root / folder))
    texts = {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in paths}
    return {path: read(text, path.startswith(EVERYWHERE)) for path, text in texts.items()}


def _files(folder: Path) -> Iterable[Path]:
    return folder.glob("*.py") if folder.name == "mallee" else sorted(folder.rglob("*.py"))


def read(text: str, only_at_load: bool = False) -> Source:
    modules: set[str] = set()
    strings: list[str] = []
    prose: set[ast.expr] = set()  # docstrings, and other strings that are statements
    tree = ast.parse(text)
    for node in tree.body if only_at_load else ast.walk(tree):
        match node:
            case ast.Import():
                modules.update(alias.name for alias in node.names)
            case ast.ImportFrom(module=str(), level=0):
                modules.update(f"{node.module}.{alias.name}" for alias in node.names)
            case ast.Expr(value=ast.Constant()):
                prose.add(node.value)
            case ast.Constant(value=str()) if node not in prose:
                strings.append(node.value)
                modules.update(_MODULE.findall(node.value))
    return Source(frozenset(modules), tuple(strings))


def module_of(path: str, packages: Collection[str]) -> str:
    """The name by which a file is imported."""
    parts = list(PurePosixPath(path).with_suffix("").parts)
    if parts[0] in packages:
        parts.insert(0, "mallee")
    elif parts[:2] in (["src", "mallee"], ["tests", "support"]):
        del parts[0]
    if parts[-1] == "__init__":
        del parts[-1]
    return ".".join(parts)


def graph(
    found: Mapping[str, Source], packages: Collection[str], gone: Iterable[str] = ()
) -> dict[str, set[str]]:
    """For each file the files that it depends on directly; `gone` are Python files that were removed."""
    by_module = {module_of(path, packages): path for path in (*gone, *found)}
    conftests = {path for path in (*gone, *found) if PurePosixPath(path).name == "conftest.py"}
    edges: dict[str, set[str]] = {}
    for path, source in found.items():
        needed = {
            by_module[name] for module in source.modules for name in _loaded(module, by_module)
        }
        above = {str(folder / "conftest.py") for folder in PurePosixPath(path).parents}
        edges[path] = (needed | (above & conftests)) - {path}
    return edges


def _loaded(name: str, known: Collection[str]) -> Iterator[str]:
    """The module that a dotted name begins with, the packages above it, and the program of a package."""
    parts = name.split(".")
    begins = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
    yield from (each for each in (*begins, f"{name}.__main__") if each in known)


def reached(edges: Graph, begin: Iterable[str]) -> set[str]:
    """`begin`, and all that its files lead to, directly or through others."""
    found: set[str] = set(begin)
    front = list(found)
    while front:
        fresh = set(edges.get(front.pop(), ())) - found
        found |= fresh
        front += fresh
    return found


def reverse(edges: Graph) -> dict[str, set[str]]:
    """For each file those that depend on it directly."""
    users: dict[str, set[str]] = {}
    for path, needed in edges.items():
        for each in needed:
            users.setdefault(each, set()).add(path)
    return users
