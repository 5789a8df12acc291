"""The whole service but Ray: SmolLM2, a real nats-server, real HTTP, the official openai client.

Two workers and a gateway in one process. Only Ray adds replicas and restarts: test_front, test_deploy.
"""

import asyncio
import json
import secrets
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pydantic
import pytest
import uvicorn

from mallee.actors.access.access import Access
from mallee.actors.access.scopes import Scopes
from mallee.actors.addresses import free_port
from mallee.actors.bus.broker import Broker
from mallee.actors.bus.nats import NatsBus
from mallee.actors.config import HttpSettings
from mallee.actors.hosting.engine import add_engine
from mallee.actors.hosting.host import Host
from mallee.actors.hosting.worker import Capacity
from mallee.actors.http.api import build_api
from mallee.actors.telemetry.metrics import GatewayMetrics
from mallee.actors.text.chat import ChatTemplate
from mallee.actors.text.tokenizer import Tokenizer
from mallee.client import Mallee
from mallee.protocol.errors import ModelError
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.subjects import BusRole
from mallee.router.config import RouterConfig
from mallee.router.router import Router
from mallee.worker.engine import Engine
from mallee.worker.model.loading.source import resolve_model
from mallee.worker.model.runner import TorchForward, load
from mallee.worker.model.sampling.grammar import TokenGrammars
from mallee.worker.records import EngineConfig
from support.live_fleet import make_gateway
from support.local_transport import LocalTransport

pytestmark = [pytest.mark.process, pytest.mark.model, pytest.mark.nats, pytest.mark.slow]

MODEL = "smollm2"
NUM_BLOCKS = 512
PROMPT = "The capital of France is"


class Stack:
    """Everything in one event loop in a thread of its own; `base_url` is up after the fixture."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.engines: dict[str, Engine] = {}
        self.router = Router(RouterConfig(), clock=time.monotonic)
        self.loop = asyncio.new_event_loop()
        self.broker = Broker(fleet="test")
        self._thread = threading.Thread(target=self._run)
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self.failure: BaseException | None = None

    def __enter__(self) -> "Stack":
        self._thread.start()
        assert self._ready.wait(60), "the stack did not come up"
        if self.failure is not None:
            raise self.failure
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)

    def _run(self) -> None:
        try:
            self.loop.run_until_complete(self._main())
        except BaseException as error:
            self.failure = error
        finally:
            self._ready.set()
            self.loop.close()

    async def _main(self) -> None:
        await self.broker.start()
        roles: tuple[BusRole, ...] = ("worker", "worker", "gateway")
        buses = [
            NatsBus(self.broker.access(role), fleet="test", name=f"test-{i}")
            for i, role in enumerate(roles)
        ]
        for bus in buses:
            await bus.connect()
        # "auto" is bfloat16 on some CPUs, where a cached and a cold prompt may differ in a last bit.
        forwards = [
            load(self.path, num_blocks=NUM_BLOCKS, threads=2, name=MODEL, dtype="float32")
            for _ in "ab"
        ]
        hosts = {f"a{i}": self._host(i, f, buses[i]) for i, f in enumerate(forwards)}
        for host in hosts.values():
            await host.start()
        metrics = GatewayMetrics("g0")
        transport = LocalTransport("g0", hosts)
        gateway = make_gateway(
            "g0", buses[2], transport, self.router, forwards[0].spec, metrics=metrics
        )
        await gateway.start_up()
        api = build_api(
            gateway,
            Tokenizer.load(self.path),
            ChatTemplate.load(self.path, special_tokens=Tokenizer.load(self.path).special_tokens),
            access=Access(None, {}),
            scopes=Scopes(b"secret", draw=secrets.token_bytes),
            model_name=MODEL,
            limits=HttpSettings(),
            created=1,
            clock=time.time,
            new_id=lambda: uuid.uuid4().hex,
            draw_seed=lambda: secrets.randbits(64),
            count_answer=metrics.answered,
        )
        server = uvicorn.Server(
            uvicorn.Config(api, port=self.port, log_level="error", lifespan="off", ws="none")
        )
        serving = asyncio.create_task(server.serve())
        while not (server.started and len(self.router.workers()) == 2):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        self._ready.set()
        await self._stop.wait()
        server.should_exit = True
        await serving
        await gateway.close()
        for host in hosts.values():
            await host.close()
        for bus in buses:
            await bus.close()
        await self.broker.stop()

    def _host(self, number: int, forward: TorchForward, bus: NatsBus) -> Host:
        worker, life = WorkerId(f"w{number}"), Incarnation(time.time_ns())
        engine = Engine(
            forward,
            config=EngineConfig(),
            clock=time.monotonic,
            worker=worker,
            incarnation=life,
            structures=TokenGrammars(
                self.path / "tokenizer.json", forward.spec.vocab_size, forward.spec.eos_token_ids
            ),
        )
        self.engines[worker] = engine
        host = Host(
            worker,
            bus,
            address=f"a{number}",
            fleet="test",
            clock=time.monotonic,
            lease_period_s=0.2,
        )
        add_engine(host, engine, Capacity(forward.block_size, NUM_BLOCKS, 256))
        return host


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    try:
        path = resolve_model("smollm2")
    except ModelError as error:
        pytest.skip(f"no SmolLM2 weights: {error}")
    with Stack(path) as running:
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.base_url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_completion_is_the_models_greedy_text(client: openai.OpenAI) -> None:
    """I17: completion through the official client, usage counted."""
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0)
    assert answer.choices[0].text.startswith(" Paris")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 8)
    tokens = [504, 3575, 282, 4649, 314]  # the same prompt as ids
    again = client.completions.create(model=MODEL, prompt=tokens, max_tokens=8, temperature=0)
    assert again.choices[0].text == answer.choices[0].text


def test_a_small_model_calls_what_it_must(client: openai.OpenAI) -> None:
    """I16, part, I17: SmolLM2, whose own template has no tools, makes calls that conform."""
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Bergen"]}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    names = ("get_weather", "get_tides")
    tools: Any = [
        {"type": "function", "function": {"name": name, "parameters": schema}} for name in names
    ]
    asked: Any = {"model": MODEL, "tools": tools, "max_tokens": 120, "seed": 1}
    question: Any = {"role": "user", "content": "Will it rain in Bergen on two days?"}
    named = {"type": "function", "function": {"name": "get_tides"}}
    for choice in ("required", named):
        made = client.chat.completions.create(
            messages=[question], tool_choice=choice, parallel_tool_calls=False, **asked
        ).choices[0]
        assert made.finish_reason == "tool_calls"
        assert made.message.content is None
        assert made.message.tool_calls is not None
        (call,) = made.message.tool_calls
        assert call.type == "function"
        assert call.function.name in (names if choice == "required" else names[1:])
        given = json.loads(call.function.arguments)
        assert given.keys() == {"city", "days"}
        assert given["city"] in ("Oslo", "Bergen")
        assert given["days"] in (1, 2, 3)
    result = {"role": "tool", "tool_call_id": call.id, "content": "high at 9"}
    history: Any = [question, made.message.model_dump(), result]
    after = client.chat.completions.create(messages=history, **asked)
    assert after.usage is not None
    assert after.usage.prompt_tokens_details is not None
    new = after.usage.prompt_tokens - (after.usage.prompt_tokens_details.cached_tokens or 0)
    # The call that it wrote and the result are new, not the tools and the question: tens, not hundreds.
    assert new < 100 < after.usage.prompt_tokens


def test_chat_streams_the_same_text_as_it_answers_whole(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
    whole = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=12, temperature=0
    )
    assert "Paris" in (whole.choices[0].message.content or "")
    stream = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]


class City(pydantic.BaseModel):
    """The object that the parse test asks for."""

    model_config = pydantic.ConfigDict(extra="forbid")

    name: str = pydantic.Field(max_length=12)
    millions: int = pydantic.Field(ge=0, le=40)
    tags: list[str] = pydantic.Field(max_length=2)


SCHEMA = {
    "type": "object",
    "properties": {
        # ASCII: a cut may fall inside any other character, whose halves are no text.
        "city": {"type": "string", "pattern": "^[A-Za-z ]{1,10}$"},
        "river": {"enum": ["Seine", "Danube"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city", "river", "size"],
    "additionalProperties": False,
}
MESSAGES: Any = [{"role": "user", "content": "Describe the capital of France as JSON."}]


def test_the_official_client_gets_objects_of_its_schema_with_logprobs(
    client: openai.OpenAI,
) -> None:
    """I16, part, I17, D9: response_format json_schema, n, logprobs, whole and streamed; `.parse()`."""
    asked: Any = {"name": "capital", "strict": True, "schema": SCHEMA}
    form: Any = {"type": "json_schema", "json_schema": asked}
    more: Any = {"model": MODEL, "messages": MESSAGES, "seed": 4, "max_tokens": 200}
    more["response_format"] = form
    whole = client.chat.completions.create(**more, n=4, logprobs=True, top_logprobs=3)
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)
        assert choice.logprobs is not None
        content = choice.logprobs.content or []
        assert "".join(entry.token for entry in content) == choice.message.content
        assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in content)
    chunks = client.chat.completions.create(**more, stream=True)
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == whole.choices[0].message.content
    parsed = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=City, seed=4, max_tokens=300
    )
    assert isinstance(parsed.choices[0].message.parsed, City)


def test_an_object_that_was_cut_is_finished_by_its_forks(stack: Stack) -> None:
    """D9, F1, part: over HTTP: cut in mid-object, forked, every child valid; a bad grammar is a 400."""
    with Mallee(stack.base_url) as client:
        branches = client.stream(
            "A capital: ", max_tokens=9, guided_json=SCHEMA, seed=5, logprobs=1
        )
        (cut,) = branches.wait()
        assert cut.finish_reason == "length"
        assert len(cut.logprobs["tokens"]) == 9
        more = {"max_tokens": 80, "seed": 1, "response_format": {"type": "inherit"}}
        children = cut.fork(4, **more).wait()
        texts = [cut.text + child.text for child in children]
        for text in texts:
            jsonschema.validate(json.loads(text), SCHEMA)
        assert len(set(texts)) > 1
        body = {"prompt": "x", "guided_regex": "[a"}
        answer = httpx.post(f"{stack.base_url}/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "guided_regex")
        assert "unclosed" in answer.json()["error"]["message"]


def test_completion_logprobs_are_the_models(client: openai.OpenAI) -> None:
    """I5: greedy draws the likeliest; penalties and bias change draws, not the report."""
    more: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
    plain = client.completions.create(**more, logprobs=2).choices[0]
    assert plain.logprobs is not None
    tokens, tops = plain.logprobs.tokens or [], plain.logprobs.top_logprobs or []
    assert "".join(tokens) == plain.text
    assert all(max(top, key=top.__getitem__) == t for t, top in zip(tokens, tops, strict=True))
    banned = client.completions.create(**more, logprobs=2, logit_bias={"7042": -100}).choices[0]
    assert banned.logprobs is not None
    assert (banned.logprobs.top_logprobs or [])[0] == pytest.approx(tops[0], abs=1e-3)
    again = client.completions.create(**more, presence_penalty=2.0, frequency_penalty=2.0)
    assert again.choices[0].text
