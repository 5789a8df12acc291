"""Pickers in front of stub pods, and a proxy that speaks to them as Envoy does."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio

from bench.doubles.vllm_pod import VllmPod
from mallee.actors.front.picker import wire
from mallee.actors.front.picker.config import PickerConfig
from mallee.actors.front.picker.conversation import PIECE_NBYTES
from mallee.actors.front.picker.picker import Picker
from mallee.runtime.addresses import free_port
from support.tokenizers_made import byte_level
from support.waiting import until

START_S = 60.0
DESTINATION = "x-gateway-destination-endpoint"


@asynccontextmanager
async def picker_process(folder: Path, **settings: Any) -> AsyncIterator["PickerProcess"]:
    """`mallee picker` in a process of its own, ready."""
    port = free_port()
    file = folder / f"picker-{port}.yaml"
    file.write_text(json.dumps({"listen": f"127.0.0.1:{port}", "scrape_s": 0.2, **settings}))
    with (folder / f"picker-{port}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "mallee.cli", "picker", "--config", str(file)),
            stdout=log,
            stderr=log,
        )
    made = PickerProcess(process, port, folder / f"picker-{port}.log")
    try:
        await made.ready()
        yield made
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), 15)


class PickerProcess(NamedTuple):
    """A picker's process."""

    process: asyncio.subprocess.Process
    port: int
    log: Path

    async def ready(self) -> None:
        async with Proxy(self.port) as proxy:
            begin = time.monotonic()
            while time.monotonic() < begin + START_S and self.process.returncode is None:
                with suppress(grpc.aio.AioRpcError):
                    if await proxy.health("readiness") == 1:
                        return
                await asyncio.sleep(0.05)
        raise AssertionError(f"the picker did not start:\n{self.log.read_text()}")


class Answer(NamedTuple):
    """A picker's word on a request."""

    status: int  # 0: it goes on
    endpoints: tuple[str, ...]
    body: bytes


def picker_config(pods: Sequence[str], **more: Any) -> PickerConfig:
    return PickerConfig(listen="127.0.0.1:0", endpoints=tuple(pods), scrape_s=0.1, **more)


def model_folder(folder: Path) -> str:
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text("{}")
    return str(folder)


def prompt(number: int, num_tokens: int = 200) -> dict[str, Any]:
    return {"model": "m", "prompt": [number * 1000 + i for i in range(num_tokens)], "max_tokens": 4}


@asynccontextmanager
async def pods(num: int, **options: Any) -> AsyncIterator[list[VllmPod]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(VllmPod(**options)) for _ in range(num)]


@asynccontextmanager
async def running(
    config: PickerConfig,
    num_ready: int | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[Picker]:
    """A picker that has asked its pods; waits for so many of them, by default all that are listed."""
    async with Picker(config, clock=clock) as picker:
        wanted = len(config.endpoints) if num_ready is None else num_ready
        await until(lambda: picker.is_ready and len(picker.router.workers()) == wanted)
        try:
            yield picker
        finally:
            assert picker.failure is None
            picker.router.check()


class Proxy:
    """Streams to one picker, in the mode that the proposal demands.

    Over TLS with the file of a `ca`, for a certificate of `host`.
    """

    def __init__(self, port: int, ca: Path | None = None, host: str = "127.0.0.1") -> None:
        place = f"127.0.0.1:{port}"
        if ca is None:
            self._channel = grpc.aio.insecure_channel(place)
        else:
            trust = grpc.ssl_channel_credentials(ca.read_bytes())
            options = [("grpc.ssl_target_name_override", host)]
            self._channel = grpc.aio.secure_channel(place, trust, options)
        self._process = self._channel.stream_stream(f"/{wire.PROCESS}/Process")
        self._check = self._channel.unary_unary(
            f"/{wire.HEALTH}/Check",
            request_serializer=wire.HealthCheckRequest.SerializeToString,
            response_deserializer=wire.HealthCheckResponse.FromString,
        )

    async def __aenter__(self) -> "Proxy":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def health(self, service: str = "") -> int:
        found = await self._check(wire.HealthCheckRequest(service=service), timeout=5)
        return int(found.status)

    def stream(self) -> "Exchange":
        return Exchange(self._process())

    async def ask(
        self, body: dict[str, Any], *, path: str = "/v1/completions", **options: Any
    ) -> Answer:
        """The picker's word on one request, which ends there."""
        exchange = self.stream()
        answer = await exchange.request(body, path=path, **options)
        await exchange.end()
        return answer


class Exchange:
    """One HTTP request."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def send(self, message: Any) -> None:
        await self.call.write(message.SerializeToString())

    async def receive(self) -> Any:
        raw = await asyncio.wait_for(self.call.read(), 10)
        assert raw is not grpc.aio.EOF, "the picker ended the stream"
        return wire.ProcessingResponse.FromString(raw)

    async def end(self) -> None:
        await self.call.done_writing()
        assert await asyncio.wait_for(self.call.read(), 10) is grpc.aio.EOF

    async def request(
        self,
        body: dict[str, Any] | bytes | None,
        *,
        path: str = "/v1/completions",
        headers: dict[str, str] | None = None,
        subset: Sequence[str] | None = None,
    ) -> Answer:
        """Send all of a request and hear what becomes of it; its body must come back as it was."""
        raw = (
            body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        )
        first = wire.ProcessingRequest()
        for key, value in {":path": path, ":method": "POST", **(headers or {})}.items():
            first.request_headers.headers.headers.add(key=key, raw_value=value.encode())
        first.request_headers.end_of_stream = body is None
        if subset is not None:
            entry = first.metadata_context.filter_metadata.add(key="envoy.lb.subset_hint")
            entry.value.update({"x-gateway-destination-endpoint-subset": list(subset)})
        await self.send(first)
        if body is not None:
            half = len(raw) // 2
            for part, ends in ((raw[:half], False), (raw[half:], True)):
                message = wire.ProcessingRequest()
                message.request_body.body = part
                message.request_body.end_of_stream = ends
                await self.send(message)
        found = await self.receive()
        if found.WhichOneof("response") == "immediate_response":
            reply = found.immediate_response
            return Answer(reply.status.code, (), reply.body)
        (option,) = found.request_headers.response.header_mutation.set_headers
        value = option.header.raw_value.decode()
        assert option.header.key == DESTINATION
        assert found.request_headers.response.clear_route_cache
        assert found.dynamic_metadata["envoy.lb"][DESTINATION] == value
        back = b""
        while body is not None:
            piece = (await self.receive()).request_body.response.body_mutation.streamed_response
            assert len(piece.body) <= PIECE_NBYTES
            back += piece.body
            if piece.end_of_stream:
                break
        assert back == raw
        return Answer(0, tuple(value.split(",")), b"")

    async def respond(
        self, *parts: bytes, served: str | None = None, status: int = 200
    ) -> list[Any]:
        """Send an answer; the replies to it."""
        first = wire.ProcessingRequest()
        first.response_headers.headers.headers.add(key=":status", raw_value=b"%d" % status)
        if served is not None:
            entry = first.metadata_context.filter_metadata.add(key="envoy.lb")
            entry.value.update({"x-gateway-destination-endpoint-served": served})
        messages = [first]
        for number, part in enumerate(parts):
            message = wire.ProcessingRequest()
            message.response_body.body = part
            message.response_body.end_of_stream = number == len(parts) - 1
            messages.append(message)
        replies = []
        for message in messages:
            await self.send(message)
            replies.append(await self.receive())
        return replies
