"""The router's bench runs and says what it should; its figures are for other days."""

from typing import Any

import pytest

from support.benches import run_bench


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    """The last line of one run with tiny sizes, ours alone."""
    found, table = run_bench("router", "--quick", "--no-peer")
    assert "match_us.shared_64" in table
    return found


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in leaves(each)]
    return [value]


def test_every_figure_of_the_table_is_there(result: dict[str, Any]) -> None:
    """K3, K8: matches, stores, memory, decisions, hashing, events under load, and a cold join."""
    verbs, ways, loads = ("store", "remove"), ("", "_raw", "_index"), ("", "_shared")
    rates = {f"{verb}{way}{load}_mblocks_s" for verb in verbs for way in ways for load in loads}
    rates |= {f"{verb}{way}_events_s" for verb in verbs for way in ("", "_raw")}
    rates |= {f"store{way}_fresh_mblocks_s" for way in ways}
    assert set(result) == rates | {
        "match_us",
        "match_p99_us",
        "match_walk_us",
        "bytes_per_block",
        "bytes_per_block_accounted",
        "route_us",
        "route_2048_us",
        "route_tokens_us",
        "routes_s",
        "hash_mtokens_s",
        "mixed",
        "join",
        "peer",
        "ratio",
        "peer_version",
        "pinned",
        "workers",
        "python",
        "machine",
    }
    cases = {
        f"{kind}_{n}" for kind in ("shared", "unique", "part", "miss") for n in (64, 512, 4096)
    }
    assert set(result["match_us"]) == cases
    assert set(result["route_us"]) >= {"p50", "p99"}
    assert set(result["hash_mtokens_s"]) == {"array", "list", "array_2k", "list_2k"}
    assert set(result["bytes_per_block"]) == {"unique", "unique_worst", "shared", "fleet"}


def test_figures_are_positive_times_and_rates(result: dict[str, Any]) -> None:
    for key in ("match_us", "match_walk_us", "store_mblocks_s", "remove_events_s"):
        assert all(value > 0 for value in leaves(result[key])), key
    for key in ("route_us", "route_2048_us", "routes_s", "hash_mtokens_s", "mixed"):
        assert all(value > 0 for value in leaves(result[key])), key
    assert result["route_us"]["p50"] <= result["route_us"]["p99"]
    assert result["join"]["total_s"] > 0
    assert result["join"]["pairs"] == result["workers"] * 50


def test_without_the_peer_there_is_no_ratio(result: dict[str, Any]) -> None:
    assert result["peer"] == {}
    assert result["ratio"] == {}
    assert result["peer_version"] is None
