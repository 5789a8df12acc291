"""The table in docs/promises.md, and the tests that cite its rows.

A test cites a row by its id at the head of its docstring: `K7, X5, part: ...` shows K7 whole and X5 in part.
`make promises` prints each row with its state and its tests.
"""

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parents[1]
TABLE = TESTS.parent / "docs" / "promises.md"
STATES = ("works", "part", "not yet")

_ROW = re.compile(r"^\| ([A-Z]\d+) \| (.+?) \| (.+?) \|$", re.MULTILINE)
_HEAD = re.compile(r"([A-Z]\d+(?:, part)?(?:, [A-Z]\d+(?:, part)?)*)(?:[:.]|$)")
_ID = re.compile(r"([A-Z]\d+)(, part)?")


class Row(NamedTuple):
    """One promise. `state` begins with one of STATES."""

    id: str
    promise: str
    state: str


class Citation(NamedTuple):
    id: str
    test: str  # path within tests::name
    is_part: bool


def rows() -> list[Row]:
    return [Row(*match) for match in _ROW.findall(TABLE.read_text())]


def cited_ids(docstring: str) -> list[tuple[str, bool]]:
    """(id, is it shown in part only) for each id at the head of a docstring."""
    head = _HEAD.match(docstring)
    return [(name, bool(part)) for name, part in _ID.findall(head[1])] if head else []


@cache
def citations() -> list[Citation]:
    """Citations by test functions; helpers, fixtures and classes show nothing."""
    found = []
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_function and node.name.startswith("test_"):
                test = f"{path.relative_to(TESTS)}::{node.name}"
                for name, is_part in cited_ids(ast.get_docstring(node) or ""):
                    found.append(Citation(name, test, is_part))
    return found


def rows_with_tests() -> str:
    """Each row with its state, and below it its tests, those that show it whole before others."""
    lines = []
    for row in rows():
        lines.append(f"{row.id:4} {row.promise} [{row.state}]")
        tests = sorted((c.is_part, c.test) for c in citations() if c.id == row.id)
        lines += [f"     {'part ' if is_part else 'whole'} {test}" for is_part, test in tests]
    return "\n".join(lines)


if __name__ == "__main__":
    print(rows_with_tests())  # noqa: T201
