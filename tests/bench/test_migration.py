"""The bench of loans between processes, on a few blocks."""

from support.benches import run_bench


def test_loans_and_plain_copies_take_turns() -> None:
    found, _ = run_bench("migration", "--blocks", "20", "--rounds", "1")
    assert set(found["gb_per_s"]) == {"unix_plain", "unix_loan", "tcp_plain", "tcp_loan"}
    assert min(found["gb_per_s"].values()) > 0
    assert set(found["ratios"]) == {"unix", "tcp"}
