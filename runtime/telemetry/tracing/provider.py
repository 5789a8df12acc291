"""The way of spans out of a process, by OpenTelemetry's standard environment variables.

Off unless `OTEL_TRACES_EXPORTER` names an exporter, or an OTLP endpoint is set. The packages are those of
the extra `traces`, imported then alone: they cost 0.2 s and some MB.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Final

from mallee.protocol.errors import ConfigError
from mallee.runtime.telemetry.tracing.genai import PROCESS

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Tracer

_SCOPE: Final = "mallee"
_GROUP: Final = "opentelemetry_traces_exporter"
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_DEFAULT_PROTOCOL: Final = "http/protobuf"
_OTLP: Final = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
CLOSE_S: Final = 5.0  # for the last spans


class Tracing:
    """The tracer of one process. `close` sends the last spans and may block for CLOSE_S seconds."""

    def __init__(self, provider: "TracerProvider") -> None:
        self._provider = provider
        self.tracer: Tracer = provider.get_tracer(_SCOPE)

    def close(self) -> None:
        self._provider.force_flush(int(CLOSE_S * 1000))
        self._provider.shutdown()


def exporter_names(environ: Mapping[str, str]) -> list[str]:
    """Exporters that the environment asks for; none: spans are off. Raises ConfigError."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return []
    named = environ.get("OTEL_TRACES_EXPORTER", "").strip()
    if not named:
        named = "otlp" if any(environ.get(name) for name in _ENDPOINTS) else "none"
    names = [name.strip() for name in named.split(",")]
    return [_otlp(environ) if name == "otlp" else name for name in names if name != "none"]


def _otlp(environ: Mapping[str, str]) -> str:
    for name in _PROTOCOLS:
        if protocol := environ.get(name, "").strip():
            if protocol not in _OTLP:
                raise ConfigError(f"{name}={protocol!r}: give {' or '.join(_OTLP)}")
            return _OTLP[protocol]
    return _OTLP[_DEFAULT_PROTOCOL]


def check_exporters(environ: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError if spans are asked for, and the packages for that are not here."""
    for _ in _exporters(environ):
        pass


def _exporters(environ: Mapping[str, str]) -> Iterator[EntryPoint]:
    for name in exporter_names(environ):
        found = next(iter(entry_points(group=_GROUP, name=name)), None)
        if found is None:
            package = name.replace("_", "-") if name.startswith("otlp") else name
            raise ConfigError(
                f"spans are to go to {name!r}, which is not installed: pip install 'mallee[traces]'"
                f" (or opentelemetry-exporter-{package}), or set OTEL_TRACES_EXPORTER=none"
            )
        yield found


def open_tracing(
    process: str, name: str, environ: Mapping[str, str] = os.environ
) -> Tracing | None:
    """The tracer of this process, `name` among those that are a `process`; None if spans are off.

    Raises ConfigError.
    """
    found = list(_exporters(environ))
    if not found:
        return None
    from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    own = Resource.create({SERVICE_INSTANCE_ID: name, PROCESS: process})
    if str(own.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        own = own.merge(Resource({SERVICE_NAME: "mallee"}))
    provider = TracerProvider(resource=own, shutdown_on_exit=False)  # sampled as OTEL_ says
    for point in found:
        provider.add_span_processor(BatchSpanProcessor(_make(point)))
    return Tracing(provider)


def _make(point: EntryPoint) -> "SpanExporter":
    if point.name == "console":
        # A process of mocked engines speaks with its parent over stdout.
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter(out=sys.stderr)
    exporter: SpanExporter = point.load()()
    return exporter
