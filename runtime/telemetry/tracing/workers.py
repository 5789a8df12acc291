"""The spans of commands in a worker's process, each below the shard's span in the gateway that sent it."""

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from opentelemetry.trace import Span, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from mallee.protocol.messages import ALL_BRANCHES, Update
from mallee.runtime.telemetry.tracing import genai
from mallee.runtime.telemetry.tracing.provider import Tracing

_W3C = TraceContextTextMapPropagator()


class _Begun(NamedTuple):
    span: Span
    open: set[int]  # branches
    step: int
    tokens: list[int]  # one number, how many were drawn


class WorkerSpans:
    """The open spans of one worker: from a command's arrival to the last update of its branches.

    Belongs to one event loop. False while none is open: nothing has to be looked at then.
    """

    def __init__(
        self, tracing: Tracing, worker: str, *, clock_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._tracer = tracing.tracer
        self._worker = worker
        self._clock_ns = clock_ns
        self._open: dict[tuple[str, str], _Begun] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def begin(
        self, gateway: str, request: str, kind: str, *, branches: int, trace: str, step: int
    ) -> None:
        """A command has come, after `step` steps of its engine; `trace` is its traceparent."""
        if (gateway, request) in self._open:
            return
        span = self._tracer.start_span(
            "engine",
            _W3C.extract({"traceparent": trace}),
            attributes={
                genai.WORKER: self._worker,
                genai.SHARD: request,
                genai.COMMAND: kind,
                genai.BRANCHES: branches,
            },
            start_time=self._clock_ns(),
        )
        if span.is_recording():
            self._open[gateway, request] = _Begun(span, set(range(branches)), step, [0])

    def note(self, gateway: str, request: str, event: str) -> None:
        """Something happened to a request."""
        if (begun := self._open.get((gateway, request))) is not None:
            begun.span.add_event(event, timestamp=self._clock_ns())

    def take(self, gateway: str, updates: Iterable[Update], step: int) -> None:
        """Take in what a step reports to a gateway."""
        for update in updates:
            begun = self._open.get((gateway, update.request))
            if begun is None:
                continue
            if update.tokens and not begun.tokens[0]:
                begun.span.add_event(
                    "first token",
                    {
                        genai.STEP: step,
                        genai.CACHED_TOKENS: update.cached_tokens,
                        genai.COMPUTED_TOKENS: update.prefill_tokens,
                    },
                    timestamp=self._clock_ns(),
                )
            begun.tokens[0] += len(update.tokens)
            if update.finish is None:
                continue
            if update.finish == "error":
                code = update.error[0] if update.error is not None else "error"
                _fail(begun.span, code)
            begun.open.discard(update.branch)
            if update.branch == ALL_BRANCHES or not begun.open:
                self._end(gateway, update.request, step)

    def drop(self, gateway: str) -> None:
        """The gateway has given this worker up, or is gone."""
        for of, request in [key for key in self._open if key[0] == gateway]:
            _fail(self._open[of, request].span, "cancelled")
            self._end(of, request)

    def end_all(self, reason: str) -> None:
        """This life is over."""
        for gateway, request in list(self._open):
            _fail(self._open[gateway, request].span, reason)
            self._end(gateway, request)

    def _end(self, gateway: str, request: str, step: int | None = None) -> None:
        begun = self._open.pop((gateway, request))
        begun.span.set_attribute(genai.OUTPUT_TOKENS, begun.tokens[0])
        if step is not None:
            begun.span.set_attribute(genai.STEPS, step - begun.step)
        begun.span.end(self._clock_ns())


def _fail(span: Span, error: str) -> None:
    span.set_attribute(genai.ERROR, error)
    span.set_status(Status(StatusCode.ERROR))
