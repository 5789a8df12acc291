"""The gRPC service: a conversation for each stream of Envoy's, and the health checks.

A fault of ours ends the stream with an error, and no answer is made up: the proxy's failure mode decides. So
does a decision that takes too long.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

from mallee.actors.front.picker.conversation import (
    Conversation,
    Finished,
    FirstPiece,
    Served,
    Step,
    Wanted,
)
from mallee.actors.front.picker.counts import PickerCounts
from mallee.actors.front.picker.messages import Destination, Passed, Piece
from mallee.actors.front.picker.wire import (
    HEALTH,
    PROCESS,
    HealthCheckRequest,
    HealthCheckResponse,
    read,
    write,
)
from mallee.actors.front.placement import Picked, Placement, Refusal
from mallee.actors.front.prompts import AT_ONCE_NBYTES, Prompt, cached_tokens
from mallee.protocol.errors import CodecError, ConfigError
from mallee.protocol.ids import RequestId

log = logging.getLogger(__name__)

BODY_S: Final = 30.0  # for all of a request, from its headers on
STREAM_S: Final = 3600.0  # for all of an answer
MAX_MESSAGE_NBYTES: Final = 4 << 20
MAX_HEALTH_CHECKS: Final = 64  # at once, at the port that is for them alone
WATCH_S: Final = 0.5  # between two looks for a watcher of the health
SERVING, NOT_SERVING = 1, 2
LIVENESS: Final = "liveness"
READINESS: Final = ("", "readiness", PROCESS)


ReadPrompt = Callable[[dict[str, str], bytes], Prompt]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the service."""

    max_body_nbytes: int
    max_streams: int
    decide_s: float


class PickerServer:
    """The service at one address. Belongs to one event loop.

    `read_prompt` reads one body, in any thread; `new_id()` names bookings; `is_ready()` answers health
    checks.
    """

    def __init__(
        self,
        placement: Placement,
        read_prompt: ReadPrompt,
        counts: PickerCounts,
        limits: Limits,
        *,
        new_id: Callable[[], RequestId],
        is_ready: Callable[[], bool],
    ) -> None:
        self._placement = placement
        self._read_prompt = read_prompt
        self._counts = counts
        self._limits = limits
        self._new_id = new_id
        self._is_ready = is_ready
        self._is_draining = False
        self._server: grpc.aio.Server | None = None
        self._health_server: grpc.aio.Server | None = None
        self.port = 0
        self.health_port = 0

    async def start_up(
        self, listen: str, tls: tuple[Path, Path] | None, health_listen: str | None = None
    ) -> None:
        """Listen at `listen`, and for health checks without TLS at `health_listen`. Raises ConfigError."""
        stream = grpc.stream_stream_rpc_method_handler(self._process)
        process = grpc.method_handlers_generic_handler(PROCESS, {"Process": stream})
        health = self._health_handler()
        server = _server(self._limits.max_streams, process, health)
        try:
            if tls is None:
                self.port = server.add_insecure_port(listen)
            else:
                self.port = server.add_secure_port(listen, _credentials(*tls))
        except RuntimeError as error:
            raise ConfigError(f"listen={listen!r}: {error}") from error
        self._server = server
        if health_listen is not None:
            checks = _server(MAX_HEALTH_CHECKS, health)
            try:
                self.health_port = checks.add_insecure_port(health_listen)
            except RuntimeError as error:
                raise ConfigError(f"health_listen={health_listen!r}: {error}") from error
            self._health_server = checks
            await checks.start()
        await server.start()

    def _health_handler(self) -> grpc.GenericRpcHandler:
        check = grpc.unary_unary_rpc_method_handler(
            self._check,
            request_deserializer=HealthCheckRequest.FromString,
            response_serializer=HealthCheckResponse.SerializeToString,
        )
        watch = grpc.unary_stream_rpc_method_handler(
            self._watch,
            request_deserializer=HealthCheckRequest.FromString,
            response_serializer=HealthCheckResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(HEALTH, {"Check": check, "Watch": watch})

    async def close(self, drain_s: float) -> None:
        """Say that it is not ready, give streams so long to end, then end them."""
        self._is_draining = True
        if self._server is not None:
            await self._server.stop(drain_s)
        if self._health_server is not None:
            await self._health_server.stop(None)

    async def _process(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        talk = _Talk(self, self._new_id())
        try:
            async with asyncio.timeout(BODY_S) as limit:
                async for raw in messages:
                    for reply in await talk.on_message(raw):
                        yield reply
                    if talk.is_answered:
                        limit.reschedule(asyncio.get_running_loop().time() + STREAM_S)
        except TimeoutError:
            self._counts.failed()
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the picker took too long")
        except CodecError as error:
            self._counts.failed()
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Exception:  # event pump: one request's fault must not end the others
            log.exception("a request could not be placed; the proxy goes on its own")
            self._counts.failed()
            await context.abort(grpc.StatusCode.INTERNAL, "the picker failed")
        finally:
            self._placement.free(talk.request)

    async def _pick(self, wanted: Wanted, request: RequestId) -> tuple[Picked | Refusal, Prompt]:
        began = time.perf_counter()
        async with asyncio.timeout(self._limits.decide_s):
            read_prompt = self._read_prompt
            if len(wanted.body) <= AT_ONCE_NBYTES:
                prompt = read_prompt(wanted.headers, wanted.body)
            else:
                prompt = await asyncio.to_thread(read_prompt, wanted.headers, wanted.body)
        picked = self._placement.pick(request, prompt, wanted.subset)
        outcome = str(picked.status) if isinstance(picked, Refusal) else "picked"
        self._counts.decided(outcome, time.perf_counter() - began)
        if isinstance(picked, Picked):
            self._counts.picked(len(prompt.hashes), picked.overlap_blocks)
        return picked, prompt

    def _status(self, service: str) -> int | None:
        """None: there is no such service."""
        if service == LIVENESS:
            return SERVING
        if service in READINESS:
            return SERVING if self._is_ready() and not self._is_draining else NOT_SERVING
        return None

    async def _check(self, request: Any, context: Any) -> Any:
        status = self._status(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return HealthCheckResponse(status=status)

    async def _watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        last = None
        while True:
            status = self._status(request.service) or 3  # SERVICE_UNKNOWN
            if status != last:
                yield HealthCheckResponse(status=status)
                last = status
            await asyncio.sleep(WATCH_S)


class _Talk:
    """One stream: its conversation, and its booking."""

    __slots__ = ("_machine", "_prompt", "_server", "_took", "request")

    def __init__(self, server: PickerServer, request: RequestId) -> None:
        self._server = server
        self._machine = Conversation(max_body_nbytes=server._limits.max_body_nbytes)
        self._prompt: Prompt | None = None
        self._took: Destination | None = None
        self.request = request

    @property
    def is_answered(self) -> bool:
        return self._machine.is_answered

    async def on_message(self, raw: bytes) -> list[bytes]:
        """The replies to one message. Raises CodecError, TimeoutError."""
        return await self._done(self._machine.on_message(read(raw)))

    async def _done(self, steps: list[Step]) -> list[bytes]:
        server, placement = self._server, self._server._placement
        replies: list[bytes] = []
        for step in steps:
            match step:
                case Passed() | Piece() | Refusal():
                    replies.append(write(step))
                case Wanted():
                    picked, self._prompt = await server._pick(step, self.request)
                    if isinstance(picked, Refusal):
                        replies += await self._done(self._machine.refused(picked))
                    else:
                        self._took = Destination(picked.endpoints)
                        replies += await self._done(self._machine.picked(self._took))
                case Served(endpoint):
                    self._follow(endpoint)
                case FirstPiece():
                    placement.first_token(self.request)
                case Finished(tail):
                    cached = cached_tokens(tail)
                    if cached is not None:
                        placement.observe_hit(self.request, cached)
                    placement.free(self.request)
        return replies

    def _follow(self, endpoint: str | None) -> None:
        """Book where the proxy went, if that is not where it was sent first."""
        if endpoint is None or self._took is None or self._prompt is None:
            return
        if endpoint != self._took.endpoints[0]:
            self._server._counts.served_elsewhere()
            self._server._placement.served(self.request, self._prompt, endpoint)


def _server(max_rpcs: int, *handlers: grpc.GenericRpcHandler) -> grpc.aio.Server:
    server = grpc.aio.server(
        maximum_concurrent_rpcs=max_rpcs,
        options=(
            ("grpc.max_receive_message_length", MAX_MESSAGE_NBYTES),
            ("grpc.so_reuseport", 0),
        ),
    )
    server.add_generic_rpc_handlers(handlers)
    return server


def _credentials(cert: Path, key: Path) -> Any:
    """Raises ConfigError if the files can't be read."""
    try:
        return grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())])
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from None
