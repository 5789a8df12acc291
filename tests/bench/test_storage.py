"""The bench of the durable store, on a few bytes."""

from pathlib import Path

from support.benches import run_bench


def test_sides_take_turns_and_volumes_open(tmp_path: Path) -> None:
    options = ["--mib", "2", "--block-kib", "64", "--runs", "20", "--rounds", "1"]
    found, _ = run_bench("storage", "--folder", str(tmp_path), *options)
    assert found["open"]["blocks"] == 20 * 64
    assert min(found["mb_per_s"].values()) > 0
    assert set(found["ratios"]) == {"write", "read_cached", "read_cold"}
    assert not list(tmp_path.iterdir())
