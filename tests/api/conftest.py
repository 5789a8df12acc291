"""A scripted service, a byte-level text side, and ways to talk to the API over them."""

import asyncio
import codecs
import json
import random
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import msgspec
import openai
import pytest
from anyio.from_thread import start_blocking_portal
from starlette.applications import Starlette

from bench.doubles.bus import LocalBus, LocalHub
from mallee.api.api import (
    DEFAULT_CHATS,
    ApiSettings,
    Draws,
    Entry,
    ServedModel,
    build_api,
)
from mallee.api.text.chat import ChatTemplate
from mallee.gateway.access.access import Access
from mallee.gateway.bodies import decisions_body, workers_body
from mallee.gateway.capsules.capsules import CapsuleInfo
from mallee.gateway.metrics import GatewayMetrics
from mallee.gateway.peers import Peers
from mallee.gateway.requests.deltas import Delta
from mallee.gateway.requests.lives import BranchLife
from mallee.gateway.requests.observers import Observer
from mallee.gateway.store.store import Store, StoreTerms
from mallee.protocol.errors import MalleeError, NotFound, UnknownCapsule, UnknownRequest
from mallee.protocol.hashing import Tokens, as_tokens
from mallee.protocol.ids import CapsuleId, RequestId, Scope, WorkerId
from mallee.protocol.model import ModelSpec
from mallee.router.config import RouterConfig
from mallee.router.dispatch.jobs import ForkJob, GenerateJob, Job, PrefillJob
from mallee.router.router import Router
from mallee.runtime.config import ChatSettings, HttpSettings
from mallee.runtime.proxy.server import Server
from mallee.runtime.tasks import Tasks
from support.any_gateway import IS_ON
from support.live_api import serving
from support.plain_ids import SCOPES
from support.virtual.loop import run

EOS, BOS, VOCAB = 256, 257, 300
MODEL = "tiny/bytes"
CREATED = 1_760_000_000
NUM_GATEWAYS = 3 if IS_ON else 1


class ByteTokenizer:
    """One token per UTF-8 byte; a beginning-of-text token where special tokens are asked for."""

    longest_token: int | None = None
    added_tokens: dict[str, int] = {"<|end|>": EOS}

    def encode(self, text: str, *, add_special_tokens: bool = False, scope: str = "") -> list[int]:
        head = [BOS] if add_special_tokens and text else []
        return head + list(text.encode())

    def tokens(self, text: str, *, add_special_tokens: bool = False, scope: str = "") -> Tokens:
        return as_tokens(self.encode(text, add_special_tokens=add_special_tokens))

    def delimiters(self, among: Collection[str]) -> tuple[str, ...]:
        return ()

    def detokenizer(self, shown: Sequence[str] = ()) -> "ByteDetokenizer":
        return ByteDetokenizer()

    def token_bytes(self, token: int) -> bytes:
        return bytes((token,)) if token < 256 else b""

    def token_text(self, token: int) -> str:
        return {BOS: "<bos>", EOS: "<eos>"}.get(token, chr(token))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        assert not skip_special_tokens
        return "".join(self.token_text(i) for i in ids if i >= 256) + bytes(
            i for i in ids if i < 256
        ).decode(errors="replace")


class ByteDetokenizer:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: Sequence[int], *, is_last: bool = False) -> str:
        return self._decoder.decode(bytes(t for t in tokens if t < 256), final=is_last)

    @property
    def is_waiting(self) -> bool:
        return bool(self._decoder.getstate()[0])


# `<role>content|` for each message, Hermes' form for tools and their results.
PLAIN_CHAT = """
{%- for tool in tools or [] %}<tool>{{ tool | tojson }}|{% endfor %}
{%- for message in messages %}
    {{- '<' + message.role + '>' }}
    {%- if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
    {%- endfor %}
    {{- '|' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{{ '<think>' if enable_thinking else '' }}{% endif %}"""


class FakeStream:
    """Plays its service's script for one job; remembers what its reader gave up."""

    def __init__(
        self, service: "FakeService", job: Job, number: int, observers: Sequence[Observer]
    ) -> None:
        self._observers = observers
        self._service = service
        self.job = job
        self.request = RequestId(f"req_{number}")
        self.worker = WorkerId("w0")
        self.cancelled: set[int] = set()
        self.cuts: dict[int, tuple[int, list[int]]] = {}
        self.num_closes = 0

    def take(self) -> None:
        """Nothing ever waits: the script is played when it is asked."""

    def cancel(self, branch: int) -> None:
        self.cancelled.add(branch)

    def cut(self, branch: int, at: int, residue: Tokens, end: str = "stop") -> CapsuleId | None:
        self.cancelled.add(branch)
        self.cuts[branch] = at, residue.tolist()
        return CapsuleId(f"{self.request}.{branch}")

    async def aclose(self) -> None:
        self.num_closes += 1
        if all(stream.num_closes for stream in self._service.streams):
            self._service.closed.set()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        async for delta in self._service.script(self):
            if delta.branch not in self.cancelled:
                for observer in self._observers:
                    observer.delivered(BranchLife(delta.branch), delta)
                yield delta


class FakeCapsules(dict[CapsuleId, CapsuleInfo]):
    """Capsules that are all on a worker."""

    asked_scope: Scope

    async def show(self, capsule: CapsuleId, scope: Scope) -> CapsuleInfo:
        self.asked_scope = scope
        if capsule not in self:
            raise UnknownCapsule(capsule)
        return self[capsule]

    inspect = show

    async def release(self, capsule: CapsuleId, scope: Scope) -> None:
        await self.show(capsule, scope)
        del self[capsule]

    def is_kept(self, capsule: CapsuleId) -> bool:
        return capsule in self


def peers_of(bus: LocalBus, gateway: str, others: Collection[str] | None) -> Peers:
    return Peers(
        bus, gateway=gateway, store="test", others=lambda: others, ids=SCOPES, clock=lambda: 0.0
    )


class FakeService:
    """Answers every branch with the bytes of `reply(branch)`, one token a delta, branches in turn.

    Branch 0 computed all of the prompt but 4 tokens; the others found everything. With
    `holds_after` set, streams fall silent after that many rounds until they are cancelled.
    """

    block_size = 16

    def __init__(self, gateway: str = "g0", hub: LocalHub | None = None) -> None:
        """One of the gateways of a `hub`."""
        self.model = ModelSpec(
            name=MODEL,
            fingerprint="f" * 16,
            vocab_size=VOCAB,
            max_model_len=256,
            num_layers=2,
            num_kv_heads=1,
            head_dim=8,
            dtype_nbytes=4,
            eos_token_ids=(EOS,),
        )
        self.gateway_metrics = GatewayMetrics()
        self.tasks = Tasks("a service")
        self.router = Router(RouterConfig(max_workers=8), clock=lambda: 0.0)
        self.hub = hub or LocalHub()
        self.bus = LocalBus(self.hub)
        self.bus.connect_now()
        self.store = Store(self.bus, StoreTerms("test"))
        self.peers = peers_of(self.bus, gateway, None)
        self.requests = self.operator = self
        self.sessions = SimpleNamespace(budget=self.no_budget)
        self.started = threading.Event()
        self.closed = threading.Event()  # every stream started so far
        self.reset()

    def reset(self) -> None:
        self.reply: Callable[[int], str] = lambda branch: f"hello {branch}"
        self.script: Callable[[FakeStream], AsyncIterator[Delta]] = self.plain
        self.holds_after: int | None = None
        self.refuses: BaseException | None = None
        self.status = "ok"
        self.streams: list[FakeStream] = []
        name = CapsuleId("req_x.0")
        self.capsules = FakeCapsules({name: CapsuleInfo(name, WorkerId("w0"), 32, 7)})
        self.started.clear()
        self.closed.clear()

    @property
    def context(self) -> Any:
        return SimpleNamespace(
            gateway="g0",
            model=self.model,
            metrics=self.gateway_metrics,
            wall_clock=lambda: CREATED + 5.5,
        )

    @property
    def job(self) -> Any:
        return self.streams[-1].job

    def new_name(self, scope: Scope, account: str = "") -> RequestId:
        return SCOPES.new(scope, account)

    async def no_budget(self, session: str, scope: Scope, parent: str) -> str:
        return ""

    async def start(
        self,
        job: Job,
        prepare_s: float = 0.0,
        *,
        name: RequestId | None = None,
        observers: Sequence[Observer] = (),
    ) -> FakeStream:
        assert prepare_s >= 0
        if self.refuses is not None:
            raise self.refuses
        self.streams.append(FakeStream(self, job, len(self.streams), observers))
        if name is not None:
            self.streams[-1].request = name
        self.started.set()
        return self.streams[-1]

    async def plain(self, stream: FakeStream) -> AsyncIterator[Delta]:
        job = stream.job
        if isinstance(job, PrefillJob):
            last = _last(stream, 0, (), "stop", len(job.tokens))
            assert last.capsule is not None
            kept = CapsuleInfo(last.capsule, stream.worker, last.boundary, 7)
            self.capsules[last.capsule] = kept
            yield last
            return
        branches = job.n if isinstance(job, GenerateJob) else len(job.suffixes)
        outs = [[*self.reply(b).encode(), EOS] for b in range(branches)]
        for round_ in range(max(map(len, outs))):
            if round_ == self.holds_after:
                await asyncio.Event().wait()
            for b, out in enumerate(outs):
                if round_ < len(out):
                    yield self._delta(stream, b, out, round_)
            await asyncio.sleep(0)

    def _delta(self, stream: FakeStream, branch: int, out: list[int], i: int) -> Delta:
        job = stream.job
        assert not isinstance(job, PrefillJob)
        if i >= job.limits.max_tokens:
            out.clear()
        finish = "length" if i + 1 == job.limits.max_tokens else None
        if i + 1 == len(out) and finish is None:
            finish = "stop"
        token, top = out[i], job.sampling.logprobs
        chance = (-0.5, tuple((token + k, -0.5 - k) for k in range(top)))
        chances = (chance,) if top >= 0 else ()
        if finish is None:
            found = Delta(branch, (token,), None, *_prompt(job, branch), None, i + 1, None)
        else:
            found = _last(stream, branch, (token,), finish, i + 1)
            del out[i + 1 :]
        return found._replace(logprobs=chances)

    def decisions(self, request: RequestId | None, limit: int, candidates: int) -> dict[str, Any]:
        return decisions_body(self.router, request, limit, candidates)

    def life(self, request: RequestId, scope: Scope, *, names_workers: bool) -> dict[str, Any]:
        raise UnknownRequest(request)

    async def workers(self) -> dict[str, Any]:
        return workers_body(self.router.all_workers(), {})

    async def drain_worker(self, worker: WorkerId) -> None:
        raise NotFound(f"no worker {worker!r} here", param="worker", worker=worker)

    def health(self) -> dict[str, object]:
        return {"status": self.status, "workers": []}

    def metrics(self, accept: str = "") -> bytes:
        return self.gateway_metrics.render()


class AnyApp:
    """Sends each request to one of the apps, drawn at random; else it looks like the first."""

    def __init__(self, apps: Sequence[Starlette]) -> None:
        self._apps = apps
        self._draws = random.Random(0)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._draws.choice(self._apps)(scope, receive, send)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._apps[0], name)


class SameService:
    """Another gateway of a service (`ANY_GATEWAY=1`), with a bus and a store of its own."""

    def __init__(self, service: FakeService, name: str, others: Collection[str]) -> None:
        self._service = service
        self.bus = LocalBus(service.bus._hub)
        self.bus.connect_now()
        self.store = Store(self.bus, StoreTerms("test"))
        self.peers = peers_of(self.bus, name, others)
        for _ in self.peers.start_up().__await__():
            raise AssertionError("nothing of it waits")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)


def _prompt(job: Job, branch: int) -> tuple[int, int]:
    """(cached, prefill) tokens."""
    if isinstance(job, ForkJob):
        return 32, len(job.suffixes[branch])
    length = len(job.tokens)
    cached = min(4, length) if branch == 0 else length
    return cached, length - cached


def _last(
    stream: FakeStream, branch: int, tokens: tuple[int, ...], finish: Any, boundary: int
) -> Delta:
    capsule = CapsuleId(f"{stream.request}.{branch}")
    counts = _prompt(stream.job, branch)
    return Delta(branch, tokens, finish, *counts, capsule, boundary, None)


def failure(branch: int, error: MalleeError) -> Delta:
    return Delta(branch, (), "error", 0, 0, None, 0, error)


class Answer(NamedTuple):
    """An HTTP answer with its JSON, or its events if it was a stream."""

    status: int
    headers: httpx.Headers
    body: Any
    events: list[Any]


def decode(response: httpx.Response) -> Answer:
    kind = response.headers.get("content-type", "")
    events: list[Any] = []
    body: Any = response.text
    if kind.startswith("text/event-stream"):
        for part in response.text.split("\n\n")[:-1]:
            assert part.startswith("data: ")
            data = part[len("data: ") :]
            events.append(data if data == "[DONE]" else json.loads(data))
    elif kind == "application/json":
        body = json.loads(response.text)
    return Answer(response.status_code, response.headers, body, events)


class Caller:
    """The API in this process: one request a call."""

    def __init__(
        self,
        service: FakeService,
        limits: HttpSettings,
        access: Access | None = None,
        chats: ChatSettings = DEFAULT_CHATS,
        **more: Any,
    ) -> None:
        """`more` is of `make_app`."""
        self.service = service
        self.tokenizer = ByteTokenizer()
        self.app = make_app(service, limits, self.tokenizer, access, chats, **more)

    def __call__(self, method: str, path: str, body: Any = None, **kwargs: Any) -> Answer:
        return decode(self.raw(method, path, json=body, **kwargs))

    def raw(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        return run(self._send(method, path, **kwargs))

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            transport=httpx.ASGITransport(app=self.app), base_url="http://test"
        )

    async def _send(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        async with self.client() as client:
            return await client.request(method, path, **kwargs)


def make_app(
    service: FakeService,
    limits: HttpSettings,
    tokenizer: ByteTokenizer,
    access: Access | None = None,
    chats: ChatSettings = DEFAULT_CHATS,
    *,
    aliases: tuple[str, ...] = (),
    num_gateways: int = NUM_GATEWAYS,
) -> Any:
    """The API of a service; over several, of any of its gateways."""
    seeds = iter(range(1000, 1_000_000))

    def made(gateway: Any) -> Starlette:
        return build_api(
            gateway,
            ServedModel(MODEL, tokenizer, ChatTemplate(PLAIN_CHAT), CREATED, aliases),
            Entry(access or Access(None, {}), SCOPES),
            ApiSettings(limits, chats),
            Draws(lambda: "err_1", lambda: next(seeds)),
        )

    if num_gateways == 1:
        return made(service)
    names = [f"g{i}" for i in range(num_gateways)]
    return AnyApp([made(SameService(service, name, {*names} - {name})) for name in names])


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def call(service: FakeService) -> Caller:
    return Caller(service, HttpSettings(max_body_bytes=4096))


@pytest.fixture
def call_with(service: FakeService) -> Callable[..., Caller]:
    return lambda limits, access=None, **more: Caller(service, limits, access, **more)


@pytest.fixture(scope="session")
def fake_service() -> Callable[..., FakeService]:
    """Makes one."""
    return FakeService


@pytest.fixture(scope="session")
def call_over() -> Callable[..., Caller]:
    """The API over one gateway, a service of the test's own, with keys or without."""
    return lambda service, access=None, **limits: Caller(
        service, HttpSettings(**limits), access, num_gateways=1
    )


@pytest.fixture
def failed() -> Callable[[int, MalleeError], Delta]:
    return failure


class Live(NamedTuple):
    """The API behind a real server on loopback."""

    port: int
    service: FakeService
    server: Server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def connect(self) -> "Connection":
        return Connection(*await asyncio.open_connection("127.0.0.1", self.port))


class Connection:
    """A client that sends and reads bytes; closed at the end of its block."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def __aenter__(self) -> "Connection":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    def send(self, raw: bytes) -> None:
        self._writer.write(raw)

    async def read_to(self, mark: bytes) -> bytes:
        """All until `mark` has come."""
        return await self._reader.readuntil(mark)

    async def read_rest(self) -> bytes:
        """All that comes until the server closes; an abort counts as the end."""
        raw = b""
        with suppress(ConnectionError):
            while more := await self._reader.read(1 << 16):
                raw += more
        return raw

    async def answer(self) -> tuple[int, bytes]:
        """One answer with a declared length: its status and body."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        _, _, length = head.partition(b"content-length: ")
        return int(head.split(b" ")[1]), await self._reader.readexactly(int(length.split()[0]))


def live_app(service: FakeService) -> Starlette:
    service.model = msgspec.structs.replace(service.model, max_model_len=1024)  # tools take room
    return make_app(service, HttpSettings(max_body_bytes=100_000), ByteTokenizer())


@pytest.fixture
async def live(service: FakeService) -> AsyncIterator[Live]:
    """In the event loop of the test."""
    async with serving(live_app(service)) as (url, server):
        yield Live(int(url.rpartition(":")[2]), service, server)


@pytest.fixture
async def official(live: Live) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's own client."""
    async with openai.AsyncOpenAI(
        base_url=f"{live.url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


@pytest.fixture
def live_in_thread(service: FakeService) -> Iterator[Live]:
    """In a thread of its own, for tests that block."""
    behind = serving(live_app(service))
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(behind) as (url, server),
    ):
        yield Live(int(url.rpartition(":")[2]), service, server)
