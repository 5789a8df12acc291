"""A real server on loopback: OpenAI's own client, and sockets that behave badly."""

import asyncio
import json
from typing import Any

import openai
import pydantic
import pytest

from support.waiting import until

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


def post(path: str, body: Any) -> bytes:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw


async def is_alive(live: Any) -> bool:
    async with await live.connect() as conn:
        conn.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        return bool((await conn.answer())[0] == 200)


async def test_the_official_client_reads_completions(
    official: openai.AsyncOpenAI, live: Any
) -> None:
    """I17: contract with the official client: text, n, stop, token ids, lists of prompts, models."""
    made = await official.completions.create(model="tiny/bytes", prompt="abc", n=4)
    assert [c.text for c in made.choices] == [f"hello {i}" for i in range(4)]
    assert made.usage is not None
    assert made.usage.total_tokens == 4 + 32
    assert [stream.job.n for stream in live.service.streams] == [4], "one job"
    assert made.usage.prompt_tokens_details.cached_tokens == 4  # type: ignore[attr-defined]
    stopped = await official.completions.create(model="tiny/bytes", prompt=[1, 2], stop=["lo"])
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("hel", "stop")
    listed = await official.completions.create(model="tiny/bytes", prompt=["a", "b", "c"], n=2)
    assert [c.index for c in listed.choices] == list(range(6))
    assert [c.text for c in listed.choices] == ["hello 0", "hello 1"] * 3
    assert listed.usage is not None
    assert listed.usage.prompt_tokens == 6
    assert listed.choices[0].model_extra is not None
    assert listed.choices[0].model_extra["mallee"]["worker"] == "w0"
    assert [m.id async for m in official.models.list()] == ["tiny/bytes"]


async def test_the_official_client_reads_streams(official: openai.AsyncOpenAI) -> None:
    """I17: streaming and usage chunks with the official client."""
    stream = await official.completions.create(
        model="tiny/bytes",
        prompt="abc",
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, usage = ["", ""], None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == ["hello 0", "hello 1"]
    assert usage is not None
    assert usage.completion_tokens == 16


async def test_the_official_client_raises_its_own_error_types(official: openai.AsyncOpenAI) -> None:
    """I17: errors carry param and code as the official client reads them."""
    with pytest.raises(openai.BadRequestError) as refused:
        await official.chat.completions.create(
            model="tiny/bytes", messages=MESSAGES, logprobs=True, top_logprobs=21
        )
    assert refused.value.param == "top_logprobs"
    assert refused.value.code == "invalid_parameter"
    with pytest.raises(openai.NotFoundError) as missing:
        await official.completions.create(model="gpt-9", prompt="a")
    assert missing.value.code == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("holds_after", [0, 1])
@pytest.mark.parametrize("prompt", ["abc", ["abc", "def"], None])
async def test_a_client_that_hangs_up_ends_its_branches(
    live: Any, stream: bool, holds_after: int, prompt: Any
) -> None:
    """I26: disconnect, before and after the first byte, streamed or not, or of a prefill.

    Others are answered meanwhile. The first token is sent at once: a stream that is held after it is here.
    """

    async def never(_: Any) -> Any:
        await asyncio.Event().wait()
        yield

    live.service.holds_after = holds_after
    path, body = "/v1/completions", {"prompt": prompt, "n": 3, "stream": stream}
    if prompt is None:
        live.service.script = never
        path, body = "/v1/capsules", {"prompt": "abc"}
    async with await live.connect() as conn:
        conn.send(post(path, body))
        if prompt is not None and stream and holds_after:
            assert b"x-mallee-worker: w0" in await conn.read_to(b'"text":"h"')
        await until(live.service.started.is_set)
        assert await is_alive(live)
        assert not live.service.closed.is_set()
    await until(live.service.closed.is_set)


@pytest.mark.parametrize("chunked", [False, True])
async def test_an_oversize_body_is_refused_before_all_of_it_came(live: Any, chunked: bool) -> None:
    """F30, part: the declared length alone is enough; without one, reading stops at the limit."""
    length = "Transfer-Encoding: chunked" if chunked else "Content-Length: 999999999"
    async with await live.connect() as conn:
        conn.send(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n".encode())
        if chunked:
            conn.send((b"2710\r\n" + b"x" * 10_000 + b"\r\n") * 11)
        status, answer = await conn.answer()
        error = json.loads(answer)["error"]
        assert (status, error["code"]) == (413, "request_too_large")
        assert "100000" in error["message"]
    assert await is_alive(live)


class GetWeather(pydantic.BaseModel):
    """Weather of a city."""

    city: str
    days: int = 1


TOOLS: list[Any] = [openai.pydantic_function_tool(GetWeather, name="get_weather")]
ARGUMENTS = '{"city": "Oslo", "days": 2}'
CALL = f'<think>hm</think>So.\n<tool_call>{{"name": "get_weather", "arguments": {ARGUMENTS}}}</tool_call>'
ASKED: dict[str, Any] = {
    **{"model": "tiny/bytes", "max_tokens": 120},
    "tools": [{"type": "function", "function": {"name": "get_weather"}}],
}


async def test_the_official_client_runs_an_agent_s_turn(
    official: openai.AsyncOpenAI, live: Any
) -> None:
    """I17: tools with the official client: a call, whole and put together by its own accumulator; its
    message is sent back with the result, and answered.
    """
    live.service.reply = lambda _: CALL
    choice = (await official.chat.completions.create(messages=MESSAGES, **ASKED)).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "So."
    assert choice.message.model_extra == {"reasoning_content": "hm", "reasoning": "hm"}
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("get_weather", ARGUMENTS)
    async with official.chat.completions.stream(messages=MESSAGES, **ASKED) as stream:
        streamed = (await stream.get_final_completion()).choices[0]
    assert streamed.finish_reason == "tool_calls"
    assert streamed.message.content == "So."
    assert streamed.message.tool_calls is not None
    assert streamed.message.tool_calls[0].function.arguments == ARGUMENTS
    live.service.reply = lambda _: "ok"
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    history: list[Any] = [MESSAGES[0], choice.message, result]
    made = await official.chat.completions.create(messages=history, **{**ASKED, "max_tokens": 4})
    assert made.choices[0].message.content == "ok"


async def test_the_official_client_parses_calls_into_classes(
    official: openai.AsyncOpenAI, live: Any
) -> None:
    """I17: `parse` with tools made of pydantic's classes, which are strict."""
    live.service.reply = lambda _: CALL.partition("</think>")[2]
    made = await official.chat.completions.parse(
        **{**ASKED, "tools": TOOLS}, messages=MESSAGES, tool_choice="required"
    )
    assert made.choices[0].message.tool_calls is not None
    parsed = made.choices[0].message.tool_calls[0].function.parsed_arguments
    assert parsed == GetWeather(city="Oslo", days=2)
    assert live.service.job.grammar.kind == "lark"
