"""NATS subjects."""

import pytest

from mallee.protocol.errors import ConfigError
from mallee.protocol.subjects import Subjects, check_token


def test_subjects_name_fleet_kind_and_worker() -> None:
    subjects = Subjects.of("prod-1")
    assert subjects.events("w0") == "mallee.prod-1.events.w0"
    assert subjects.lease("w0") == "mallee.prod-1.lease.w0"
    assert subjects.snapshot("w0") == "mallee.prod-1.snapshot.w0"
    assert subjects.admin("m0") == "mallee.prod-1.admin.m0"
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
