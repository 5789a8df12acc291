"""A real server on loopback: OpenAI's own client, and sockets that behave badly."""

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(live: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def post(path: str, body: Any, *, headers: str = "") -> bytes:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n{headers}\r\n"
    return head.encode() + raw


def read_answer(conn: socket.socket) -> tuple[int, bytes]:
    """One answer with a declared length: its status and body."""
    raw = b""
    while b"\r\n\r\n" not in raw:
        more = conn.recv(65536)
        assert more, raw
        raw += more
    head, _, body = raw.partition(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1])
        for line in head.lower().split(b"\r\n")
        if line.startswith(b"content-length:")
    )
    while len(body) < length:
        body += conn.recv(65536)
    return int(head.split(b" ")[1]), body


def is_alive(live: Any) -> bool:
    with live.connect() as conn:
        conn.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        return read_answer(conn)[0] == 200


def test_the_official_client_reads_completions(client: openai.OpenAI) -> None:
    """I17: contract with the official client: text, n, stop, token ids, lists of prompts."""
    made = client.completions.create(model="tiny/bytes", prompt="abc", n=4)
    assert [c.text for c in made.choices] == [f"hello {i}" for i in range(4)]
    assert made.usage is not None
    assert made.usage.total_tokens == 4 + 32
    assert made.usage.prompt_tokens_details.cached_tokens == 4  # type: ignore[attr-defined]
    stopped = client.completions.create(model="tiny/bytes", prompt=[1, 2], stop=["lo"])
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("hel", "stop")
    listed = client.completions.create(model="tiny/bytes", prompt=["a", "b", "c"], n=2)
    assert [c.index for c in listed.choices] == list(range(6))
    assert listed.choices[0].model_extra is not None
    assert listed.choices[0].model_extra["mallee"]["worker"] == "w0"


def test_the_official_client_reads_streams(client: openai.OpenAI) -> None:
    """I17: streaming and usage chunks with the official client."""
    stream = client.completions.create(
        model="tiny/bytes",
        prompt="abc",
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, usage = ["", ""], None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == ["hello 0", "hello 1"]
    assert usage is not None
    assert usage.completion_tokens == 16


def test_the_official_client_reads_chat(client: openai.OpenAI) -> None:
    """I17: chat with the official client, whole and streamed."""
    made = client.chat.completions.create(model="tiny/bytes", messages=MESSAGES, seed=1)
    assert made.choices[0].message.role == "assistant"
    assert made.choices[0].message.content == "hello 0"
    chunks = list(
        client.chat.completions.create(model="tiny/bytes", messages=MESSAGES, stream=True)
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "hello 0"
    assert chunks[-1].choices[0].finish_reason == "stop"
    with client.chat.completions.stream(model="tiny/bytes", messages=MESSAGES) as helper:
        assert helper.get_final_completion().choices[0].message.content == "hello 0"


async def test_the_official_async_client_reads_all_of_it(live: Any) -> None:
    url = f"{live.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        made = await client.completions.create(model="tiny/bytes", prompt="abc")
        assert made.choices[0].text == "hello 0"
        text = ""
        async for chunk in await client.chat.completions.create(
            model="tiny/bytes", messages=MESSAGES, stream=True
        ):
            text += chunk.choices[0].delta.content or ""
        assert text == "hello 0"
        assert [m.id async for m in client.models.list()] == ["tiny/bytes"]


def test_the_official_client_raises_its_own_error_types(client: openai.OpenAI) -> None:
    """I17: errors carry param and code as the official client reads them."""
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="tiny/bytes", messages=MESSAGES, logprobs=True, top_logprobs=21
        )
    assert refused.value.param == "top_logprobs"
    assert refused.value.code == "invalid_parameter"
    with pytest.raises(openai.BadRequestError, match="logit_bias"):
        client.completions.create(model="tiny/bytes", prompt="a", logit_bias={"300": 1})
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-9", prompt="a")
    assert missing.value.code == "model_not_found"


def test_the_first_token_is_sent_at_once(live: Any) -> None:
    """The stream is held after one token: it must be here already."""
    live.service.holds_after = 1
    with live.connect() as conn:
        conn.sendall(post("/v1/completions", {"prompt": "abc", "stream": True}))
        raw = b""
        while b'"text":"h"' not in raw:
            more = conn.recv(65536)
            assert more
            raw += more
        assert b"x-mallee-worker: w0" in raw
    assert live.service.closed.wait(5)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("holds_after", [0, 2])
@pytest.mark.parametrize("prompt", ["abc", ["abc", "def"]])
def test_a_client_that_hangs_up_ends_its_branches(
    live: Any, stream: bool, holds_after: int, prompt: Any
) -> None:
    """I26: disconnect, before and after the first byte, streamed or not."""
    live.service.holds_after = holds_after
    body = {"prompt": prompt, "n": 3, "stream": stream}
    with live.connect() as conn:
        conn.sendall(post("/v1/completions", body))
        if stream and holds_after:
            assert conn.recv(65536)
        else:
            assert live.service.started.wait(5)
    assert live.service.closed.wait(5)
    assert is_alive(live)


def test_health_answers_while_others_are_decoded(live: Any) -> None:
    live.service.holds_after = 2
    with live.connect() as one, live.connect() as other:
        one.sendall(post("/v1/completions", {"prompt": "abc", "n": 8, "stream": True}))
        other.sendall(post("/v1/completions", {"prompt": "abc", "n": 8}))
        assert one.recv(65536)
        assert is_alive(live)
    assert live.service.closed.wait(5)


def test_a_client_that_hangs_up_ends_its_prefill(live: Any) -> None:
    async def never(_: Any) -> Any:
        await asyncio.Event().wait()
        yield

    live.service.script = never
    with live.connect() as conn:
        conn.sendall(post("/v1/capsules", {"prompt": "abc"}))
        assert live.service.started.wait(5)
    assert live.service.closed.wait(5)


@pytest.mark.parametrize("body", [b"{", b'{"prompt": "\xff"}', b"\x00" * 50, b"[[[["])
def test_a_bad_body_is_400_and_the_connection_stays_good(live: Any, body: bytes) -> None:
    with live.connect() as conn:
        conn.sendall(post("/v1/completions", body))
        status, answer = read_answer(conn)
        assert status == 400
        assert json.loads(answer)["error"]["type"] == "invalid_request_error"
        conn.sendall(post("/v1/completions", {"prompt": "abc"}))
        assert read_answer(conn)[0] == 200


def test_an_oversize_body_is_refused_before_it_was_sent(live: Any) -> None:
    """F30, part: the declared length alone is enough."""
    with live.connect() as conn:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999\r\n\r\n"
        conn.sendall(head.encode())
        assert read_answer(conn)[0] == 413
    assert is_alive(live)


def test_an_oversize_chunked_body_is_refused_as_it_grows(live: Any) -> None:
    """F30, part: without a declared length, reading stops at the limit."""
    with live.connect() as conn:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        conn.sendall(head.encode())
        for _ in range(11):
            conn.sendall(b"2710\r\n" + b"x" * 10_000 + b"\r\n")
        assert read_answer(conn)[0] == 413
    assert is_alive(live)


def test_a_client_that_hangs_up_in_its_body_is_nobody_s_bug(
    live: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with live.connect() as conn:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
        conn.sendall(head + b'{"prompt"')
    assert is_alive(live)
    assert not live.service.streams
    assert "failed" not in caplog.text


def test_pipelined_requests_are_answered_and_garbage_after_them_is_400(live: Any) -> None:
    with live.connect() as conn:
        good = post("/v1/completions", {"prompt": "abc"})
        conn.sendall(good + good)
        conn.settimeout(10)
        raw = b""
        while raw.count(b'"object":"text_completion"') < 2:
            more = conn.recv(65536)
            assert more
            raw += more
        conn.sendall(b"\x16\x03\x01 not http at all \r\n\r\n")
        rest = b""
        while more := conn.recv(65536):
            rest += more
        assert rest.startswith(b"HTTP/1.1 400")
    assert is_alive(live)


class GetWeather(pydantic.BaseModel):
    """Weather of a city."""

    city: str
    days: int = 1


TOOLS: list[Any] = [openai.pydantic_function_tool(GetWeather, name="get_weather")]
ARGUMENTS = '{"city": "Oslo", "days": 2}'
CALL = f'<think>hm</think>So.\n<tool_call>{{"name": "get_weather", "arguments": {ARGUMENTS}}}</tool_call>'


def test_the_official_client_runs_an_agent_s_turn(client: openai.OpenAI, live: Any) -> None:
    """I17: tools with the official client: a call, its message sent back with the result, the answer."""
    live.service.reply = lambda _: CALL
    asked: dict[str, Any] = {"model": "tiny/bytes", "max_tokens": 120}
    asked["tools"] = [{"type": "function", "function": {"name": "get_weather"}}]
    choice = client.chat.completions.create(messages=MESSAGES, **asked).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "So."
    assert choice.message.model_extra == {"reasoning_content": "hm", "reasoning": "hm"}
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("get_weather", ARGUMENTS)
    live.service.reply = lambda _: "ok"
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    history: list[Any] = [MESSAGES[0], choice.message, result]
    asked["max_tokens"] = 4
    assert (
        client.chat.completions.create(messages=history, **asked).choices[0].message.content == "ok"
    )


def test_the_official_client_puts_streamed_calls_together(client: openai.OpenAI, live: Any) -> None:
    """I17: streams with tools, by the client's own accumulator."""
    live.service.reply = lambda _: CALL
    asked: Any = {"model": "tiny/bytes", "messages": MESSAGES, "max_tokens": 120}
    asked["tools"] = [{"type": "function", "function": {"name": "get_weather"}}]
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.content == "So."
    assert final.message.tool_calls is not None
    assert final.message.tool_calls[0].function.arguments == ARGUMENTS


def test_the_official_client_parses_calls_into_classes(client: openai.OpenAI, live: Any) -> None:
    """I17: `parse` with tools made of pydantic's classes, which are strict."""
    live.service.reply = lambda _: CALL.partition("</think>")[2]
    made = client.chat.completions.parse(
        model="tiny/bytes",
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice="required",
        max_tokens=100,
    )
    assert made.choices[0].message.tool_calls is not None
    parsed = made.choices[0].message.tool_calls[0].function.parsed_arguments
    assert parsed == GetWeather(city="Oslo", days=2)
    assert live.service.job.grammar.kind == "lark"
