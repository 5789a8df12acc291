"""The spans of requests that a router forwards: one each, below it the parts of its course, in their order.

POST /v1/chat/completions   from its last byte to the end of its answer; the backend's spans are below it
|- choose                   reading its prompt, and the choice of a backend
|- connect                  where no connection was kept
|- first byte               from its sending to the first piece of the answer
|- failover                 after a failure, the choice of another backend
`- answer
"""

from collections.abc import Sequence
from typing import Final

from opentelemetry import propagate
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace import set_span_in_context as below

from mallee.actors.front.http.messages import Line, line
from mallee.runtime.telemetry.tracing import genai
from mallee.runtime.telemetry.tracing.provider import Tracing

# Other paths may hold clients' names.
_ROUTES: Final = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/v1/embeddings", "/v1/models", "/v1/router/select"),
)


class ForwardSpans:
    """Begins the spans of a router's requests."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracer = tracing.tracer

    def begin(self, method: str, path: str, lines: Sequence[Line]) -> "ForwardTrace | None":
        """The trace of a request; None: it is not sampled. `lines`: of its head."""
        head = {name.decode("latin-1"): value.decode("latin-1") for name, value, _ in lines}
        context = propagate.extract(head)
        path = path.partition("?")[0]
        route = path if path in _ROUTES else "other"
        span = self._tracer.start_span(
            f"{method} {route}",
            context,
            kind=SpanKind.SERVER,
            attributes={genai.METHOD: method, genai.ROUTE: route},
        )
        if not span.is_recording():
            return None
        carrier: dict[str, str] = {}
        propagate.inject(carrier, below(span, context))
        own = [line(name.encode(), value.encode()) for name, value in carrier.items()]
        names = {name for name, _, _ in own}
        passed = [each for each in lines if each[0] not in names]
        return ForwardTrace(self, span, [*passed, *own])

    def start(self, name: str, above: Span) -> Span:
        return self._tracer.start_span(name, below(above))


class ForwardTrace:
    """The spans of one request. `lines`: of its head, as its backend gets them, with its context."""

    def __init__(self, spans: ForwardSpans, span: Span, lines: list[Line]) -> None:
        self.lines = lines
        self._spans = spans
        self._span = span
        self._part = spans.start("choose", span)

    def chosen(self, worker: str, reason: str, overlap_blocks: int) -> None:
        """A backend is chosen."""
        found: genai.Attributes = {
            genai.WORKER: worker,
            genai.REASON: reason,
            genai.OVERLAP: overlap_blocks,
        }
        self._part.set_attributes(found)
        self._span.set_attributes(found)

    def next(self, part: str) -> None:
        """The part of its course that was under way is over, and `part` begins."""
        self._part.end()
        self._part = self._spans.start(part, self._span)

    def failed(self, error: str, *, then: str) -> None:
        """As `next`, after a failure."""
        _fail(self._part, error)
        self.next(then)

    def end(self, status: int, how: str) -> None:
        """It is over: `how`, and with this HTTP status (0: there was no answer)."""
        if status:
            self._span.set_attribute(genai.STATUS, status)
        if how != "answered" or status >= 500:
            for span in (self._part, self._span):
                _fail(span, how if how != "answered" else str(status))
        self._part.end()
        self._span.end()


def _fail(span: Span, error: str) -> None:
    span.set_attribute(genai.ERROR, error)
    span.set_status(Status(StatusCode.ERROR))
