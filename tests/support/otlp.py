"""A receiver of spans over OTLP, as a collector is one: a small HTTP server in threads."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

Value = str | int | float | bool | list[str]


class Received(NamedTuple):
    """A span as a backend shows it; ids are hexadecimal, times nanoseconds since the epoch."""

    name: str
    trace: str
    span: str
    parent: str
    begin: int
    end: int
    attributes: dict[str, Value]
    resource: dict[str, Value]
    links: list[str]


class Receiver:
    """The spans that came, in the order of their arrival."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[Received] = []
        self.raw = b""

    def named(self, name: str) -> list[Received]:
        return [span for span in self.spans if span.name == name]

    def of(self, trace: str) -> list[Received]:
        return [span for span in self.spans if span.trace == trace]

    def tree(self, trace: str) -> list[str]:
        """A line a span, indented below its parent, with its process and its milliseconds."""
        return list(_lines(self.of(trace), "", ""))

    def take(self, raw: bytes) -> None:
        """Take in the body of an export."""
        self.raw += raw
        for of_resource in ExportTraceServiceRequest.FromString(raw).resource_spans:
            resource = _values(of_resource.resource.attributes)
            for of_scope in of_resource.scope_spans:
                for span in of_scope.spans:
                    self.spans.append(
                        Received(
                            span.name,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            span.start_time_unix_nano,
                            span.end_time_unix_nano,
                            _values(span.attributes),
                            resource,
                            [link.span_id.hex() for link in span.links],
                        )
                    )


def _values(pairs: "list[KeyValue]") -> dict[str, Value]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Value:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [str(_value(each)) for each in value.array_value.values]
    found: Value = getattr(value, str(kind))
    return found


def _lines(spans: list[Received], parent: str, indent: str) -> Iterator[str]:
    known = {span.span for span in spans}
    by_name = sorted(spans, key=lambda span: span.name, reverse=True)
    for span in sorted(by_name, key=lambda span: (span.begin, -span.end)):
        if span.parent == parent or (not parent and span.parent not in known):
            where = f"{span.resource['mallee.process']} {span.resource['service.instance.id']}"
            yield f"{indent}{span.name} [{where}] {(span.end - span.begin) / 1e6:.2f} ms"
            yield from _lines(spans, span.span, indent + "  ")


@contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver on a free port of loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.path == "/v1/traces":
                receiver.take(body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver = Receiver(f"http://127.0.0.1:{server.server_port}")
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        serving.join(5)
