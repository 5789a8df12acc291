"""Turns and connections of callbacks, and the setting that allows URLs."""

import asyncio

import msgspec
import pytest
from pydantic import ValidationError

from mallee.api.callbacks.callbacks import (
    MAX_CALLS,
    MAX_SCOPE_CALLS,
    AllowedUrls,
    Callbacks,
)
from mallee.protocol.errors import CallbackFailed, InvalidParameter
from mallee.protocol.ids import Scope
from mallee.runtime.addresses import free_port
from mallee.runtime.config import AppConfig
from mallee.runtime.tasks import Tasks
from support.verifiers import verdict, verifying
from support.waiting import until


class Question(msgspec.Struct):
    branches: list[dict[str, int]] = msgspec.field(default_factory=lambda: [{"index": 0}])


class Answer(msgspec.Struct):
    scores: list[float]


async def _turns(
    callbacks: Callbacks, scopes: list[str], over: asyncio.Event
) -> tuple[list[str], list[asyncio.Task[None]]]:
    """The scopes of those that got a turn, which they keep until `over`; and the tasks of all."""
    taken: list[str] = []

    async def take(scope: str) -> None:
        async with callbacks.turn(Scope(scope)):
            taken.append(scope)
            await over.wait()

    async with callbacks.turn(Scope("first")):
        pass  # it reads certificates in a thread
    tasks = [asyncio.create_task(take(scope)) for scope in scopes]
    for _ in range(20):
        await asyncio.sleep(0)
    return taken, tasks


async def test_a_scope_has_some_of_the_turns_and_all_together_have_so_many() -> None:
    """F30, part: more wait, and are served once others are over."""
    tasks = Tasks("a test")
    callbacks, over = Callbacks(timeout_s=1, tasks=tasks), asyncio.Event()
    many = ["a"] * (MAX_SCOPE_CALLS + 5)
    taken, running = await _turns(callbacks, [*many, "b"], over)
    assert sorted(taken) == ["a"] * MAX_SCOPE_CALLS + ["b"]
    others = [f"s{i}" for i in range(MAX_CALLS)]
    more, waiting = await _turns(callbacks, others, over)
    assert len(taken) + len(more) == MAX_CALLS
    over.set()
    await asyncio.gather(*running, *waiting)
    assert (len(taken), len(more)) == (len(many) + 1, MAX_CALLS)
    await tasks.close()
    assert tasks.failure is None


async def test_calls_are_counted_by_their_ends_and_connections_close_with_the_service() -> None:
    """F30, part: also a call that is given up."""
    tasks, ends = Tasks("a test"), []
    callbacks = Callbacks(
        timeout_s=0.2, tasks=tasks, count=lambda outcome, seconds: ends.append(outcome)
    )
    async with verifying() as verifier:

        async def ask(flaw: str = "", url: str = verifier.url) -> Answer:
            async with callbacks.turn(Scope("s")) as turn:
                return await turn.ask(url, Question(), Answer, lambda answer: flaw)

        assert (await ask()).scores == [1.0]
        with pytest.raises(CallbackFailed, match="too few"):
            await ask("too few")
        verifier.reply = lambda question: asyncio.Future()
        given_up = asyncio.create_task(ask())
        await until(lambda: verifier.running == 1)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        with pytest.raises(CallbackFailed, match=r"within 0\.2 s"):
            await ask()
        verifier.reply = lambda question: verdict([0.5])
        assert (await ask()).scores == [0.5]
        with pytest.raises(CallbackFailed, match="can't be reached"):
            await ask(url=f"http://127.0.0.1:{free_port()}/")
    assert ends == ["answered", "malformed", "abandoned", "slow", "answered", "unreachable"]
    assert callbacks._transport is not None
    assert len(tasks._tasks) == 1  # the connections'
    await tasks.close()
    assert callbacks._transport._pool.connections == []  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "url",
    [
        *("127.0.0.1:9000", "ftp://a/b", "http://", "http://u:p@a/b", "http://a/b?c"),
        *("http://a/b#c", "http://a/../b", "http://a/./b", "http://a/%2e", "http://a/b c"),
        *("http://a:123456/", "http://é/"),
    ],
)
def test_a_setting_that_is_no_plain_url_is_refused(url: str) -> None:
    """F30, part: with the form that it should have."""
    with pytest.raises(ValidationError, match="no plain URL"):
        AppConfig(model="m", http={"callbacks": [url]})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("allowed", "url", "is_allowed"),
    [
        ("http://verifier.test", "http://verifier.test:80/a/b?c", True),
        ("http://verifier.test", "http://Verifier.Test/", True),
        ("http://verifier.test", "http://verifier.test.evil.test/", False),
        ("http://verifier.test", "http://verifier.testing/", False),
        ("http://verifier.test/a/", "http://verifier.test/a", True),
        ("http://verifier.test/a", "http://verifier.test/a/", True),
        ("http://verifier.test/a", "http://verifier.test//a", False),
        ("http://verifier.test/a", "http://verifier.test/b/a", False),
        ("http://verifier.test/a", "http://verifier.test/A", False),
        ("http://verifier.test/a", "http://verifier.test/ab", False),
        ("http://verifier.test/a/", "http://verifier.test/a/b.c?x=%2F..&y=[]", True),
        ("https://verifier.test/a", "https://verifier.test:443/a", True),
        ("https://verifier.test/a", "http://verifier.test/a", False),
        ("http://[::1]:9000/a", "http://[::1]:9000/a", True),
        ("http://[::1]:9000/a", "http://[::2]:9000/a", False),
        ("http://127.0.0.1:9000/a", "http://localhost:9000/a", False),
        ("http://127.0.0.1:9000/a", "http://127.0.0.1/a", False),
        ("http://127.0.0.1:9000/a", "http://127.0.0.1:99999/a", False),
    ],
)
def test_a_url_is_allowed_by_scheme_host_port_and_path(
    allowed: str, url: str, is_allowed: bool
) -> None:
    """F30, part: hosts as they are written, paths part by part."""
    AppConfig(model="m", http={"callbacks": [allowed]})  # type: ignore[arg-type]
    urls = AllowedUrls((allowed,))
    if is_allowed:
        urls.check("url", url)
    else:
        with pytest.raises(InvalidParameter, match=r"at or below none .*http\.callbacks"):
            urls.check("url", url)


@pytest.mark.parametrize(
    "url",
    [
        "http://a.test/verify/../other",
        "http://a.test/verify/%2e%2e/other",
        "http://a.test/verify\\..\\other",
        "http://b@a.test/verify",
        "http://a.test@evil.test/verify",
        "http://a.test/verify#x",
        "http://999.0.0.1:9000/verify",
        "http://a.test/verify?a b",
        "HTTP://a.test/verify",
        "//a.test/verify",
        "file:///etc/passwd",
        "http://a.test/verify?" + "a" * 3000,
        "",
    ],
)
def test_what_is_no_sound_url_is_refused_with_the_form(url: str) -> None:
    """F30, part: of a request's URL, whatever is allowed."""
    with pytest.raises(InvalidParameter, match="of at most 2048 characters, without a user"):
        AllowedUrls(("http://a.test/verify",)).check("url", url)
