"""The span of each HTTP request, from its head to the end of its answer; W3C context in and out."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from opentelemetry import propagate
from opentelemetry.context import attach, detach
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mallee.runtime.telemetry.tracing.genai import ERROR, METHOD, ROUTE, STATUS
from mallee.runtime.telemetry.tracing.provider import Tracing

RESPONSE_HEADER: Final = "traceresponse"
"""Of W3C's draft of level 2: a client finds the trace of its answer by it."""
_UNTRACED: Final = ("/health", "/metrics", "/-/")
_METHODS: Final = frozenset(("GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS"))


class HttpSpans:
    """ASGI middleware, the outermost. Only a path's template is told: paths hold clients' names."""

    def __init__(self, app: ASGIApp, *, tracing: Tracing) -> None:
        self._app = app
        self._tracer = tracing.tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(_UNTRACED):
            await self._app(scope, receive, send)
            return
        method = scope["method"] if scope["method"] in _METHODS else "_OTHER"
        context = propagate.extract(_carrier(Headers(scope=scope)))
        span = self._tracer.start_span(
            method, context, kind=SpanKind.SERVER, attributes={METHOD: method}
        )
        token = attach(set_span_in_context(span, context))
        try:
            if span.is_recording():
                await self._app(scope, receive, _told_to(send, span))
            else:
                await self._app(scope, receive, send)
        except BaseException as error:
            span.set_attribute(ERROR, type(error).__name__)
            span.set_status(Status(StatusCode.ERROR))
            raise
        finally:
            detach(token)
            route = getattr(scope.get("route"), "path", "other")
            span.set_attribute(ROUTE, route)
            span.update_name(f"{method} {route}")
            span.end()


def _carrier(headers: Headers) -> Mapping[str, str]:
    """Headers for propagators; one that came twice as one, as W3C has it."""
    return {name: ",".join(headers.getlist(name)) for name in _names(headers)}


def _names(headers: Headers) -> Iterator[str]:
    for field in propagate.get_global_textmap().fields:
        if field in headers:
            yield field


def _told_to(send: Send, span: Span) -> Send:
    """`send`, by which the span learns the status, and the client the span."""

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            status: int = message["status"]
            span.set_attribute(STATUS, status)
            if status >= 500:
                span.set_attribute(ERROR, str(status))
                span.set_status(Status(StatusCode.ERROR))
            _headers(message)[RESPONSE_HEADER] = traceparent(span)
        await send(message)

    return sent


def _headers(message: Message) -> MutableHeaders:
    raw: list[Any] = message.setdefault("headers", [])
    if not isinstance(raw, list):
        message["headers"] = list(raw)
    return MutableHeaders(scope=message)


def traceparent(span: Span) -> str:
    """W3C's text for a span."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
