"""Which promises of the mission the tests cover, by the ids in their docstrings."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
MISSION = TESTS.parent.parent / "shared" / "design" / "mission.md"
IDS = re.compile(r"^((?:[A-Z]\d+(?:, part)?(?:, )?)+):")


def cited() -> dict[str, list[str]]:
    """Mission id -> tests whose docstring starts with it."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                match = IDS.match(ast.get_docstring(node) or "")
                for name in re.findall(r"[A-Z]\d+", match.group(1)) if match else []:
                    found.setdefault(name, []).append(f"{path.relative_to(TESTS)}::{node.name}")
    return found


def test_every_cited_id_is_a_promise(capsys: pytest.CaptureFixture[str]) -> None:
    """Ids in docstrings exist in the mission; prints the rows that no test names."""
    if not MISSION.exists():
        pytest.skip("the mission's table is not beside this checkout")
    rows = re.findall(r"^\| ([A-Z]\d+) \|", MISSION.read_text(), re.MULTILINE)
    assert len(rows) > 100
    found = cited()
    assert set(found) <= set(rows), f"no such promise: {sorted(set(found) - set(rows))}"
    missing = [row for row in rows if row not in found]
    with capsys.disabled():
        print(f"\nmission: {len(rows) - len(missing)} of {len(rows)} rows are named by a test")  # noqa: T201
        print(f"not yet: {' '.join(missing)}")  # noqa: T201


def test_ids_are_read_from_docstrings() -> None:
    match = IDS.match("K7, X5, part: something")
    assert match is not None
    assert re.findall(r"[A-Z]\d+", match.group(1)) == ["K7", "X5"]
    assert IDS.match("a sentence about D3: no") is None
