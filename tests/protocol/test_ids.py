"""Derived names and seeds, and subjects of NATS."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.errors import ConfigError
from mallee.protocol.ids import (
    COMMON,
    RequestId,
    Scope,
    branch_seed,
    capsule_id,
    owner_of,
    private_part,
)
from mallee.protocol.subjects import Subjects, check_token


def test_a_capsule_is_named_after_its_request_and_branch() -> None:
    assert capsule_id(RequestId("req_1")) == "req_1.0"
    assert capsule_id(RequestId("req_1"), 12) == "req_1.12"


@given(st.integers(0, (1 << 64) - 1), st.integers(0, 1000))
def test_branch_seeds_are_64_bits_and_branch_zero_keeps_the_seed(seed: int, branch: int) -> None:
    assert 0 <= branch_seed(seed, branch) < 1 << 64
    assert branch_seed(seed, 0) == seed


def test_branches_of_one_seed_and_of_neighbours_draw_different_streams() -> None:
    seeds = {branch_seed(seed, branch) for seed in range(20) for branch in range(1, 200)}
    assert len(seeds) == 20 * 199


@pytest.mark.parametrize(
    ("seed", "branch", "want"), [(0, 1, 0xE220A8397B1DCDAF), (0, 2, 0x6E789E6AA1B965F4)]
)
def test_branch_seeds_are_splitmix64(seed: int, branch: int, want: int) -> None:
    """The first two outputs of splitmix64 from state 0, as published with the algorithm."""
    assert branch_seed(seed, branch) == want


def test_a_private_part_belongs_to_its_scope_and_is_another_salt() -> None:
    for scope in (COMMON, Scope("a1b2")):
        part = private_part(scope, "n")
        assert owner_of(part) == owner_of(scope) == scope
        assert len({scope, part, private_part(scope, "m")}) == 3


def test_subjects_name_fleet_kind_and_worker() -> None:
    subjects = Subjects.of("prod-1")
    assert subjects.events("w0") == "mallee.prod-1.events.w0"
    assert subjects.lease("w0") == "mallee.prod-1.lease.w0"
    assert subjects.host("m0") == "mallee.prod-1.host.m0"
    assert subjects.bookings("g0") == "mallee.prod-1.bookings.g0"
    assert subjects.bookings_snapshot("g0") == "mallee.prod-1.bookings_snapshot.g0"


def test_without_a_name_they_match_all() -> None:
    assert Subjects.of("f").events() == "mallee.f.events.*"
    assert Subjects.of("f").lease() == "mallee.f.lease.*"
    assert Subjects.of("f").bookings() == "mallee.f.bookings.*"


@pytest.mark.parametrize("name", ["", "a.b", "*", ">", "a b", "ä", "a\n"])
def test_a_name_that_would_break_a_subject_is_refused_with_what_it_was_for(name: str) -> None:
    with pytest.raises(ConfigError, match="fleet="):
        Subjects.of(name)
    with pytest.raises(ConfigError, match="worker="):
        check_token(name, "worker")
