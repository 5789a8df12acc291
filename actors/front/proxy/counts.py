"""The metrics of a router that forwards requests, beside those of every front."""

from typing import Final, Literal, TypeAlias, get_args

from mallee.actors.front.counts import FrontCounts
from mallee.gateway.access.access import READINGS
from mallee.runtime.telemetry.families import Label

End: TypeAlias = Literal["answered", "refused", "cut", "client_gone"]
ENDS: Final = get_args(End)


class ProxyCounts(FrontCounts):
    """The metrics of one router."""

    def __init__(self) -> None:
        super().__init__("router", "Routers before vLLM")
        ended = self.area.counter(
            "mallee_router_requests_total",
            "Requests by their end: a whole answer, an error of the router's, an answer that broke, or"
            " a client that left.",
            Label("end", ENDS),
        )
        self._ended = {end: ended.labels(end) for end in ENDS}
        self._retries = self.area.counter(
            "mallee_router_retries_total", "Requests sent to another backend before any answer."
        )
        continued = self.area.counter(
            "mallee_router_continued_total",
            "Streams whose backend was lost and whose rest was asked of another one: as an undisturbed"
            " answer's, or by other draws.",
            Label("how", ("exact", "resampled")),
        )
        self._continued = {how: continued.labels(how) for how in ("exact", "resampled")}
        self._denied = self.area.counter(
            "mallee_router_denied_total",
            "Requests refused before a backend was chosen, by status.",
            Label("status", most=16),
        )

    def show_access(self, access: object) -> None:
        """Show the state of API keys. Once."""
        self.registry.area("Keys and certificates").readings(lambda: access, READINGS)

    def ended(self, end: End) -> None:
        self._ended[end].inc()

    def retried(self) -> None:
        self._retries.inc()

    def continued(self, *, is_resampled: bool) -> None:
        self._continued["resampled" if is_resampled else "exact"].inc()

    def denied(self, status: int) -> None:
        self._denied.labels(str(status)).inc()
