"""The table in docs/promises.md, and the tests that cite its rows.

A test cites a row by its id at the head of its docstring: `K7, X5, part: ...` shows K7 whole and X5 in part.
`make promises` prints each row with its state and its tests.
"""

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parents[1]
TABLE = TESTS.parent / "docs" / "promises.md"
NIGHTLY = TESTS.parent / "bench" / "results" / "nightly.json"
STATES = ("works", "part", "not yet")

_ROW = re.compile(r"^\| ([A-Z]\d+) \| (.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE)
_HEAD = re.compile(r"([A-Z]\d+(?:, part)?(?:, [A-Z]\d+(?:, part)?)*)(?:[:.]|$)")
_ID = re.compile(r"([A-Z]\d+)(, part)?")
_DOCSTRING = re.compile(r'^    """[A-Z]\d', re.MULTILINE)


class Row(NamedTuple):
    """One promise. `state` begins with one of STATES."""

    id: str
    promise: str
    acceptance: str
    state: str


class Citation(NamedTuple):
    id: str
    test: str  # path within tests::name
    is_part: bool
    is_skipped: bool  # in every lane

    @property
    def counts(self) -> bool:
        """Whether it shows the row whole, in some lane."""
        return not (self.is_part or self.is_skipped)


def rows() -> list[Row]:
    return [Row(*match) for match in _ROW.findall(TABLE.read_text())]


def cited_ids(docstring: str) -> list[tuple[str, bool]]:
    """(id, is it shown in part only) for each id at the head of a docstring."""
    head = _HEAD.match(docstring)
    return [(name, bool(part)) for name, part in _ID.findall(head[1])] if head else []


@cache
def citations() -> list[Citation]:
    """Citations by test functions; helpers, fixtures and classes show nothing."""
    skipped = skipped_nightly()
    found: list[Citation] = []
    for path in sorted(TESTS.rglob("test_*.py")):
        source = path.read_text()
        if _DOCSTRING.search(source):  # most of the time goes into parsing
            found += citations_in(source, str(path.relative_to(TESTS)), skipped)
    return found


def citations_in(source: str, name: str, skipped: frozenset[str]) -> Iterator[Citation]:
    """Citations by the tests of one file, `name` within tests; `skipped` are tests that no lane runs."""
    tree = ast.parse(source)
    values = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    of_file = values.get("pytestmark", ast.Constant(None))
    for node in tree.body:
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and node.name.startswith("test_"):
            test = f"{name}::{node.name}"
            marks = [of_file, *node.decorator_list]
            is_skipped = test in skipped or any(_always_skips(mark, values) for mark in marks)
            for each, is_part in cited_ids(ast.get_docstring(node) or ""):
                yield Citation(each, test, is_part, is_skipped)


def _always_skips(mark: ast.expr, values: dict[str, ast.expr]) -> bool:
    """Whether a mark, or one of a list of marks, keeps a test out of both lanes.

    So do `gpu`, `skip`, and a `skipif` that reads the environment, which no lane sets.
    """
    if isinstance(mark, ast.List | ast.Tuple):
        return any(_always_skips(each, values) for each in mark.elts)
    if isinstance(mark, ast.Name) and mark.id in values:
        return _always_skips(values[mark.id], {})
    called = mark.func if isinstance(mark, ast.Call) else mark
    name = ast.unparse(called).removeprefix("pytest.mark.")
    return name in ("gpu", "skip") or (name == "skipif" and "environ" in ast.unparse(mark))


def skipped_nightly() -> frozenset[str]:
    """Tests that the last nightly run skipped, as path within tests::name."""
    if not NIGHTLY.exists():
        return frozenset()
    return frozenset(
        test.removeprefix("tests/") for test in json.loads(NIGHTLY.read_text())["skipped"]
    )


def rows_with_tests() -> str:
    """Each row with its state, and below it its tests, those that show it whole before others."""
    lines = []
    for row in rows():
        lines.append(f"{row.id:4} {row.promise} [{row.state}]")
        tests = sorted((c.is_part, c.is_skipped, c.test) for c in citations() if c.id == row.id)
        for is_part, is_skipped, test in tests:
            kind = "skip" if is_skipped else "part" if is_part else "whole"
            lines.append(f"     {kind:5} {test}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(rows_with_tests())  # noqa: T201
