"""The operator's view of a gateway: its health, workers, decisions and metrics, as JSON-able bodies.

They are those of `GET /v1/router/...` and `GET /health`.
"""

from collections.abc import Callable
from typing import Any, Final

from mallee.gateway.bodies import decisions_body, health_body, targets_body, workers_body
from mallee.gateway.requests.requests import Requests
from mallee.gateway.shell import GatewayContext, Shell
from mallee.gateway.store.store import Store
from mallee.protocol.ids import RequestId, WorkerId
from mallee.runtime.telemetry.families import content_type

metrics_type: Final = content_type
"""The type of `Operator.metrics`, for the header `accept`."""


class Operator:
    """One gateway, as its operator sees it.

    With fewer than `expected_workers` routable, `health` is degraded. `metrics_at`: host and port of its own
    metrics; "" if it has none. `key_fault()`: of the file of keys.
    """

    def __init__(
        self,
        context: GatewayContext,
        shell: Shell,
        requests: Requests,
        store: Store,
        *,
        expected_workers: int,
    ) -> None:
        self._context = context
        self._router = context.router
        self._metrics = context.metrics
        self._shell = shell
        self._requests = requests
        self._store = store
        self.metrics_at = ""
        self.key_fault: Callable[[], str] = str
        self.expect(expected_workers)

    def expect(self, num_workers: int) -> None:
        """With fewer routable workers than this, `health` is degraded."""
        self._expected_workers = num_workers
        self._metrics.workers_expected.set(num_workers)

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended a background task of the gateway, which should be replaced."""
        return self._shell.tasks.failure or self._shell.links.failure

    def health(self) -> dict[str, Any]:
        """`health_body`."""
        return health_body(
            self._router,
            self._context.gateway,
            self._expected_workers,
            is_sound=self.failure is None,
            is_full=self._store.is_full,
            key_fault=self.key_fault(),
        )

    @property
    def is_serving(self) -> bool:
        """Whether requests can be served."""
        return self.health()["status"] in ("ok", "degraded")

    async def workers(self) -> dict[str, Any]:
        """`workers_body`, of workers that are asked now."""
        return workers_body(self._router.all_workers(), await self._shell.links.loads())

    def decisions(self, request: RequestId | None, limit: int, candidates: int) -> dict[str, Any]:
        """`decisions_body`. Raises NotFound."""
        course = None if request is None else self._requests.course(request)
        return decisions_body(self._router, request, limit, candidates, course)

    async def drain_worker(self, worker: WorkerId) -> None:
        """Have a worker take nothing new and leave. Raises NotFound, Unavailable."""
        await self._shell.links.ask_drain(worker)

    async def change_weights(
        self, label: str, *, path: str | None, drain_s: float, wait_s: float
    ) -> dict[str, Any]:
        """Have every worker serve a new version of the weights: `FleetWeights.change`."""
        weights = self._shell.links.weights
        return await weights.change(label, path=path, drain_s=drain_s, wait_s=wait_s)

    def weights(self) -> dict[str, Any]:
        """The versions that workers serve."""
        return self._shell.links.weights.body()

    def metrics_targets(self) -> list[dict[str, Any]]:
        """`targets_body`."""
        own = {self._context.gateway: self.metrics_at}
        gateways = own | self._shell.links.others_metrics
        addresses = {worker.metrics_at for worker in self._router.all_workers()}
        return targets_body(self._context.fleet, gateways.values(), addresses)

    def metrics(self, accept: str = "") -> bytes:
        """Prometheus's exposition for the header `accept`."""
        self._metrics.waiting.set(self._requests.num_waiting)
        self._metrics.in_flight.set(self._requests.num_in_flight)
        return self._metrics.render(accept)
