"""The metrics that every router in front of others' engines has, and the address at which they are served."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import Metric, start_http_server

from mallee.actors.front.pods.pods import STATES, Pods
from mallee.protocol.errors import ConfigError
from mallee.runtime.telemetry.families import (
    BETWEEN_S,
    MOST_WORKERS,
    OTHERS,
    Families,
    Family,
    Label,
)

if TYPE_CHECKING:
    from mallee.router.router import Router


class FrontCounts:
    """The metrics of one process of this `kind`. Gauges are set from its event loop, and read by a thread."""

    def __init__(self, kind: str, title: str) -> None:
        self.registry = Families()
        area = self.area = self.registry.area(title)
        own = f"mallee_{kind}"
        self._decisions = area.counter(
            f"{own}_decisions_total",
            "Requests by outcome: picked, or the status that refused them.",
            Label("outcome", ("picked", "429", "503")),
        )
        self._seconds = area.histogram(
            f"{own}_decision_seconds",
            "From a whole request to its endpoint, tokenizing included.",
            BETWEEN_S,
        )
        self._prompt_blocks = area.counter(
            f"{own}_prompt_blocks_total", "KV blocks of prompts that were placed."
        )
        self._overlap_blocks = area.counter(
            f"{own}_overlap_blocks_total",
            "Those of them that were known on the endpoint, or expected there.",
        )
        self._endpoints = area.gauge(f"{own}_endpoints", "Endpoints that are followed.")
        self._ready = area.gauge(f"{own}_ready_endpoints", "Endpoints that take requests.")
        self._knowledge = Family(
            f"{own}_cache_knowledge",
            "Endpoints by what is known of their caches: by their events, predicted, or nothing.",
            (Label("endpoint", most=MOST_WORKERS + 1), Label("state", STATES)),
        )
        self._states: Mapping[tuple[str, str], int] = {}
        area.collect_by(self._known, [self._knowledge])
        self._incomplete = area.gauge(
            f"{own}_incomplete_endpoints",
            "Endpoints whose KV events are not known from the beginning: caches there are predicted.",
        )
        self._gaps = area.gauge(
            f"{own}_event_gaps", "Times that KV events of these endpoints were missing."
        )
        self._unknown_blocks = area.gauge(
            f"{own}_unknown_blocks",
            "Blocks in KV events of these endpoints whose beginning was not known.",
        )
        self._remote_requests = area.gauge(
            f"{own}_remote_requests", "Requests that others of its kind booked."
        )

    def decided(self, outcome: str, took_s: float) -> None:
        self._decisions.labels(outcome).inc()
        self._seconds.observe(took_s)

    def picked(self, num_blocks: int, overlap_blocks: int) -> None:
        self._prompt_blocks.inc(num_blocks)
        self._overlap_blocks.inc(min(num_blocks, overlap_blocks))

    def show(self, pods: Pods, router: "Router") -> None:
        """Set the gauges to what is so now."""
        self._endpoints.set(len(pods))
        self._ready.set(len(router.workers()))
        self._incomplete.set(pods.num_incomplete)
        self._gaps.set(pods.num_gaps)
        self._unknown_blocks.set(pods.num_unknown_blocks)
        self._remote_requests.set(router.stats().remote_requests)
        self._states = Counter(
            (view.address if number < MOST_WORKERS else OTHERS, view.knowledge.state)
            for number, view in enumerate(pods.views())
        )

    def _known(self) -> Iterator[Metric]:
        shown = self._knowledge.shown()
        for labels, num in self._states.items():
            shown.add_metric(labels, num)
        yield shown

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
