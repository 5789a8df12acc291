"""Spans that were exported, as a tree to compare and to look at."""

from collections.abc import Iterable, Sequence
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from mallee.runtime.telemetry.tracing.provider import Tracing


class Spans:
    """A tracer, and the spans that it made and that have ended."""

    def __init__(self, **provider: Any) -> None:
        self._exporter = InMemorySpanExporter()
        made = TracerProvider(shutdown_on_exit=False, **provider)
        made.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = Tracing(made)

    @property
    def ended(self) -> Sequence[ReadableSpan]:
        return self._exporter.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        """Those of that name, the earliest first."""
        return sorted((s for s in self.ended if s.name == name), key=lambda span: span.start_time)

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span

    @property
    def tree(self) -> list[str]:
        """A line a span, indented below its parent, siblings by their begin."""
        return list(_lines(self.ended, None, ""))


def _place(span: ReadableSpan) -> tuple[int, bool, int]:
    """Those that took no time come before those that begin with them."""
    return span.start_time, span.end_time > span.start_time, -span.end_time


def _lines(spans: Sequence[ReadableSpan], parent: int | None, indent: str) -> Iterable[str]:
    ids = {span.context.span_id for span in spans}
    by_name = sorted(spans, key=lambda span: span.name, reverse=True)  # those with equal times
    for span in sorted(by_name, key=_place):
        above = span.parent.span_id if span.parent is not None else None
        if above == parent or (parent is None and above not in ids):
            yield indent + span.name
            yield from _lines(spans, span.context.span_id, indent + "  ")
