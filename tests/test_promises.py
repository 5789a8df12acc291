"""docs/promises.md says the truth about the tests: every citation is a row, every working row is shown."""

import pytest

from support.promises import STATES, citations, cited_ids, rows, rows_with_tests


def test_every_cited_id_is_a_row() -> None:
    known = {row.id for row in rows()}
    assert not [c for c in citations() if c.id not in known]


def test_every_row_that_works_is_shown_whole_by_a_test() -> None:
    whole = {c.id for c in citations() if not c.is_part}
    assert not [row.id for row in rows() if row.state == "works" and row.id not in whole]


def test_what_is_missing_in_a_row_is_missing_in_its_tests() -> None:
    """A row in state "part" is cited in part only; a row in state "not yet" is not cited."""
    states = {row.id: row.state.split(":")[0] for row in rows()}
    cited = citations()
    assert not [c for c in cited if states[c.id] == "part" and not c.is_part]
    assert not [c for c in cited if states[c.id] == "not yet"]


def test_rows_have_a_state_and_say_what_is_missing() -> None:
    found = rows()
    assert len(found) == len({row.id for row in found}) > 150
    for row in found:
        state, _, missing = row.state.partition(": ")
        assert state in STATES
        assert missing or state != "part", row


def test_rows_are_printed_with_their_tests() -> None:
    lines = rows_with_tests().splitlines()
    assert len(lines) == len(rows()) + len(citations())
    assert [line.split()[0] for line in lines if line[0] != " "] == [row.id for row in rows()]


def test_counts_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    found = [row.state.split(":")[0] for row in rows()]
    counts = ", ".join(f"{found.count(state)} {state}" for state in STATES)
    with capsys.disabled():
        print(f"\npromises: {counts}, of {len(found)}")  # noqa: T201


def test_ids_are_read_from_the_head_of_a_docstring() -> None:
    assert cited_ids("K7, X5, part: something") == [("K7", False), ("X5", True)]
    assert cited_ids("K24.") == [("K24", False)]
    assert cited_ids("a sentence about D3: no") == []
    assert cited_ids("D3 is no citation without a colon") == []
