"""The SDK against a real loopback server that speaks in awkward pieces."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from io import StringIO
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from rich.console import Console

import mallee.client
from mallee.client import (
    ApiError,
    AsyncMallee,
    Branch,
    ConnectionFailed,
    ContextLengthExceeded,
    InvalidParameter,
    Mallee,
    MalleeError,
    NoCapsule,
    Overloaded,
    SessionNode,
    SessionTree,
    StreamBroken,
    Timeout,
    ToolCall,
    UnknownCapsule,
    Usage,
    calls,
)
from mallee.client.base import connections
from mallee.client.html import MAX_DEPTH, nodes_html, nodes_text
from mallee.client.results import choice_events
from mallee.client.view import live, render
from mallee.protocol.api.capsules import ImportRequest
from mallee.protocol.api.generate import ChatRequest, CompletionRequest, ForkRequest, RestoreRequest
from mallee.protocol.api.shared import Extras
from mallee.protocol.errors import CapsulesFull, ConfigError
from support.blocking import TARGET, generated
from support.certificates import certificate
from support.scripted_api import EXTRAS, GOOD, Script, chunk

pytestmark = pytest.mark.real_time  # its server has threads


@pytest.mark.parametrize("cut", [1, 2, 7, 10_000])
def test_a_fork_streams_its_branches_however_the_bytes_are_cut(server: Script, cut: int) -> None:
    server.cut = cut
    with Mallee(server.url, api_key="k") as client, client.prefill("text", ttl_s=5) as capsule:
        assert (capsule.worker, capsule.tokens, capsule.prefill_tokens) == ("w1", 100, 90)
        branches = capsule.fork([" a?", [1, 2]], max_tokens=4, temperature=0)
        events = [(e.index, e.text, e.finish_reason) for e in branches.events()]
        assert events == [(1, " b", None), (0, " a", None), (1, "ü🌱", None), (1, "", "stop"),
                          (0, "!", "length")]  # fmt: skip
        first, second = branches.wait()
    assert (first.text, second.text) == (" a!", " bü🌱")
    assert (second.worker, second.cached_tokens, second.prefill_tokens) == ("w1", 100, 3)
    assert first.ttft_ms is not None
    assert first.total_ms is not None
    assert 0 < first.ttft_ms <= first.total_ms
    posts = [(path, body) for method, path, body, _ in server.seen if method == "POST"]
    assert posts[0] == ("/v1/capsules", {"prompt": "text", "ttl_s": 5})
    assert posts[1][0] == "/v1/capsules/req_1.0/fork"
    assert posts[1][1] == {
        "suffixes": [" a?", [1, 2]], "max_tokens": 4, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert server.seen[-1][:2] == ("DELETE", "/v1/capsules/req_1.0")
    assert {key for *_, key in server.seen} == {"Bearer k"}


def test_the_servers_errors_keep_their_type_and_text(server: Script) -> None:
    with Mallee(server.url) as client:
        with pytest.raises(UnknownCapsule, match="capsule 'x' is not held"):
            client.capsule("x")
        with pytest.raises(ContextLengthExceeded, match="too long") as refused:
            client.complete("hi", max_tokens=10**6)
        assert refused.value.fields["http_status"] == 400
        with pytest.raises(ApiError, match="HTTP 502"):
            client.complete("hi", max_tokens=13)
        assert client.health() == {"status": "unavailable"}
        server.health = (404, b"Path '/health' not found.")
        health = client.health()
        assert health["status"] == "unavailable"
        assert "Path '/health' not found" in health["reason"]
        assert "starting or stopping" in health["reason"]
        with pytest.raises(InvalidParameter, match="either prompt or messages"):
            client.stream()


@pytest.mark.parametrize(
    "proxy", ["http://127.0.0.1:1", "socks5://127.0.0.1:1", "wais://a:1", "http://a:port"]
)
def test_loopback_is_reached_past_proxies_of_the_environment(
    server: Script, proxy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And a proxy that can't be used for others is refused in a sentence with the remedy."""
    monkeypatch.delenv("no_proxy", raising=False)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, proxy)
    for url in (server.url, server.url.replace("127.0.0.1", "localhost")):
        with Mallee(url) as client:
            assert client.health() == {"status": "unavailable"}
    monkeypatch.setenv("SSL_CERT_FILE", certificate(tmp_path, "ours").cert)
    tls = connections(httpx.Client, "https://localhost:1")._transport._pool._ssl_context  # type: ignore[attr-defined]
    assert len(tls.get_ca_certs()) == 1, "an authority of one's own holds on loopback too"
    if proxy != "http://127.0.0.1:1":
        with pytest.raises(ConfigError, match=r"proxy that the environment names .* no_proxy"):
            Mallee("http://mallee.example:8000")


DELETED = ("DELETE", "/v1/capsules/req_1.0")


PINNED = ("POST", "/v1/capsules/req_1.0/pin")


@pytest.mark.parametrize(("pinned", "pins"), [(False, [PINNED]), (True, []), (None, [])])
@pytest.mark.parametrize("error", [None, KeyboardInterrupt, ZeroDivisionError])
def test_a_block_keeps_the_capsule_that_it_is_given_and_deletes_it(
    server: Script,
    pinned: bool | None,
    pins: list[tuple[str, str]],
    error: type[BaseException] | None,
) -> None:
    """K15, part: handles with `with`: kept from the first statement on, released whatever ends the block."""
    server.pinned = pinned

    def ends() -> Any:
        return nullcontext() if error is None else pytest.raises(error)

    with Mallee(server.url) as client:
        with ends(), client.capsule("req_1.0") as capsule:
            assert [seen[:2] for seen in server.seen[1:]] == pins
            assert bool(capsule.data.pinned) == bool(pins or pinned)
            capsule.fork(2).wait()
            if error is not None:
                raise error
        assert [seen[:2] for seen in server.seen[-2:]] == [
            ("POST", "/v1/capsules/req_1.0/fork"),
            DELETED,
        ]
        for is_gone in (False, True):  # also one that the block makes, and that was deleted in it
            server.is_gone = is_gone
            with ends(), client.prefill("text") as capsule:
                if error is not None:
                    raise error
            assert server.seen[-1][:2] == DELETED
        with pytest.raises(UnknownCapsule):
            capsule.delete()


async def test_an_async_block_keeps_the_capsule_that_it_is_given_and_deletes_it(
    server: Script,
) -> None:
    """K15, part: by the awaited handle, by the one to be awaited, and when the block is cancelled."""
    server.pinned = False
    async with AsyncMallee(server.url) as client:
        async with client.capsule("req_1.0") as capsule:
            assert capsule.data.pinned
        async with await client.capsule("req_1.0"):
            pass
        with pytest.raises(ZeroDivisionError):
            async with client.capsule("req_1.0"):
                raise ZeroDivisionError
        for block in (client.capsule("req_1.0"), client.prefill("text")):
            with anyio.move_on_after(0.2) as scope:
                async with block:
                    await anyio.sleep_forever()
            assert scope.cancelled_caught
    kept = [("GET", "/v1/capsules/req_1.0"), PINNED, DELETED]
    made = [("POST", "/v1/capsules"), DELETED]
    assert [seen[:2] for seen in server.seen] == [*kept * 4, *made]


def test_a_block_whose_capsule_is_not_kept_is_not_entered(server: Script) -> None:
    """K15, part: the capsule stays as it was."""
    server.pinned, server.is_full = False, True
    client = Mallee(server.url)
    with client, pytest.raises(CapsulesFull, match="no room"), client.capsule("req_1.0"):
        raise AssertionError("entered")
    assert DELETED not in [seen[:2] for seen in server.seen]


def test_an_ended_branch_is_kept_in_a_block(server: Script) -> None:
    """K15, part: its capsule, in one request."""
    with Mallee(server.url) as client:
        _, branch = client.complete("hi", n=2, keep=True, priority=3)
        assert server.seen[0][2]["mallee"] == {"keep": True, "priority": 3}
        server.seen.clear()
        with branch.pin(ttl_s=9) as capsule:
            assert capsule.data.pinned
        assert server.seen[0][:3] == ("POST", "/v1/capsules/req_2.1/pin", {"ttl_s": 9})
        assert [seen[:2] for seen in server.seen[1:]] == [DELETED]


def test_prefills_and_forks_ask_for_what_they_were_given(server: Script) -> None:
    """F31, part: the prompt of a chat with tools begins with that of its prefill."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    template = {"tools": tools, "chat_template_kwargs": {"enable_thinking": False}}
    messages = [{"role": "user", "content": "x"}]
    with Mallee(server.url, model="m") as client:
        client.prefill("text")
        client.prefill("text", ttl_s=0)
        client.complete("x", model="other")
        client.prefill(messages=[], **template)  # type: ignore[arg-type]
        capsule = client.prefill(messages=messages)
        with pytest.raises(InvalidParameter, match="add_generation_prompt=True"):
            capsule.fork(2)
        client.prefill(messages=messages, add_generation_prompt=True).fork(2).wait()
    plain, brief, other, chat, closed, opened, fork = [body for *_, body, _ in server.seen]
    assert plain == {"prompt": "text", "model": "m"}  # it lives as long as the server says
    assert brief == {**plain, "ttl_s": 0}
    assert (other["model"], fork["model"]) == ("other", "m")
    assert chat.items() >= template.items()
    assert [each.get("add_generation_prompt") for each in (closed, opened, fork)] == [
        *(False, True, None),
    ]


COMPUTING = {"status": "computing", "computed_tokens": 30}


def test_a_capsule_can_be_used_before_it_is_computed(server: Script) -> None:
    """S6, part: it is asked for until it is there; a fork is not held up by that."""
    with Mallee(server.url) as client:
        capsule = client.prefill("text", wait=False)
        assert server.seen[-1][2] == {"prompt": "text", "wait": False}
        capsule.fork(["a"], at=10).close()
        assert server.seen[-1][2]["at"] == 10
        server.seen.clear()
        server.shown = [COMPUTING, COMPUTING, {"status": "ready"}]
        assert capsule.wait() is capsule
        assert [seen[:2] for seen in server.seen] == [("GET", "/v1/capsules/req_1.0")] * 3
        assert capsule.data.status == "ready"
        server.shown = [COMPUTING]
        with pytest.raises(Timeout, match="still computing after 0 s; wait longer"):
            capsule.wait(timeout=0.0)
        assert capsule.data.computed_tokens == 30
        failed = {"message": "no room", "code": "capsules_full", "type": "server_error"}
        failed["param"] = None  # type: ignore[assignment]
        server.shown = [{"status": "failed", "error": failed}]
        with pytest.raises(CapsulesFull, match="no room"):
            capsule.wait()


@pytest.mark.parametrize(
    ("branches", "body"),
    [
        ("hello", {"suffixes": ["hello"]}),
        ({"messages": []}, {"suffixes": [{"messages": []}]}),
        (3, {"n": 3}),
        (["a", [1, 2]], {"suffixes": ["a", [1, 2]]}),
        (("a", "b"), {"suffixes": ["a", "b"]}),
        *((none, None) for none in (True, 2.0, None, b"hello", [1, 2], {"a"}, [None])),
    ],
)
def test_a_lone_suffix_is_one_branch_and_what_is_none_is_refused(
    branches: Any, body: dict[str, Any] | None
) -> None:
    if body is None:
        with pytest.raises(InvalidParameter, match=r"branches=.*one suffix a branch"):
            calls.fork("c", branches, {})
        return
    made = calls.fork("c", branches, {}).body
    assert made is not None
    assert {name: made[name] for name in body} == body


def test_a_branch_knows_its_request_and_what_it_took(server: Script) -> None:
    with Mallee(server.url) as client:
        branches = client.stream("x", n=2)
        first, second = branches.wait()
        assert first.usage == second.usage == branches.usage == Usage(103, 7, 100)
        assert first.request_id == branches.request_id == "req_2"
        assert repr(client) == f"Mallee({server.url!r})"
        assert repr(branches) == f"Branches('req_2', 2 of 2 ended, {first!r}, {second!r})"
        second.fork(3, at=5).wait()
        assert server.seen[-1][1] == "/v1/capsules/req_2.1/fork"
        assert server.seen[-1][2].items() >= {"n": 3, "at": 5, "stream": True}.items()
        with pytest.raises(NoCapsule, match="branch 0 can't be forked: it ended with 'length'"):
            first.fork(3)
    assert repr(second) == (
        "Branch(1, ' bü🌱', finish_reason='stop', worker='w1', capsule='req_2.1',"
        " cached_tokens=100, prefill_tokens=3)"
    )
    assert repr(Branch(0, text="x" * 99)) == f"Branch(0, '{'x' * 59}…')"


def test_every_error_of_the_sdk_is_a_mallee_error(server: Script) -> None:
    exported = [getattr(mallee.client, name) for name in mallee.client.__all__]
    errors = [each for each in exported if isinstance(each, type) and issubclass(each, Exception)]
    assert len(errors) >= 10
    assert all(issubclass(each, MalleeError) for each in errors)
    with Mallee(server.url) as client, pytest.raises(MalleeError, match="not JSON"):
        client.complete("x", seed=object())


def test_nobody_at_the_address_is_said_with_the_remedy() -> None:
    with Mallee("http://127.0.0.1:9") as client:
        for call in (client.models, lambda: client.complete("x")):
            with pytest.raises(ConnectionFailed, match=r"127.0.0.1:9.*is `mallee serve` running"):
                call()
    for kind in (Mallee, AsyncMallee):
        with pytest.raises(InvalidParameter, match=r"lacks http://, as in http://127\.0\.0\.1"):
            kind("127.0.0.1:8000")


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (b"", StreamBroken),
        (b"data: not json\n\n", StreamBroken),
        (b'data: {"error": {"message": "gone", "code": "capsule_not_found"}}\n\n', UnknownCapsule),
        (b'data: {"error": {"message": "?", "code": "new_kind"}}\n\n', ApiError),
    ],
)
def test_a_stream_that_breaks_off_is_an_error_and_keeps_the_text(
    server: Script, end: bytes, error: type[Exception]
) -> None:
    server.stream = chunk(0, "so far") + end
    with Mallee(server.url) as client:
        branches = client.stream("x")
        with pytest.raises(error):
            branches.wait()
        with pytest.raises(error):
            branches[0]
        assert branches.branches[0].text == "so far"
        assert branches.branches[0].finish_reason is None


def test_closing_early_ends_the_stream(server: Script) -> None:
    server.stream = chunk(0, "x") * 10_000
    with Mallee(server.url) as client, client.stream("x") as branches:
        assert next(branches.events()).text == "x"
    assert list(branches.events()) == []
    assert [each.text for each in branches] == ["x"], "what there was"


def test_the_tree_shows_every_branch_with_its_figures(server: Script) -> None:
    """X12, part: a terminal snapshot of the branches."""
    out = StringIO()
    console = Console(file=out, width=80, force_terminal=False)
    with Mallee(server.url) as client:
        done = live(
            client.capsule("req_1.0").fork(2), "capsule", labels=["one", "two"], console=console
        )
    for branch in done:
        branch.ttft_ms = 12.0
    console.print(render("again", {b.index: b for b in done}, labels=["one", "two", "three"]))
    text = out.getvalue()
    assert text.count("again") == 1
    assert text[text.index("again") :].splitlines() == [
        "again",
        "├── one  first token 12 ms  w1  cached 100  computed 3  [length]",
        "│   └── a!",
        "├── two  first token 12 ms  w1  cached 100  computed 3  [stop]",
        "│   └── bü🌱",
        "└── three  waiting",
    ]
    long = Branch(0, text="begin " + "word " * 100 + "end")
    with console.capture() as capture:
        console.print(render("t", {0: long}, width=60))
    assert "end" in capture.get()
    assert "begin" not in capture.get()
    assert len(capture.get().splitlines()) <= 6


def test_logprobs_of_a_branch_add_up_over_its_chunks() -> None:
    """I5: in both of OpenAI's shapes; null where the server has none."""
    branch = Branch(0)
    for text, chances in (
        ("a", {"tokens": ["a"], "top": None}),
        ("b", {"tokens": ["b"]}),
        ("", None),
    ):
        finish = None if text else "stop"
        choice = {"index": 0, "text": text, "logprobs": chances, "finish_reason": finish}
        for event in choice_events({"choices": [choice]}):
            branch.take(event, 1.0)
    assert branch.text == "ab"
    assert branch.logprobs == {"tokens": ["a", "b"]}
    # The first token may be of the reasoning.
    branch = Branch(0)
    for at, delta in ((3.0, {"role": "assistant", "content": ""}), (5.0, {"reasoning_content": "a"}),
                      (9.0, {"content": "b"})):  # fmt: skip
        for event in choice_events({"choices": [{"index": 0, "delta": delta}]}):
            branch.take(event, at)
    assert (branch.ttft_ms, branch.total_ms) == (5.0, 9.0)


SOON = {"Retry-After": "0"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("refusals", "num_sent", "error"),
    [
        ([(429, SOON, "tenant_queue_full")] * 2, 3, None),
        ([(503, SOON, "overloaded")], 2, None),
        ([(503, SOON, "overloaded")] * 3, 3, Overloaded),
        ([(503, {}, "overloaded")], 1, Overloaded),
        ([(503, {"Retry-After": "3600"}, "overloaded")], 1, Overloaded),
        ([(503, {**SOON, "x-should-retry": "false"}, "overloaded")], 1, Overloaded),
        ([(503, SOON, "capsules_full")], 1, CapsulesFull),
        ([(500, SOON, "internal_error")], 1, MalleeError),
        ([(400, SOON, "invalid_request")], 1, MalleeError),
    ],
)
def test_what_was_refused_for_now_is_sent_again_and_nothing_else(
    server: Script, refusals: list[Any], num_sent: int, error: type[Exception] | None
) -> None:
    """I17, part: `Retry-After` is followed, for streams, bodies and questions."""
    with Mallee(server.url) as client:
        for call in (client.models, lambda: client.prefill("x"), lambda: client.complete("x")):
            server.refusals, server.seen = list(refusals), []
            with nullcontext() if error is None else pytest.raises(error):
                call()
            assert len(server.seen) == num_sent


def test_retries_are_counted_and_can_be_turned_off(server: Script) -> None:
    """I17, part: no deletion of many, as the second answer would not count what the first had deleted."""
    server.refusals = [(503, SOON, "overloaded")] * 10
    for most in (0, 1, 4):
        server.seen = []
        with Mallee(server.url, max_retries=most) as client, pytest.raises(Overloaded):
            client.models()
        assert len(server.seen) == most + 1
    with pytest.raises(InvalidParameter, match="max_retries=-1"):
        Mallee(server.url, max_retries=-1)
    server.seen = []
    with Mallee(server.url) as client, pytest.raises(MalleeError):
        client.delete_capsules(all=True)
    assert [method for method, *_ in server.seen] == ["DELETE"]


def test_one_answer_is_asked_for_alone_and_several_by_their_number(server: Script) -> None:
    server.stream = chunk(0, "one", "stop") + b"data: [DONE]\n\n"
    with Mallee(server.url, timeout=9, default_headers={"x-session-id": "s"}) as client:
        assert client.complete("x").text == "one"
        assert [each.text for each in client.complete("x", n=1)] == ["one"]
        assert client.complete([5, 6]).text == "one"
        for several in (["x", "y"], [[5], [6]]):
            with pytest.raises(
                InvalidParameter, match="n=None: of several prompts give the number"
            ):
                client.complete(several)
        with pytest.raises(InvalidParameter, match="give its fields as keywords"):
            client.complete("x", mallee={"keep": True})  # type: ignore[call-overload]
        patient = client.with_options(model="m", max_retries=0)
        patient.complete("x")
        assert (server.seen[-1][2]["model"], patient.timeout) == ("m", 9)
        patient.close()
        assert client.models() == ["m"], "the connections are the first one's"


def test_the_synchronous_client_is_as_it_is_generated() -> None:
    """`make generate` writes it from the asynchronous one."""
    assert TARGET.read_text() == generated(), "run `make generate`"


def test_a_client_is_for_many_threads(server: Script) -> None:
    with Mallee(server.url) as client, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: client.complete(f"prompt {i}", n=2), range(64)))
    assert {(a.text, b.text) for a, b in answers} == {(" a!", " bü🌱")}
    asked = {body["prompt"] for *_, body, _ in server.seen}
    assert asked == {f"prompt {i}" for i in range(64)}


def test_a_notebook_shows_the_tree(server: Script) -> None:
    server.stream = GOOD.replace(b'" a"', b'"<b>&"')
    with Mallee(server.url) as client:
        branches = client.stream("x", n=2)
        branches.wait()
        html = branches._repr_html_()
    assert "Branches req_2" in html
    assert "&lt;b&gt;&amp;!" in html
    assert "<b>&" not in html
    assert html.index("branch 0 [length]") < html.index("branch 1 [stop] worker w1, cached 100")


def chat_chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, **more}
    return b"data: " + json.dumps({"id": "req_3", "choices": [choice]}).encode() + b"\n\n"


def chat_call(at: int, name: str) -> dict[str, Any]:
    function = {"name": name, "arguments": '{"city": "Perth"}'}
    return {
        "tool_calls": [{"index": at, "id": f"call_{at}", "type": "function", "function": function}]
    }


THOUGHTFUL = (
    chat_chunk({"role": "assistant", "content": "", "reasoning_content": "Hm", "reasoning": "Hm"})
    + chat_chunk({"reasoning_content": "m."}, logprobs={"content": [1]})
    + chat_chunk({}, logprobs={"content": []})
    + chat_chunk({}, logprobs={"content": [2]})
    + chat_chunk({"content": "Yes."}, logprobs={"content": [3]})
    + chat_chunk(chat_call(0, "rain"))
    + chat_chunk(chat_call(1, "wind"), logprobs={"content": [4]})
    + chat_chunk({}, "tool_calls", mallee=EXTRAS)
    + b"data: [DONE]\n\n"
)


def test_reasoning_and_calls_arrive_with_their_logprobs(server: Script) -> None:
    """I5, part: apart from the text; the chats' parameters are sent as they are."""
    server.stream = THOUGHTFUL
    tools = [{"type": "function", "function": {"name": "rain"}}]
    params: dict[str, Any] = {
        "tools": tools, "tool_choice": "auto", "parallel_tool_calls": False,
        "chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "low",
    }  # fmt: skip
    messages = [{"role": "user", "content": "Rain?"}]
    with Mallee(server.url) as client, client.stream(messages=messages, **params) as branches:
        events = list(branches.events())
        (branch,) = branches.wait()
    assert [(e.reasoning, e.text, [c.name for c in e.tool_calls]) for e in events] == [
        *[("Hm", "", []), ("m.", "", []), ("", "", []), ("", "Yes.", [])],
        *[("", "", ["rain"]), ("", "", ["wind"]), ("", "", [])],
    ]
    assert (branch.reasoning, branch.text, branch.finish_reason) == ("Hmm.", "Yes.", "tool_calls")
    assert branch.tool_calls == [
        ToolCall(f"call_{i}", name, '{"city": "Perth"}') for i, name in ((0, "rain"), (1, "wind"))
    ]
    assert branch.logprobs == {"content": [1, 2, 3, 4]}
    ((_, _, body, _),) = server.seen
    assert {name: body[name] for name in params} == params


# Sessions as notebooks show them


def node(capsule: str, parent: str | None, **more: object) -> SessionNode:
    given = {"tokens": 7, "created": 1, "is_root": False, "held": True, "worker": None, **more}
    return SessionNode(capsule=capsule, parent=parent, request="r", **given)  # type: ignore[arg-type]


def rows_of(html: str) -> list[tuple[float, str]]:
    """Each row's margin, and its text."""
    rows = re.findall(r"margin-left:([0-9.]+)em\">(.*?)</div>", html)
    return [(float(margin), re.sub("<[^>]*>", "", text)) for margin, text in rows]


def test_capsules_stand_below_those_that_they_continue() -> None:
    tree = SessionTree(
        id="<b>bug-7",
        parent="a",
        created=1,
        last_used=1,
        capsules=4,
        running=0,
        budget=None,
        children=[],
        nodes=[
            node("c1", None, tier="host", pinned=True),
            node("c2", "c1"),
            node("c3", "elsewhere", held=False),
            node("c4", "c1"),
        ],
    )
    html = tree._repr_html_()
    assert "<b>session &lt;b&gt;bug-7, below a</b>" in html
    assert rows_of(html) == [
        (0.6, "c1 7 tokens, host pinned"),
        (1.8, "c2 7 tokens, held"),
        (1.8, "c4 7 tokens, held"),
        (0.6, "c3 7 tokens, gone"),
    ]
    assert str(tree).splitlines() == [
        "session <b>bug-7, below a",
        "├── c1  7 tokens, host pinned",
        "│   ├── c2  7 tokens, held",
        "│   └── c4  7 tokens, held",
        "└── c3  7 tokens, gone",
    ]


def test_a_turn_that_alone_goes_on_stands_beneath_the_one_before() -> None:
    rows = [("a", None, "1"), ("b", "a", "2"), ("c", "b", "3"), ("d", "b", "4"), ("e", "d", "5")]
    assert nodes_text("s", rows).splitlines() == [
        *("s", "└── a  1", "    b  2", "    ├── c  3", "    └── d  4", "        e  5"),
    ]


def test_a_long_conversation_stays_on_the_page() -> None:
    html = nodes_html("s", [(str(i), str(i - 1) if i else None, "") for i in range(1000)])
    margins = [margin for margin, _ in rows_of(html)]
    assert len(margins) == 1000
    assert max(margins) == 0.6 + 1.2 * MAX_DEPTH


def test_keywords_are_fields_of_the_declared_bodies() -> None:
    """Of the calls, or of their `mallee` object."""
    extras = set(Extras.__struct_fields__)
    for keywords, kinds in (
        (calls.Sampling, (CompletionRequest, ChatRequest, ForkRequest)),
        (calls.Going, (RestoreRequest,)),
        (calls.Importing, (ImportRequest,)),
    ):
        declared = {name for kind in kinds for name in kind.__struct_fields__}
        assert set(keywords.__annotations__) <= declared | extras
