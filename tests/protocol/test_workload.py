"""Rows of a workload trace as JSON lines."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.errors import CodecError
from mallee.protocol.workload import WorkloadRow, decode_row, encode_row

counts = st.integers(0, 1 << 40)
names = st.text(max_size=10)
rows = st.builds(
    WorkloadRow,
    timestamp=st.floats(0, 1e12),
    input_length=counts,
    output_length=counts,
    hash_ids=st.lists(counts, max_size=5).map(tuple),
    session_id=st.none() | names,
    request_id=st.none() | names,
    wait_for=st.lists(names, max_size=3).map(tuple),
    tool_wait_ms=st.floats(0, 1e9),
    branches=st.integers(1, 64),
    prefix_reset=st.booleans(),
    fork_of=st.none() | names,
    cls=st.none() | names,
)


@given(rows)
def test_rows_come_back_as_they_went_on_one_line(row: WorkloadRow) -> None:
    line = encode_row(row)
    assert b"\n" not in line
    assert decode_row(line) == row
    assert decode_row(line.decode()) == row


def test_a_plain_mooncake_line_is_a_row_with_defaults() -> None:
    row = decode_row(
        '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}'
    )
    assert row == WorkloadRow(
        timestamp=27482.0, input_length=6955, output_length=52, hash_ids=(46, 47)
    )
    assert row.branches == 1


def test_fields_at_their_default_are_left_out() -> None:
    row = WorkloadRow(timestamp=1.0, input_length=2, output_length=3)
    assert encode_row(row) == b'{"timestamp":1.0,"input_length":2,"output_length":3}'


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("", "not a workload row"),
        ("[]", "not a workload row"),
        ('{"timestamp": 1, "input_length": 2}', "output_length"),
        ('{"timestamp": 1, "input_length": "2", "output_length": 3}', "input_length"),
        ('{"timestamp": 1, "input_length": -2, "output_length": 3}', "-2, 3 must be >= 0"),
    ],
)
def test_a_wrong_row_is_refused_naming_what_is_wrong(line: str, complaint: str) -> None:
    with pytest.raises(CodecError, match=complaint):
        decode_row(line)


@given(st.binary(max_size=60))
def test_arbitrary_bytes_decode_or_raise_our_error(raw: bytes) -> None:
    with contextlib.suppress(CodecError):
        assert isinstance(decode_row(raw), WorkloadRow)


def test_text_that_is_not_utf8_is_refused_as_malformed() -> None:
    line = b'{"timestamp":1.0,"input_length":2,"output_length":3,"session_id":"\xc3\x28"}'
    with pytest.raises(CodecError, match="not a workload row"):
        decode_row(line)
