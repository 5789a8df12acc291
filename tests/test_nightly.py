"""`make nightly`: its parts, and what their reports add up to."""

import pytest

from support.imports import ROOT
from support.lanes import lane_of
from support.nightly import (
    CLIENTS,
    Night,
    Outcome,
    Part,
    chosen,
    counts,
    ordered,
    outcome_of,
    parts,
    under_load,
)

REPORT = """<testsuites><testsuite>
<testcase file="tests/test_a.py" name="test_passes[1]"/>
<testcase file="tests/test_a.py" name="test_passes[2]"><skipped type="pytest.skip"/></testcase>
<testcase file="tests/test_a.py" name="test_skips[1]"><skipped type="pytest.skip"/></testcase>
<testcase file="tests/test_a.py" name="test_skips[2]"><skipped type="pytest.skip"/></testcase>
<testcase file="tests/test_a.py" name="test_xfails"><skipped type="pytest.xfail"/></testcase>
<testcase file="tests/test_a.py" name="test_fails[1]"><failure>no</failure></testcase>
<testcase file="tests/test_a.py" name="test_passes_badly"/>
<testcase file="tests/test_a.py" name="test_passes_badly"><error>at teardown</error></testcase>
</testsuite></testsuites>"""


def test_every_file_of_the_lane_is_a_part() -> None:
    names = {part.name for part in parts()}
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    nightly_files = {
        file for file in files if lane_of(ROOT / file) == "nightly" and not file.startswith(CLIENTS)
    }
    assert nightly_files == names & files
    assert len(nightly_files) > 20
    assert names - files == {
        "clients",
        "schemathesis",
        "fuzz",
        "stories",
        "any gateway",
        "properties",
        "speed",
    }
    assert nightly_files < set(under_load(nightly_files, 10).command)


def test_a_report_counts_what_passed_failed_and_never_ran() -> None:
    """A function is skipped if no case of it ran; a test whose teardown fails has failed."""
    passed, failed, skipped = counts(REPORT)
    assert passed == 2
    assert failed == ["tests/test_a.py::test_fails[1]", "tests/test_a.py::test_passes_badly"]
    assert skipped == ["tests/test_a.py::test_skips"]


def test_parts_are_chosen_by_name_and_the_longest_begins() -> None:
    known = [Part(name, ()) for name in ("tests/a.py", "tests/b/c.py", "tests/b/d.py", "fuzz")]
    known.append(Part("properties", (), num_slots=2))
    assert chosen(known, []) == known
    assert chosen(known, ["process"]) == known[:3]
    assert chosen(known, ["tests/b", "fuzz"]) == known[1:4]
    with pytest.raises(SystemExit, match=r"there are tests/a\.py, "):
        chosen(known, ["nothing"])
    last = {"tests/a.py": Outcome("", 1.0), "tests/b/c.py": Outcome("", 5.0)}
    names = [part.name for part in ordered([*known[:2], known[4], known[3]], last)]
    assert names == ["fuzz", "tests/b/c.py", "tests/a.py", "properties"]  # `fuzz` is new


def test_a_part_without_a_report_fails_unless_its_environment_is_missing() -> None:
    assert outcome_of(Part("fuzz", ()), 0, 1.0).failed == ()
    assert outcome_of(Part("fuzz", ()), 2, 1.0).failed == ("fuzz",)
    late = outcome_of(Part("fuzz", ()), None, 9.0)
    assert (late.failed, late.note) == (("fuzz",), "ended after 9 s")
    without = outcome_of(Part("clients", (), environment="build/nothing"), 2, 1.0)
    assert (without.failed, without.note[:7]) == ((), "not run")


def test_a_night_keeps_the_last_outcome_of_each_part() -> None:
    night = Night()
    night.add("a", Outcome("1", 2.0, 3, ("test_a",), ("test_b",)))
    night.add("b", Outcome("1", 2.0, 3, ("test_c",), ("test_b", "test_d")))
    night.add("a", Outcome("2", 1.0, 4))
    assert (night.failed, night.skipped) == (["test_c"], ["test_b", "test_d"])
    assert night.table().splitlines()[2:] == [
        "| a | 2 | 1 | 4 | 0 | 0 |  |",
        "| b | 1 | 2 | 3 | 1 | 2 |  |",
        "failed: test_c",
    ]
