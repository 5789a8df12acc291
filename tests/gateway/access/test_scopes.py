"""Scopes, and the ids that only they can use."""

import secrets
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from mallee.gateway.access.scopes import Scopes
from mallee.protocol.ids import COMMON, CapsuleId, RequestId, capsule_id

SCOPES = Scopes(b"one secret", draw=secrets.token_bytes)
NAMES = st.text(max_size=8)


@given(NAMES, NAMES, NAMES, NAMES)
def test_a_tenant_and_a_salt_are_one_scope_and_no_others_the_same(
    tenant: str, salt: str, other: str, other_salt: str
) -> None:
    """F7, part: also names that run into each other, as a + bc and ab + c."""
    mine, theirs = SCOPES.scope(tenant, salt), SCOPES.scope(other, other_salt)
    assert (mine == theirs) == ((tenant, salt) == (other, other_salt))
    assert (mine == COMMON) == (tenant == salt == "")


@given(NAMES, NAMES, NAMES, NAMES, st.integers(0, 127))
def test_an_id_belongs_to_the_scope_that_it_was_made_for_alone(
    tenant: str, salt: str, other: str, other_salt: str, branch: int
) -> None:
    """X4, part: also capsules of answers that went on elsewhere, under the names of later parts."""
    mine, theirs = SCOPES.scope(tenant, salt), SCOPES.scope(other, other_salt)
    request = SCOPES.new(mine)
    moved = RequestId(f"{request}-{branch + 1}")
    for name in (request, capsule_id(request, branch), moved, capsule_id(moved, branch)):
        assert SCOPES.belongs(name, mine)
        assert SCOPES.belongs(name, theirs) == (mine == theirs)


@given(
    st.text(max_size=60) | st.from_regex(r"req_[0-9a-f]{40}(-[0-9]+)?(\.[0-9]+)?", fullmatch=True)
)
def test_invented_ids_belong_to_no_scope(name: str) -> None:
    assert not SCOPES.belongs(name, COMMON)
    assert not SCOPES.belongs(name, SCOPES.scope("acme"))


def test_an_id_can_not_be_turned_into_one_of_another_scope() -> None:
    acme, evil = SCOPES.scope("acme"), SCOPES.scope("evil")
    theirs, own = SCOPES.new(acme), SCOPES.new(evil)
    mixed = [theirs[:28] + own[28:], own[:28] + theirs[28:], theirs.upper(), theirs + "\n"]
    assert not any(SCOPES.belongs(name, evil) for name in mixed)


def test_gateways_with_one_secret_know_each_other_s_ids_and_others_do_not() -> None:
    numbers = count()
    again = Scopes(b"one secret", draw=lambda n: next(numbers).to_bytes(n, "big"))
    strange = Scopes(b"another secret", draw=secrets.token_bytes)
    scope = SCOPES.scope("acme", "s")
    assert again.scope("acme", "s") == scope
    assert strange.scope("acme", "s") != scope
    name = CapsuleId(f"{again.new(scope)}.3")
    assert SCOPES.belongs(name, scope)
    assert not strange.belongs(name, scope)
    assert again.new(COMMON) != again.new(COMMON)
