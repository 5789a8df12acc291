"""Streams whose backend dies in mid-answer, over pods whose answers follow from all tokens before them."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.doubles.vllm_pod import VllmPod
from mallee.actors.front.proxy import streams
from mallee.actors.front.proxy.proxy import Proxy
from mallee.actors.front.proxy.streams import Continuation, Room, Stream, continuation
from support.backends import Backend, Received, Wire, chunked, post, routed, wire

pytestmark = pytest.mark.real_time  # sockets

NUM = 4  # tokens
COMMON = {"model": "m", "stream": True, "max_tokens": NUM, "temperature": 0}
ASKS_USAGE = {"stream_options": {"include_usage": True}}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("/v1/completions", {"prompt": "once upon"} | ASKS_USAGE),
    "ids": ("/v1/completions", {"prompt": [7, 8, 9], "return_token_ids": True}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
}
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Seen(NamedTuple):
    """An answer as its client understands it."""

    text: str
    ids: list[int]
    finish: list[str]
    roles: int
    usage: tuple[int, int, int]
    num_names: int
    marks: int
    num_done: int


def seen(body: bytes) -> Seen:
    events = [event.removeprefix(b"data: ") for event in body.split(b"\n\n")]
    assert events.pop() == b""
    chunks = [json.loads(event) for event in events if event != b"[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    deltas = [choice.get("delta", {}) for choice in choices]
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    usage = usages[-1] if usages else {}
    texts = (c.get("text") or d.get("content") or "" for c, d in zip(choices, deltas, strict=True))
    return Seen(
        text="".join(texts),
        ids=[each for choice in choices for each in choice.get("token_ids", [])],
        finish=[choice["finish_reason"] for choice in choices if choice.get("finish_reason")],
        roles=sum("role" in delta for delta in deltas),
        usage=tuple(usage.get(f"{kind}_tokens", 0) for kind in ("prompt", "completion", "total")),
        num_names=len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}),
        marks=sum("mallee" in choice for choice in choices),
        num_done=events.count(b"[DONE]"),
    )


class Fleet(NamedTuple):
    """Pods that break together, and a router before them."""

    proxy: Proxy
    breaks: list[int]

    async def ask(self, path: str, **body: Any) -> bytes:
        """Raises IncompleteReadError for an answer that was cut."""
        async with wire(self.proxy.port) as client:
            answer = await client.ask(post(json.dumps(COMMON | body).encode(), path=path))
            assert answer.status == 200
            return answer.body

    def counted(self, name: str, **labels: str) -> float:
        found = self.proxy.counts.registry.get_sample_value(f"mallee_router_{name}", labels)
        return found or 0.0


@asynccontextmanager
async def fleet(num: int = 3, **settings: Any) -> AsyncIterator[Fleet]:
    breaks: list[int] = []
    made = [VllmPod(block_size=64) for _ in range(num)]  # usage has no cached tokens then
    async with AsyncExitStack() as stack:
        pods = [await stack.enter_async_context(pod) for pod in made]
        for pod in pods:
            pod.breaks = breaks
        async with routed(pods, **settings) as proxy:
            yield Fleet(proxy, breaks)


@pytest.mark.parametrize("name", FORMS)
async def test_a_stream_broken_at_any_byte_is_that_of_an_undisturbed_backend(name: str) -> None:
    """X20, part, X27, part: the text, the ids and the usage."""
    path, form = FORMS[name]
    form = form | {"max_tokens": 2}
    async with fleet() as pods:
        whole = await pods.ask(path, **form)
        undisturbed = seen(whole)
        assert len(undisturbed.text) == 2
        ends = [at + 2 for at in range(len(whole)) if whole[at : at + 2] == b"\n\n"]
        usage_begins, usage_ends = ends[-3], ends[-2]
        for at in range(len(whole)):
            pods.breaks[:] = [at]
            if usage_begins <= at < usage_ends and "stream_options" in form:
                with pytest.raises(asyncio.IncompleteReadError):  # only that backend knew it
                    await pods.ask(path, **form)
                continue
            found = seen(await pods.ask(path, **form))
            if at < usage_begins or at >= usage_ends:
                assert found == undisturbed, at
            else:
                assert found == undisturbed._replace(usage=(0, 0, 0)), at
        assert pods.counted("continued_total", how="exact") > usage_begins / 2
        assert pods.counted("continued_total", how="resampled") == 0


@pytest.mark.parametrize("name", FORMS)
async def test_two_deaths_in_a_row(name: str) -> None:
    """The second backend has said something of the rest: it did not die of the request at once."""
    path, form = FORMS[name]
    form = form | {"max_tokens": 5}
    async with fleet() as pods:
        undisturbed = seen(await pods.ask(path, **form))
        for first in range(0, 280, 23):
            for second in range(1, 180, 23):
                pods.breaks[:] = [first, second]
                assert seen(await pods.ask(path, **form)) == undisturbed, (first, second)


async def test_by_other_draws_it_says_so_once() -> None:
    path, form = FORMS["text"]
    other: list[dict[str, Any]] = [
        {"temperature": None},
        {"temperature": 0.7},
        {"frequency_penalty": 0.5},
        {"ignore_eos": True},  # its text lacks the special tokens
    ]
    for more in other:
        async with fleet() as pods:
            undisturbed = seen(await pods.ask(path, **form, **more))
            pods.breaks[:] = [30]  # nothing was drawn yet
            assert seen(await pods.ask(path, **form, **more)) == undisturbed
            pods.breaks[:] = [250]
            broken = await pods.ask(path, **form, **more)
            assert seen(broken) == undisturbed._replace(marks=1)
            assert b'"mallee":{"resampled":true}' in broken
            assert pods.counted("continued_total", how="resampled") == 1
            assert pods.counted("requests_total", end="answered") == 3


CUT = [
    {"prompt": "x", "logprobs": 1},
    {"prompt": "x", "response_format": {"type": "json_object"}},
    {"prompt": "x", "n": 2},
    {"prompt": "x", "echo": True},
    {"prompt": "x", "stop": ["."], "include_stop_str_in_output": True},
    {"prompt": "x", "stop": ["."], "return_token_ids": True},
    {"prompt": [1, 2]},  # no tokenizer, and the answer does not tell its tokens
    {"prompt": ["x", "y"]},
]


@pytest.mark.parametrize("body", CUT)
async def test_an_answer_that_cannot_be_continued_is_cut(body: dict[str, Any]) -> None:
    async with fleet() as pods:
        pods.breaks[:] = [250]
        with pytest.raises(asyncio.IncompleteReadError):
            await pods.ask("/v1/completions", **body)
        assert pods.counted("requests_total", end="cut") == 1


@pytest.mark.parametrize("case", ["alone", "no retries", "too many deaths", "too long", "no room"])
async def test_without_a_way_on_it_is_cut(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, form = FORMS["text"]
    if case == "too long":
        monkeypatch.setattr(streams, "MOST_KEPT_NBYTES", 100)
    async with fleet(
        num=1 if case == "alone" else 3, retries=0 if case == "no retries" else 2
    ) as pods:
        if case == "no room":
            pods.proxy.room.most_nbytes = 100
        pods.breaks[:] = [250, 20, 20] if case == "too many deaths" else [250]
        with pytest.raises(asyncio.IncompleteReadError):
            await pods.ask(path, **form)
        assert pods.counted("requests_total", end="cut") == 1
        assert pods.proxy.room.num_kept == 0


def _event(**choice: Any) -> bytes:
    chunk = {"id": "i", "created": 1, "model": "m", "choices": [{"index": 0, **choice}]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


async def test_a_silent_backend_and_one_that_refuses_the_rest_count_as_dead() -> None:
    bodies: list[dict[str, Any]] = []

    async def script(backend: Backend, request: Received, writer: asyncio.StreamWriter) -> None:
        bodies.append(json.loads(request.body))
        if len(bodies) == 1:
            writer.write(SSE + chunked(_event(text="ab"))[: -len(b"0\r\n\r\n")])
            await backend.left(writer)
            raise ConnectionError
        if len(bodies) == 2:
            writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\n\r\nno")
            return
        writer.write(SSE + chunked(_event(text="cd", finish_reason="stop"), DONE))

    async with (
        Backend(script) as a,
        Backend(script) as b,
        Backend(script) as c,
        routed([a, b, c], silence_s=0.4) as proxy,
        wire(proxy.port) as client,
    ):
        body = {"prompt": "x", "stream": True, "temperature": 0, "min_tokens": 3}
        answer = await client.ask(post(json.dumps(body).encode(), path="/v1/completions"))
        assert (seen(answer.body).text, seen(answer.body).num_done) == ("abcd", 1)
    rest = body | {"prompt": "xab", "max_tokens": 15, "min_tokens": 2}
    assert bodies == [body, rest, rest]


def _fault(code: int) -> bytes:
    error = {"message": "EngineCore encountered an issue.", "type": "x", "code": code}
    return b"data: " + json.dumps({"error": error}).encode() + b"\n\n"


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("begun", ["", "ab"])
async def test_a_stream_whose_engine_died_behind_its_server_goes_on(
    begun: str, is_split: bool
) -> None:
    """X20, part: vLLM's server then says so in an event, and ends the stream in peace."""
    bodies: list[dict[str, Any]] = []

    async def script(backend: Backend, request: Received, writer: asyncio.StreamWriter) -> None:
        bodies.append(json.loads(request.body))
        if len(bodies) == 2:
            writer.write(SSE + chunked(_event(text="c")).removesuffix(b"0\r\n\r\n"))
            await writer.drain()
            await asyncio.sleep(0.01)
            writer.write(chunked(_event(text="d", finish_reason="stop"), DONE))
            return
        pieces = [*([_event(text=begun)] if begun else []), _fault(500), DONE]
        for piece in pieces if is_split else [b"".join(pieces)]:
            half = len(piece) // 2
            writer.write(SSE if piece is pieces[0] or not is_split else b"")
            for part in (piece[:half], piece[half:]):
                writer.write(chunked(part).removesuffix(b"0\r\n\r\n"))
                await writer.drain()
                await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")

    async with (
        Backend(script) as a,
        Backend(script) as b,
        routed([a, b]) as proxy,
        wire(proxy.port) as client,
    ):
        body = {"prompt": "x", "stream": True, "temperature": 0}
        answer = await client.ask(post(json.dumps(body).encode(), path="/v1/completions"))
        assert (seen(answer.body).text, seen(answer.body).num_done) == (f"{begun}cd", 1)
    assert [each["prompt"] for each in bodies] == ["x", f"x{begun}"]


@pytest.mark.parametrize("room", [1 << 20, 0])
async def test_a_fault_inside_a_stream_that_cannot_go_on_is_no_end(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client gets the error, no [DONE] and no clean end. A request's own fault is passed on."""
    monkeypatch.setattr(streams, "MOST_KEPT_NBYTES", room)
    events = {code: [_event(text="ab"), _fault(code), DONE] for code in (500, 400)}

    async def script(_: Backend, request: Received, writer: asyncio.StreamWriter) -> None:
        code = 400 if b"400" in request.body else 500
        writer.write(SSE + chunked(*events[code]))

    async with Backend(script) as a, Backend(script) as b, routed([a, b]) as proxy:
        form = {"stream": True, "logprobs": 1}
        async with wire(proxy.port) as client:
            client.send(post(json.dumps(form | {"prompt": "x"}).encode(), path="/v1/completions"))
            raw = await client.reader.read()
        assert raw.count(b"EngineCore encountered") == 1
        assert b"[DONE]" not in raw
        assert not raw.endswith(b"0\r\n\r\n")
        async with wire(proxy.port) as client:
            raw = post(json.dumps(form | {"prompt": "400"}).encode(), path="/v1/completions")
            assert (await client.ask(raw)).body == b"".join(events[400])


async def test_a_client_that_leaves_meanwhile_ends_it() -> None:
    async def script(_: Backend, __: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE + chunked(_event(text="ab"))[: -len(b"0\r\n\r\n")])
        await writer.drain()
        raise ConnectionError

    async with Backend(script) as a, Backend(script) as b, routed([a, b]) as proxy:
        for _ in range(20):
            async with wire(proxy.port) as client:
                client.send(post(b'{"prompt": "x", "stream": true}', path="/v1/completions"))
                await client.reader.readuntil(b"\r\n\r\n")
        # `routed` looks at the bookings.


def rest_of(path: str, body: dict[str, Any], kept: bytes) -> tuple[dict[str, Any], Continuation]:
    raw = json.dumps({"stream": True} | body).encode()
    found = continuation(path, raw, kept, lambda text: [*text.encode()])
    assert isinstance(found, Continuation), found
    return json.loads(found.body), found


def test_the_white_space_that_templates_trim_is_drawn_again_and_not_sent_again() -> None:
    body = {"messages": [{"role": "user", "content": "q"}], "max_tokens": 9, "stream": True}
    kept = _event(delta={"role": "assistant", "content": ""}) + b"".join(
        _event(delta={"content": text}) for text in ("foo", ".\n", "\n")
    )
    asked, found = rest_of("/v1/chat/completions", body, kept)
    assert asked["messages"][-1] == {"role": "assistant", "content": "foo."}
    assert (asked["continue_final_message"], asked["add_generation_prompt"]) == (True, False)
    assert asked["max_tokens"] == 5  # four by the tokenizer: more than two events
    role = _event(delta={"role": "assistant", "content": ""})
    more = [_event(delta={"content": text}) for text in ("\n", "\n\nb", " c")]
    out = found.splice.take(role + b"".join(more))
    assert seen(out + DONE).text == "\nb c"
    assert seen(out + DONE).roles == 0


def test_limits_count_what_the_client_has() -> None:
    path, body = "/v1/completions", {"prompt": [1], "max_tokens": 9, "min_tokens": 1}
    kept = _event(text="a", token_ids=[5, 6]) + _event(text="b", token_ids=[7])
    asked, _ = rest_of(path, body, kept)
    assert (asked["prompt"], asked["max_tokens"], asked["min_tokens"]) == ([1, 5, 6, 7], 6, 0)
    asked, _ = rest_of(path, {"prompt": [1]}, _event(text="ab"))
    assert (asked["prompt"], asked["max_tokens"]) == ([1, *b"ab"], 14)
    held_for_stop = _event(text="") + _event(text="") + _event(text="ab")
    asked, _ = rest_of(path, {"prompt": "p", "stop": ["xyz"], "max_tokens": 9}, held_for_stop)
    assert (asked["prompt"], asked["max_tokens"]) == ("pab", 7)
    text_and_ids = _event(text="a", token_ids=[5], prompt_token_ids=[1, 2]) + _event(
        text="b", token_ids=[6]
    )
    assert rest_of(path, {"prompt": "p"}, text_and_ids)[0]["prompt"] == [1, 2, 5, 6]


@pytest.mark.parametrize(
    "delta", [{"reasoning": "hm"}, {"tool_calls": [{"index": 0}]}, {"refusal": "no"}]
)
def test_what_is_no_text_is_not_continued(delta: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "q"}]
    body = json.dumps({"messages": messages, "stream": True}).encode()
    kept = _event(delta={"content": "a"}) + _event(delta=delta)
    found = continuation("/v1/chat/completions", body, kept, lambda _: None)
    assert isinstance(found, str)
    assert next(iter(delta)) in found
    odd = continuation("/v1/completions", b"{}", b"data: {nonsense\n\n", lambda _: None)
    assert isinstance(odd, str)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=12), max_size=6), st.binary(max_size=8), st.data())
def test_only_whole_events_go_on_and_all_bytes_in_the_end(
    events: list[bytes], rest: bytes, data: st.DataObject
) -> None:
    raw = b"".join(b"e" + event.replace(b"\n", b"x") + b"\n\n" for event in events)
    raw += rest.replace(b"\n", b"x")
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)), max_size=8)))
    room = Room(1 << 20)
    stream, out = Stream(room), b""
    for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        out += stream.take(raw[begin:end], ends=False)
        assert not out or out.endswith(b"\n\n")
        arrived = raw[:end]
        assert out == arrived[: arrived.rfind(b"\n\n") + 2 if b"\n\n" in arrived else 0]
    assert stream.lost() == out
    assert room.num_kept == len(out)
    stream.forget()
    assert room.num_kept == 0


def test_events_that_end_otherwise_are_passed_on_as_they_come() -> None:
    room = Room(1 << 20)
    stream = Stream(room)
    assert stream.take(b"data: a\r\n", ends=False) == b""
    assert stream.take(b"\r\ndata: b\r\n\r\n", ends=False) == b"data: a\r\n\r\ndata: b\r\n\r\n"
    assert stream.take(b"data: ", ends=False) == b"data: "
    assert stream.lost() is None
    assert room.num_kept == 0


async def test_an_answer_that_is_no_stream_is_passed_on_as_it_comes(monkeypatch: Any) -> None:
    monkeypatch.setattr(streams, "MOST_HELD_NBYTES", 4)

    async def script(_: Backend, __: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE + b"a\r\ndata: abcd\r\n")
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write(b"0\r\n\r\n")

    async with Backend(script) as backend, routed([backend]) as proxy, wire(proxy.port) as client:
        found: Wire = client
        answer = await found.ask(post(b"{}", path="/v1/completions"))
        assert answer.body == b"data: abcd"
