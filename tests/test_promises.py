"""docs/promises.md says the truth about the tests: every citation is a row, every working row is shown."""

import pytest

from support.promises import (
    STATES,
    TABLE,
    citations,
    citations_in,
    cited_ids,
    rows,
    rows_with_tests,
)

HEAD = "| id | promise | acceptance: what tests show | state |"


@pytest.mark.slow
def test_every_cited_id_is_a_row() -> None:
    known = {row.id for row in rows()}
    assert not [c for c in citations() if c.id not in known]


def test_every_row_that_works_is_shown_whole_by_a_test_that_runs() -> None:
    whole = {c.id for c in citations() if c.counts}
    assert not [row.id for row in rows() if row.state == "works" and row.id not in whole]


def test_what_is_missing_in_a_row_is_missing_in_its_tests() -> None:
    """A row in state "part" is cited in part only; a row in state "not yet" is not cited."""
    states = {row.id: row.state.split(":")[0] for row in rows()}
    cited = citations()
    assert not [c for c in cited if states[c.id] == "part" and not c.is_part]
    assert not [c for c in cited if states[c.id] == "not yet"]


def test_rows_have_a_state_and_say_what_is_missing() -> None:
    found = rows()
    lines = TABLE.read_text().splitlines()
    assert len(found) == sum(line.startswith("| ") for line in lines) - lines.count(HEAD)
    assert len(found) == len({row.id for row in found}) > 150
    for row in found:
        state, _, missing = row.state.partition(": ")
        assert state in STATES
        assert missing or state != "part", row
        assert not any("|" in cell for cell in row), row


def test_rows_are_printed_with_their_tests() -> None:
    lines = rows_with_tests().splitlines()
    assert len(lines) == len(rows()) + len(citations())
    assert [line.split()[0] for line in lines if line[0] != " "] == [row.id for row in rows()]


NIGHT = """
import os
import pytest

slow = pytest.mark.slow
told = pytest.mark.skipif(os.environ.get("ASKED") != "1", reason="takes minutes")

@pytest.mark.gpu
@pytest.mark.slow
def test_a():
    "D1: on a GPU alone."

@pytest.mark.skip(reason="broken")
async def test_b():
    "D1."

@told
def test_c():
    "D1."

@slow
@pytest.mark.skipif(not amx.is_available(), reason="no such CPU")
def test_d():
    "D1, D2, part: runs where it can."

@pytest.mark.parametrize("a", [pytest.param(1, marks=pytest.mark.gpu), 2])
def test_e(a):
    "D1: in one of two cases."
"""


def test_a_citation_by_a_test_that_no_lane_runs_is_rejected() -> None:
    found = list(citations_in(NIGHT, "test_x.py", frozenset({"test_x.py::test_e"})))
    assert [c.test[-1] for c in found if c.is_skipped] == ["a", "b", "c", "e"]
    assert [(c.id, c.test) for c in found if c.counts] == [("D1", "test_x.py::test_d")]
    of_file = NIGHT + "pytestmark = [slow, pytest.mark.gpu]"
    assert not any(c.counts for c in citations_in(of_file, "test_x.py", frozenset()))
    assert any(c.counts for c in citations_in(NIGHT + "pytestmark = slow", "x", frozenset()))


def test_ids_are_read_from_the_head_of_a_docstring() -> None:
    assert cited_ids("K7, X5, part: something") == [("K7", False), ("X5", True)]
    assert cited_ids("K24.") == [("K24", False)]
    assert cited_ids("a sentence about D3: no") == []
    assert cited_ids("D3 is no citation without a colon") == []
