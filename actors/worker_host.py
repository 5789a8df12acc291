"""One real engine as a service: a host of a single worker, whose engine computes in its own thread."""

from collections.abc import Callable

from mallee.actors.bus import Bus
from mallee.actors.engine_thread import EngineLike, EngineThread
from mallee.actors.host import MAX_STEP_S, Host
from mallee.actors.host_streams import HEARTBEAT_S, MAX_PENDING_FRAMES
from mallee.actors.hosted import Capacity, HostedWorker
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.model import ModelSpec


class WorkerHost(Host):
    """A `Host` that has the worker's own name. If its engine fails, so has the host."""

    def __init__(
        self,
        engine: EngineLike,
        bus: Bus,
        *,
        worker: WorkerId,
        incarnation: Incarnation,
        address: str,
        model: ModelSpec,
        capacity: Capacity,
        fleet: str,
        clock: Callable[[], float],
        lease_period_s: float = 1.0,
        max_pending_frames: int = MAX_PENDING_FRAMES,
        heartbeat_s: float = HEARTBEAT_S,
        max_step_s: float = MAX_STEP_S,
    ) -> None:
        super().__init__(
            worker,
            bus,
            address=address,
            fleet=fleet,
            clock=clock,
            lease_period_s=lease_period_s,
            max_pending_frames=max_pending_frames,
            heartbeat_s=heartbeat_s,
            max_step_s=max_step_s,
        )
        self.worker = worker
        only = HostedWorker(worker, incarnation, self, model=model, capacity=capacity)
        only.runner = EngineThread(
            engine,
            name=f"engine of worker {worker}",
            on_result=only.deliver,
            on_dropped=only.dropped,
            on_failure=only.fail,
            clock=clock,
        )
        self.add(only)
