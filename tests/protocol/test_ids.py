"""Derived names and seeds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.ids import (
    COMMON,
    RequestId,
    Scope,
    branch_seed,
    capsule_id,
    owner_of,
    private_part,
)


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
