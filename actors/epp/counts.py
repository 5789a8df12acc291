"""Counts of a picker as Prometheus metrics, and the address at which they are served."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from mallee.protocol.errors import ConfigError
from mallee.runtime.telemetry.families import Families, Labelled, ProcessCollector, Shown, shown


class PickerCounts:
    """The metrics of one picker. `read` gives further values by name; a thread calls it."""

    def __init__(self, read: Callable[[], Mapping[str, float]]) -> None:
        own = CollectorRegistry()
        families = Families(own)
        self._decisions = families.counter("mallee_picker_decisions_total")
        self._seconds = families.histogram("mallee_picker_decision_seconds")
        self._prompt_blocks = families.counter("mallee_picker_prompt_blocks_total")
        self._overlap_blocks = families.counter("mallee_picker_overlap_blocks_total")
        self._elsewhere = families.counter("mallee_picker_served_elsewhere_total")
        self._failed = families.counter("mallee_picker_failed_streams_total")
        own.register(ProcessCollector())
        own.register(_Read(read))
        self._registry = CollectorRegistry()
        self._registry.register(Labelled(own, {}))

    def decided(self, outcome: str, took_s: float) -> None:
        self._decisions.labels(outcome).inc()
        self._seconds.observe(took_s)

    def picked(self, num_blocks: int, overlap_blocks: int) -> None:
        self._prompt_blocks.inc(num_blocks)
        self._overlap_blocks.inc(min(num_blocks, overlap_blocks))

    def served_elsewhere(self) -> None:
        self._elsewhere.inc()

    def failed(self) -> None:
        self._failed.inc()

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def serve(self, listen: str) -> Callable[[], None]:
        """Serve `/metrics` from a thread of its own; the result ends it. Raises ConfigError."""
        host, _, port = listen.rpartition(":")
        try:
            server, thread = start_http_server(int(port), host.strip("[]"), registry=self._registry)
        except OSError as error:
            raise ConfigError(f"metrics_listen={listen!r}: {error.strerror or error}") from error

        def end() -> None:
            server.shutdown()
            server.server_close()
            thread.join(timeout=2.0)

        return end


class _Read(Collector):
    """Families whose values others count."""

    def __init__(self, read: Callable[[], Mapping[str, float]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Shown]:
        for name, value in self._read().items():
            yield shown(name, value)
