"""Runs the landing tests that a change can reach.

    python -m support.affected [BASE [PYTEST'S OPTIONS]]

The change: files that differ from BASE (HEAD unless given), and new ones. Python files reach tests through
imports. Other files reach tests that name them or their folder in a string, or that import what does; pages
only tests that name them. If none does, and for pyproject.toml and the Makefile's lanes, all tests run.
"""

import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Final

from support.imports import ROOT, Source, graph, linked, reached, reverse, sources
from support.lanes import LANDING, lane_of

ALL: Final = {"pyproject.toml", "setup.py"}  # which any test may depend on


def git(*arguments: str, root: Path = ROOT) -> list[str]:
    command = ["git", "-C", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.split("\0") if line]


def changed(base: str, root: Path = ROOT) -> set[str]:
    """Files that differ from `base`, removed ones included, and files that git doesn't know yet."""
    differing = git("diff", "--name-only", "--no-renames", "-z", base, "--", root=root)
    return {*differing, *git("ls-files", "--others", "--exclude-standard", "-z", root=root)}


def lanes_changed(base: str, root: Path = ROOT) -> bool:
    """Whether the Makefile calls pytest in another way."""
    text = "".join(git("diff", "--unified=0", base, "--", "Makefile", root=root))
    return any(re.match(r"[+-].*pytest", line, re.IGNORECASE) for line in text.splitlines())


def reach(paths: Iterable[str], root: Path = ROOT) -> set[str]:
    """Test files, of every lane, that changes of `paths` can reach."""
    paths = set(paths)
    found = sources(root)
    tests = {path for path in found if PurePosixPath(path).name.startswith("test_")}
    code = {path for path in paths if path.endswith(".py")} - ALL
    named = {path: naming(path, found) for path in paths - code}
    if paths & ALL or not all(named.values()):
        return tests
    readers = (
        {path for path, source in found.items() if reads_sources(path, source)} if code else set()
    )
    begin = code.union(readers, *named.values())
    return tests & reached(reverse(graph(found, linked(root), code - set(found))), begin)


def reads_sources(path: str, source: Source) -> bool:
    """Whether a test's file reads others as text."""
    return path.startswith("tests/") and any("*.py" in text for text in source.strings)


def naming(path: str, found: Mapping[str, Source]) -> set[str]:
    """Files with a string that has the name of the file `path`, or with strings that lead to its folder.

    Where none leads there, to a folder above. Of pages, tests only: others name them in messages.
    """
    file = PurePosixPath(path)
    is_page = file.suffix == ".md" or file.parts[0] == "docs"
    readers = {
        each: source for each, source in found.items() if not is_page or each.startswith("tests/")
    }
    name = re.compile(rf"(?<![\w.]){re.escape(file.name)}(?!\w)")
    by_name = {each for each, source in readers.items() if any(map(name.search, source.strings))}
    by_folder = (
        {each for each, source in readers.items() if _leads_to(folder, each, source)}
        for folder in file.parents
    )
    return by_name | next(filter(None, by_folder), set())


def _leads_to(folder: PurePosixPath, path: str, source: Source) -> bool:
    """Whether the file `path` names each part of a folder's path that isn't in its own."""
    parts = set(folder.parts) - set(PurePosixPath(path).parent.parts)
    named = (part for text in source.strings for part in text.split("/"))
    return bool(parts) and parts.issubset(named)


def main(base: str = "HEAD", *options: str) -> int:
    paths = changed(base)
    if lanes_changed(base):
        paths |= ALL
    reachable = sorted(path for path in reach(paths) if lane_of(ROOT / path) == "landing")
    print(*reachable, f"{len(reachable)} files", sep="\n", flush=True)  # noqa: T201
    if not reachable:
        return 0
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", "-m", LANDING]
    return subprocess.run([*command, *options, *reachable], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
