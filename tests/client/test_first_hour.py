"""The SDK's first hour: names, ways to fork and to ask, answers as lists and values, limits of time."""

import gc
import inspect
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

import mallee
from mallee import (
    AsyncMallee,
    Beam,
    BestOfN,
    Branch,
    Capsule,
    Graph,
    InvalidParameter,
    Mallee,
    Mcts,
    Timeout,
)
from mallee.client import NotParsed, calls
from mallee.search.policies.named import read_policy
from support.imports import ROOT
from support.scripted_api import GOOD, Script, chunk

pytestmark = pytest.mark.real_time  # its server has threads
SYSTEM = [{"role": "system", "content": "A document."}]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_the_names_are_in_the_package_which_stays_light() -> None:
    assert [Graph.__name__, Beam.__name__, Mcts.__name__, mallee.Mallee] == [
        *("Graph", "Beam", "Mcts", Mallee),
    ]
    with pytest.raises(ImportError, match="cannot import name 'Mallet' from 'mallee'"):
        from mallee import Mallet  # type: ignore[attr-defined]  # noqa: F401
    code = "import sys, mallee; print([each for each in sys.modules if each.startswith('mallee.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert BestOfN(8).n == 8


@pytest.mark.parametrize(
    ("way", "suffixes"),
    [
        ({"n": 3}, 3),
        ({"suffixes": ["a", [1]]}, ["a", [1]]),
        ({"branches": "a", "n": 2}, ["a", "a"]),
        ({"suffixes": ["a", "b"], "n": 2}, ["a", "a", "b", "b"]),
        ({"messages": [user("a"), user("b")]}, [{"messages": [user("a"), user("b")]}]),
        (
            {"messages": [[user("a")], [user("b")]], "n": 1},
            [{"messages": [user("a")]}, {"messages": [user("b")]}],
        ),
        *(
            ({**way, "n": n}, None)
            for way in ({}, {"branches": 2})
            for n in (None, 2)
            if way or not n
        ),
        ({"branches": "a", "suffixes": ["b"]}, None),
        ({"messages": [user("a")], "suffixes": ["b"]}, None),
    ],
)
def test_branches_are_asked_for_by_number_suffixes_or_messages(
    server: Script, way: dict[str, Any], suffixes: Any
) -> None:
    with Mallee(server.url) as client:
        capsule = client.capsule("req_1.0")
        if suffixes is None and way != {"branches": 2, "n": None}:
            with pytest.raises(InvalidParameter, match=r"so many of each|it is 2 already"):
                capsule.fork(**way)
            return
        capsule.fork(**way).close()
    body = server.seen[-1][2]
    want = 2 if suffixes is None else suffixes
    assert body.items() >= ({"n": want} if isinstance(want, int) else {"suffixes": want}).items()


async def test_a_question_has_an_answer_and_several_have_a_list(server: Script) -> None:
    """Of a capsule, and of a branch, whose conversation goes on."""

    def ask() -> None:
        with Mallee(server.url, model="m") as client:
            capsule = client.prefill(messages=SYSTEM)
            with pytest.raises(InvalidParameter, match=r"n=2: the conversation was left open; ask"):
                capsule.fork(n=2)
            first, second = capsule.ask(["Why?", "When?"], temperature=0.0)
            assert (first.text, second.text) == (" a!", " bü🌱")
            assert second.ask("And then?").text == " a!"

    from anyio.to_thread import run_sync

    await run_sync(ask)
    async with AsyncMallee(server.url, model="m") as client:
        capsule = await client.prefill(messages=SYSTEM)
        assert (await capsule.ask("Why?")).text == " a!"
    forks = [(path, body["suffixes"]) for _, path, body, _ in server.seen if path.endswith("fork")]
    asked = [[{"messages": [user(each)]}] for each in ("Why?", "When?", "And then?")]
    assert forks == [
        ("/v1/capsules/req_1.0/fork", [*asked[0], *asked[1]]),
        ("/v1/capsules/req_2.1/fork", asked[2]),
        ("/v1/capsules/req_1.0/fork", asked[0]),
    ]
    assert all("max_tokens" not in body for _, _, body, _ in server.seen), "the server's default"


async def test_branches_are_a_list_once_they_are_waited_for(server: Script) -> None:
    def read() -> None:
        with Mallee(server.url) as client:
            branches = client.capsule("req_1.0").fork(2)
            assert repr(branches) == "Branches(None, 0 of 2 ended)"
            assert branches[1].text == " bü🌱"
            assert [each.index for each in branches] == [0, 1]
            assert (len(branches), [*reversed(branches)], branches[:1]) == (
                *(2, [branches[1], branches[0]], [branches[0]]),
            )
            assert isinstance(client.complete("x"), Branch)
            with client.stream("x", n=2) as streamed:
                assert [event.text for event in streamed.events()][:2] == [" b", " a"]
                assert [each.text for each in streamed] == [" a!", " bü🌱"]

    from anyio.to_thread import run_sync

    await run_sync(read)
    async with AsyncMallee(server.url) as client:
        capsule = await client.capsule("req_1.0")
        first, second = await capsule.fork(2)
        assert (first.text, second.text) == (" a!", " bü🌱")
        assert [each.index async for each in capsule.fork(2)] == [0, 1]
        assert [event.index async for event in capsule.fork(2).events()] == [1, 0, 1, 1, 0]


def test_a_policy_may_be_named(server: Script) -> None:
    named = pytest.raises(InvalidParameter, match="no policy has the name; the nearest is `beam`")
    with Mallee(server.url) as client, named:
        client.search("beem", "x")
    with pytest.raises(InvalidParameter, match="no such field; the nearest is `width`"):
        read_policy({"type": "beam", "withd": 2})


def test_help_has_the_keywords_of_a_fork() -> None:
    for kind in (Capsule, Branch):
        shown = inspect.signature(kind.fork).parameters
        assert [*shown][:6] == ["self", "branches", "n", "messages", "suffixes", "at"]
        assert {*calls.Sampling.__annotations__} < {*shown}
        assert not any(each.kind is each.VAR_KEYWORD for each in shown.values())
    assert "ttl_s" in inspect.signature(Mallee.prefill).parameters


class City(BaseModel):
    """A value that an answer is read as."""

    name: str
    people: int


def answer(text: str, finish: str) -> bytes:
    return chunk(0, text, finish, mallee={}) + b"data: [DONE]\n\n"


def test_a_pydantic_model_is_a_form_and_its_answer_a_value(server: Script) -> None:
    server.stream = answer('{"name": "Mildura", "people": 34565}', "stop")
    with Mallee(server.url) as client:
        found = client.complete("A city:", response_format=City)
        assert found.parsed == City(name="Mildura", people=34565)
        form = server.seen[-1][2]["response_format"]
        assert form["json_schema"]["schema"] == City.model_json_schema()
        assert (form["type"], form["json_schema"]["name"]) == ("json_schema", "City")
        (forked,) = client.capsule("req_1.0").fork("x", response_format=City)
        assert forked.parsed == found.parsed
        for text, finish, why in (
            ('{"name": "Mil', "length", "ended with 'length'.*give max_tokens enough"),
            ('{"name": 1}', "stop", "2 validation errors for City"),
        ):
            server.stream = answer(text, finish)
            with pytest.raises(NotParsed, match=f"branch 0 has no parsed value: .*{why}"):
                client.complete("A city:", response_format=City).parsed  # noqa: B018
        with pytest.raises(NotParsed, match="was no Pydantic model"):
            client.complete("A city:").parsed  # noqa: B018
        with pytest.raises(InvalidParameter, match="response_format='int': give a Pydantic model"):
            client.complete("A city:", response_format=int)


@pytest.fixture
def slow(server: Script, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set no request but a GET is answered."""
    gate = threading.Event()
    plain = Script.answer

    def answer(self: Script, method: str, path: str, body: Any) -> Any:
        if method != "GET":
            gate.wait()
        return plain(self, method, path, body)

    monkeypatch.setattr(Script, "answer", answer)
    yield gate
    gate.set()


async def test_a_server_that_is_silent_for_too_long_is_a_timeout(
    server: Script, slow: threading.Event
) -> None:
    """With what to do; it is not taken for a server that isn't there."""
    why = r"nothing came from http://127\S+ after 0.05 s; raise the client's or wait's timeout, or pre"
    async with AsyncMallee(server.url, timeout=0.05) as client:
        for call in (lambda: client.prefill("long"), lambda: client.complete("x")):
            with pytest.raises(Timeout, match=why) as raised:
                await call()
            assert raised.value.fields["timeout_s"] == 0.05


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_wait_has_a_limit_after_which_the_branches_end(
    server: Script, is_async: bool
) -> None:
    server.stream, server.cut = chunk(0, "x") * 100_000, 200
    why = r"Branches\('req_2', 0 of 1 ended, .*\) had not ended after 0.1 s; raise wait's timeout"

    def wait() -> None:
        with Mallee(server.url) as client:
            branches = client.stream("x")
            for again in (branches.wait, branches.__len__):
                with pytest.raises(Timeout, match=why):
                    again(**({"timeout": 0.1} if again == branches.wait else {}))
            assert branches.branches[0].text.startswith("x")
            assert [*branches.events()] == [], "it is closed"

    if not is_async:
        from anyio.to_thread import run_sync

        await run_sync(wait)
        return
    async with AsyncMallee(server.url) as client:
        branches = client.stream("x")
        with pytest.raises(Timeout, match=why):
            await branches.wait(timeout=0.1)
        server.stream = GOOD
        assert len(await client.stream("x", n=2).wait(timeout=30)) == 2


async def test_a_wait_s_limit_holds_before_the_first_token_too(
    server: Script, slow: threading.Event
) -> None:
    """A request that waits for a worker sends nothing. A client that blocks has sent it before."""
    why = r"nothing came from http://127\S+ after 0.05 s; raise the client's or wait's timeout"
    async with AsyncMallee(server.url) as client:
        with pytest.raises(Timeout, match=why):
            await client.stream("x").wait(timeout=0.05)


def test_silence_in_a_stream_is_told_by_the_wait_s_limit(server: Script) -> None:
    server.stream = chunk(0, "x") + b"data: [DONE]\n\n"
    with Mallee(server.url) as client:
        branches = client.stream("x")
        assert branches.wait(timeout=30)[0].text == "x"
        assert branches._response.request.extensions["timeout"]["read"] == 30


@pytest.mark.parametrize("num_read", [0, 1])
def test_a_fork_that_is_dropped_hangs_up(server: Script, num_read: int) -> None:
    """U3 has its engine in tests/api: here the connection is given back at once, unread or read in part.

    No collection of garbage is needed for it.
    """
    server.stream = chunk(0, "x") * 1000
    with Mallee(server.url) as client:
        capsule = client.capsule("req_1.0")
        gc.disable()
        try:
            for _ in range(3):
                branches = capsule.fork(1)
                response = branches._response
                for _ in range(num_read):
                    next(branches.events())
                assert not response.is_closed
                del branches
                for thread in threading.enumerate():
                    if thread.name == "dropped":
                        thread.join()
                assert response.is_closed
        finally:
            gc.enable()


def test_events_go_on_where_they_were_left(server: Script) -> None:
    """Though each iteration is one of its own, and a single one keeps branches alive."""
    server.stream = chunk(0, "a") + chunk(0, "b") + chunk(0, "c", "stop") + b"data: [DONE]\n\n"
    with Mallee(server.url) as client:
        branches = client.capsule("req_1.0").fork(1)
        assert next(branches.events()).text == "a"
        assert next(branches.events()).text == "b"
        assert branches.wait()[0].text == "abc"
        assert [each.text for each in client.capsule("req_1.0").fork(1).events()] == ["a", "b", "c"]


def test_all_requests_of_a_client_may_be_one_session(server: Script) -> None:
    with Mallee(server.url, session="grove") as client:
        client.prefill("x")
        client.complete("x")
        client.complete("x", session="other")
        client.session("mine").prefill("x")
        client.capsule("req_1.0").fork(1).close()
    names = [body["mallee"]["session"] for *_, body, _ in server.seen if body]
    assert names == ["grove", "grove", "other", "mine", "grove"]
    made = [Mallee(server.url, session=True).session_name for _ in range(2)]
    assert made[0] != made[1]
    assert Mallee(server.url).session_name is None


LIGHT = """
import sys, types

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in "numpy numba xxhash typer textual torch ray pydantic yaml".split():
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Refusing())
import mallee
from mallee import client
for name in client.__all__:
    getattr(mallee, name)
import mallee.client.view
mallee.Mallee("http://127.0.0.1:9").close()
from mallee.cli.entry import main
main()
"""


def test_the_sdk_needs_no_more_than_is_declared_and_the_command_says_what_it_needs() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split("[<>=]", each)[0] for each in declared}
    assert names == {"httpx", "msgspec", "rich"}
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True)
    assert done.returncode == 1
    assert re.fullmatch(
        r"mallee: commands need \w+, which .* pip install 'mallee\[cli\]'.*\n", done.stderr
    )
