"""Keys of files and of the environment, the callers they make, and their limits."""

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mallee.gateway.access.access import Access
from mallee.gateway.access.keys import NewKey, add_to, digest, new_key, parse, read_file
from mallee.gateway.access.visits import UNLIMITED
from mallee.protocol.api.shared import MAX_TENANT
from mallee.protocol.errors import (
    ConfigError,
    Forbidden,
    InvalidParameter,
    QuotaExceeded,
    QuotaTooSmall,
    Unauthorized,
)
from mallee.protocol.ids import CapsuleId
from support.waiting import until

ALICE, BOB = new_key("alice", "client", "acme"), new_key("bob", "client", None)
PROXY, ROOT = new_key("proxy", "proxy", None), new_key("root", "operator", None)


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def write(file: Path, *keys: NewKey, **more: Any) -> Path:
    """A file of `keys`, each with the fields of `more`."""
    text = yaml.safe_dump({"keys": [{**key.entry, **more} for key in keys]})
    # In one step, as a mounted secret changes.
    (file.parent / "next").write_text(text)
    os.replace(file.parent / "next", file)
    return file


@pytest.fixture
def made(tmp_path: Path, clock: Clock) -> Callable[..., Access]:
    def make(*keys: NewKey, **more: Any) -> Access:
        file = write(tmp_path / "keys.yaml", *keys, **more)
        return Access(file, {}, clock=clock, wall_clock=clock)

    return make


def test_a_key_is_put_into_a_file_whole_or_not_at_all(tmp_path: Path) -> None:
    """All that stands there stays as it is written, the owner and the mode too; a new file is private."""
    file = tmp_path / "keys.yaml"
    add_to(file, ALICE.entry)
    assert file.stat().st_mode & 0o777 == 0o600
    link = tmp_path / "link.yaml"
    link.symlink_to(file)
    add_to(link, BOB.entry)
    assert link.is_symlink()
    assert [key.name for key in read_file(file)] == ["alice", "bob"]
    for before, kept in (
        (
            f"# ours\nkeys:\n  - name: a  # first\n    sha256: '{'0' * 64}'",
            "# ours\nkeys:\n  - name: a  # first",
        ),
        (f"keys: [{{name: a, sha256: '{'0' * 64}'}}] # ours", "] # ours"),
        ("keys: []  # none yet\n", "# none yet"),
    ):
        file.write_text(before)
        file.chmod(0o640)
        add_to(file, BOB.entry)
        text = file.read_text()
        assert kept in text
        assert read_file(file)[-1].name == "bob"
        assert file.stat().st_mode & 0o777 == 0o640
        with pytest.raises(ConfigError, match="bob: another one has the same name"):
            add_to(file, new_key("bob", "client", None).entry)
        assert file.read_text() == text
    file.write_text("keys: [")
    with pytest.raises(ConfigError, match="no YAML"):
        add_to(file, BOB.entry)
    with pytest.raises(ConfigError, match=r"can't be written: No such file .*; it is as it was"):
        add_to(tmp_path / "nowhere" / "keys.yaml", BOB.entry)
    assert file.read_text() == "keys: ["
    assert {each.name for each in tmp_path.iterdir()} == {"keys.yaml", "link.yaml"}


def test_a_file_that_others_read_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path / "keys.yaml", ALICE)
    file.chmod(0o640)  # as a mounted secret
    read_file(file)
    assert not caplog.records
    file.chmod(0o644)
    read_file(file)
    assert "has mode 644: every user of this machine reads it; chmod 600" in caplog.text


async def test_a_broken_file_and_the_next_expiry_are_shown(
    made: Callable[..., Access], clock: Clock, tmp_path: Path
) -> None:
    """Until it is right again, also if it comes back as it was; keys that have expired count no more."""
    access = made(ALICE, expires="1970-01-12T13:46:50Z")
    assert access.expiries == {"key": clock.now + 10.0, "certificate": 0.0}
    assert not access.fault
    file = tmp_path / "keys.yaml"
    file.rename(tmp_path / "kept")
    file.write_text("keys: [")
    await access.reload()
    assert "no YAML" in access.fault
    (tmp_path / "kept").rename(file)
    os.utime(file)
    await access.reload()
    assert not access.fault
    clock.now += 10.0
    assert access.expiries["key"] == 0.0


def test_without_keys_or_with_that_of_the_environment_callers_are_the_operator(
    clock: Clock,
) -> None:
    access = Access(None, {"MALLEE_API_KEY": ""})
    assert not access.has_keys
    caller = access.caller(None, None)
    assert (caller.tenant, caller.is_operator, caller.visit) == ("", True, UNLIMITED)
    assert access.caller("whatever", "acme").tenant == "acme"
    with pytest.raises(InvalidParameter, match="128 characters"):
        access.caller(None, "x" * (MAX_TENANT + 1))
    access = Access(None, {"MALLEE_API_KEY": "0123456789abcdef"})
    caller = access.caller("0123456789abcdef", None)
    assert (caller.tenant, caller.is_operator) == ("", True)
    with pytest.raises(ConfigError, match="has 5 characters") as caught:
        Access(None, {"MALLEE_API_KEY": "short"})
    assert "short" not in str(caught.value)


def test_keys_name_their_tenants_and_rights(made: Callable[..., Access]) -> None:
    access = made(ALICE, BOB, PROXY, ROOT)
    found = {key.entry["name"]: access.caller(key.token, None) for key in (ALICE, BOB, PROXY, ROOT)}
    assert {name: caller.tenant for name, caller in found.items()} == {
        "alice": "acme",
        "bob": "bob",
        "proxy": "proxy",
        "root": "root",
    }
    assert [name for name, caller in found.items() if caller.is_operator] == ["root"]
    for wrong in (None, "", "x", ALICE.token[:-1], ALICE.token + "x", ALICE.entry["sha256"]):
        with pytest.raises(Unauthorized):
            access.caller(wrong, None)


def test_a_tenant_s_name_is_believed_from_proxies_and_operators_alone(
    made: Callable[..., Access],
) -> None:
    access = made(ALICE, PROXY, ROOT)
    assert access.caller(PROXY.token, "evil").tenant == "evil"
    assert access.caller(ROOT.token, "evil").tenant == "evil"
    assert access.caller(ALICE.token, "acme").tenant == "acme"
    with pytest.raises(Forbidden, match="x-tenant-id"):
        access.caller(ALICE.token, "evil")
    for wrong in ("", "x" * (MAX_TENANT + 1)):
        with pytest.raises(InvalidParameter, match="x-tenant-id"):
            access.caller(PROXY.token, wrong)


def test_a_key_ends_when_it_expires(made: Callable[..., Access], clock: Clock) -> None:
    access = made(ALICE, expires="1970-01-12T13:46:50Z")  # 1,000,010 s
    assert access.caller(ALICE.token, None).tenant == "acme"
    clock.now += 10
    with pytest.raises(Unauthorized):
        access.caller(ALICE.token, None)


async def test_a_changed_file_counts_without_a_restart_and_a_wrong_one_does_not(
    made: Callable[..., Access], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    access, file = made(ALICE), tmp_path / "keys.yaml"
    write(file, BOB, weight=3.0)
    await access.reload()
    assert access.caller(BOB.token, None).weight == 3.0
    assert access.weights == {"bob": 3.0}
    with pytest.raises(Unauthorized):
        access.caller(ALICE.token, None)
    for wrong in ("keys: [{name: x, sha256: hush-hush}]", "{", "hush-hush"):
        file.write_text(wrong)
        await access.reload()
        assert access.caller(BOB.token, None).tenant == "bob"
        assert "stay as they were" in caplog.text
        assert "hush" not in caplog.text
        caplog.clear()
    file.unlink()
    await access.reload()
    assert access.caller(BOB.token, None).tenant == "bob"
    write(file)
    await access.reload()
    assert access.has_keys, "a file without keys opens nothing"
    with pytest.raises(Unauthorized):
        access.caller(None, None)


async def test_the_file_is_followed_in_the_background(
    made: Callable[..., Access], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    access = made(ALICE)
    access.start_up()
    write(tmp_path / "keys.yaml", BOB)
    await until(lambda: "1 API keys were read" in caplog.text)
    assert access.caller(BOB.token, None).tenant == "bob"
    await access.close()
    await asyncio.sleep(0)
    assert access.tasks.failure is None


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[]", "give `keys"),
        ("keys: 5", "keys"),
        ("keys: [{name: a}]", "keys.0.sha256"),
        ("keys: [{name: a, sha256: hush}]", "keys.0.sha256"),
        ("keys: [{name: a b, sha256: hush}]", "keys.0.name"),
        (f"keys: [{{name: a, sha256: {digest('x')}, token: hush}}]", "keys.0.token"),
        (f"keys: [{{name: a, sha256: {digest('x')}, role: hush}}]", "keys.0.role"),
        (f"keys: [{{name: a, sha256: {digest('x')}, expires: 2027-01-01T00:00:00}}]", "time zone"),
        (f"keys: [{{name: a, sha256: {digest('x')}, max_running: 0}}]", "max_running"),
        (
            f"keys: [{{name: a, sha256: {digest('x')}}}, {{name: a, sha256: {digest('y')}}}]",
            "key a: another one has the same name",
        ),
        (
            f"keys: [{{name: a, sha256: {digest('x')}}}, {{name: b, sha256: {digest('x')}}}]",
            "key b: another one has the same sha256",
        ),
        ("keys: [{hush", "no YAML, line "),
    ],
)
def test_a_wrong_file_is_refused_with_its_fault_and_without_its_values(
    text: str, fault: str
) -> None:
    with pytest.raises(ConfigError, match="FILE: ") as caught:
        parse(text, "FILE")
    assert fault in str(caught.value)
    assert "hush" not in str(caught.value)


def test_beyond_loopback_a_key_is_needed(made: Callable[..., Access]) -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        Access(None, {}).check_listening(host)
    for host in ("0.0.0.0", "::", "10.0.0.7", "example.com", ""):
        with pytest.raises(ConfigError, match="MALLEE_API_KEY"):
            Access(None, {}).check_listening(host)
        made(ALICE).check_listening(host)


def use(access: Access, key: NewKey = ALICE) -> Any:
    return access.caller(key.token, None).visit


def test_requests_and_branches_at_once_are_limited_by_key(made: Callable[..., Access]) -> None:
    access = made(ALICE, BOB, max_running=2)
    refusal = pytest.raises(QuotaExceeded, match="2 of 2 requests at once")
    with use(access), use(access), use(access, BOB), refusal, use(access):
        raise AssertionError("a third one is not let in")
    with use(access), use(access):
        pass
    access = made(ALICE, max_branches=8)
    first, second, third = (use(access) for _ in range(3))
    with first, second:
        first.begin(6, 10)
        with pytest.raises(QuotaExceeded, match="6 of 8 branches at once"):
            second.begin(3, 10)
        second.begin(2, 10)
        with pytest.raises(
            QuotaTooSmall, match="needs 9 branches at once, and its API key may have 8"
        ):
            second.begin(9, 10)  # whatever ends: no later moment is a better one
    with third:
        third.begin(8, 10)


async def test_a_file_that_could_not_be_read_once_is_read_again(
    made: Callable[..., Access], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A key that was taken out doesn't stay because the file was put there before it was readable."""
    access, file = made(ALICE), tmp_path / "keys.yaml"
    file.unlink()
    file.mkdir()  # there, and can't be read
    for _ in range(3):
        await access.reload()
    assert caplog.text.count("stay as they were") == 1
    file.rmdir()
    write(file, BOB)
    await access.reload()
    with pytest.raises(Unauthorized):
        access.caller(ALICE.token, None)


def test_requests_per_minute_come_back_evenly(made: Callable[..., Access], clock: Clock) -> None:
    access = made(ALICE, requests_per_minute=30)
    for _ in range(30):
        with use(access):
            pass
    with pytest.raises(QuotaExceeded) as caught, use(access):
        raise AssertionError("the minute's requests are used")
    assert caught.value.fields["retry_after_s"] == pytest.approx(2.0)
    clock.now += 2.0
    with use(access):
        pass
    with pytest.raises(QuotaExceeded), use(access):
        raise AssertionError("one came back, not two")


def test_tokens_per_minute_are_owed_by_the_next_request(
    made: Callable[..., Access], clock: Clock
) -> None:
    access = made(ALICE, tokens_per_minute=600)
    caller = access.caller(ALICE.token, None)
    with use(access), use(access):
        caller.visit.begin(1, 500)
        caller.visit.charge(700)  # an answer that goes on is not cut
        with pytest.raises(QuotaExceeded):
            caller.visit.begin(1, 1)  # of another that came in time
    with pytest.raises(QuotaExceeded, match="600 tokens per minute") as caught, use(access):
        raise AssertionError("600 too many were used")
    assert caught.value.fields["retry_after_s"] == pytest.approx(60.1)
    clock.now += 60.2
    with use(access):
        pass
    clock.now += 60.0
    with use(access):
        caller.visit.begin(1, 100_000)  # more than a whole minute's: it is taken, and owed


def test_capsules_are_limited_by_number_and_tokens_while_they_are_kept(
    made: Callable[..., Access],
) -> None:
    caller = made(ALICE, max_capsules=2, max_capsule_tokens=100).caller(ALICE.token, None)
    kept = {CapsuleId("a"), CapsuleId("b")}

    def making(tokens: int) -> Any:
        return caller.visit.making(tokens, kept.__contains__)

    def check(tokens: int, refusal: str) -> None:
        with pytest.raises(QuotaExceeded, match=refusal), making(tokens):
            raise AssertionError("one more is too much")

    with making(60) as keep:
        keep(CapsuleId("a"))
    with making(30) as keep:
        check(1, "2 of 2 capsules")  # one of them is under way
        keep(CapsuleId("b"))
    check(1, "2 of 2 capsules")
    kept.remove(CapsuleId("b"))
    check(41, "60 of 100 tokens in capsules")
    with making(40):
        pass  # it failed, so it doesn't count
    with making(40) as keep:
        keep(CapsuleId("b"))
    kept.add(CapsuleId("b"))
    check(1, "2 of 2 capsules")
    with pytest.raises(QuotaTooSmall, match="101 tokens in capsules"), making(101):
        raise AssertionError("it is more than all may have together")
    none = made(BOB, max_capsules=0).caller(BOB.token, None).visit
    with pytest.raises(QuotaTooSmall), none.making(1, kept.__contains__):
        raise AssertionError("the key may keep none")
    caller.visit.unkeep(CapsuleId("b"))  # unpinned: it may stay while there is room
    caller.visit.unkeep(CapsuleId("b"))
    with making(40) as keep:
        check(1, "2 of 2 capsules")
        keep(CapsuleId("b"))
    check(1, "2 of 2 capsules")


async def test_a_reload_changes_limits_and_keeps_what_was_used(
    made: Callable[..., Access], tmp_path: Path
) -> None:
    access = made(ALICE, requests_per_minute=2)
    with use(access):
        pass
    write(tmp_path / "keys.yaml", ALICE, requests_per_minute=2, max_running=1)
    await access.reload()
    with use(access), pytest.raises(QuotaExceeded, match="at once"), use(access):
        raise AssertionError("the new limit holds")
    with pytest.raises(QuotaExceeded, match="per minute"), use(access):
        raise AssertionError("what was used before counts")
