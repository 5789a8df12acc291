"""The metrics of a picker, declared and counted, and the address at which they are served."""

from collections.abc import Callable

from prometheus_client import start_http_server

from mallee.protocol.errors import ConfigError
from mallee.runtime.telemetry.families import BETWEEN_S, Families, Label


class PickerCounts:
    """The metrics of one picker. Gauges are set from its event loop, and read by a thread."""

    def __init__(self) -> None:
        self.registry = Families()
        area = self.registry.area("Pickers")
        self._decisions = area.counter(
            "mallee_picker_decisions_total",
            "Requests by outcome: picked, or the status that refused them.",
            Label("outcome", ("picked", "429", "503")),
        )
        self._seconds = area.histogram(
            "mallee_picker_decision_seconds",
            "From a whole request to its endpoint, tokenizing included.",
            BETWEEN_S,
        )
        self._prompt_blocks = area.counter(
            "mallee_picker_prompt_blocks_total", "KV blocks of prompts that were placed."
        )
        self._overlap_blocks = area.counter(
            "mallee_picker_overlap_blocks_total",
            "Those of them that were known on the endpoint, or expected there.",
        )
        self._elsewhere = area.counter(
            "mallee_picker_served_elsewhere_total",
            "Requests that another endpoint served than the first one given.",
        )
        self._failed = area.counter(
            "mallee_picker_failed_streams_total",
            "Streams ended by a fault, and left to the proxy's failure mode.",
        )
        self.endpoints = area.gauge("mallee_picker_endpoints", "Endpoints that are followed.")
        self.ready = area.gauge("mallee_picker_ready_endpoints", "Endpoints that take requests.")
        self.incomplete = area.gauge(
            "mallee_picker_incomplete_endpoints",
            "Endpoints whose KV events are not known from the beginning: caches there are predicted.",
        )
        self.event_gaps = area.gauge(
            "mallee_picker_event_gaps", "Times that KV events of these endpoints were missing."
        )
        self.unknown_blocks = area.gauge(
            "mallee_picker_unknown_blocks",
            "Blocks in KV events of these endpoints whose beginning was not known.",
        )
        self.remote_requests = area.gauge(
            "mallee_picker_remote_requests", "Requests that other pickers booked."
        )

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

    def serve(self, listen: str) -> Callable[[], None]:
        """Serve `/metrics` from a thread of its own; the result ends it. Raises ConfigError."""
        host, _, port = listen.rpartition(":")
        try:
            server, thread = start_http_server(int(port), host.strip("[]"), registry=self.registry)
        except OSError as error:
            raise ConfigError(f"metrics_listen={listen!r}: {error.strerror or error}") from error

        def end() -> None:
            server.shutdown()
            server.server_close()
            thread.join(timeout=2.0)

        return end
