"""The workers of a process as a service: batches in, one stream of reports out to each gateway, leases.

The engines compute in threads of their own, or take no time at all (mocked ones): leases and heartbeats
never wait for a step.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from mallee.actors.hosting.compiler import MAX_WAIT_S, Compiler, Done
from mallee.actors.hosting.streams import HEARTBEAT_S, MAX_WAITING_NBYTES, Stream, Streams
from mallee.actors.hosting.weights import WeightChanges, WeightSource
from mallee.actors.hosting.worker import NO_DEMAND, STOP_S, Demand, Worker
from mallee.protocol.codec import encode
from mallee.protocol.errors import CodecError, ConfigError, NotFound, WorkerLost
from mallee.protocol.events import (
    Admin,
    AskDrain,
    AskLoads,
    AskSnapshot,
    AskWeights,
    EventBatch,
    LendingUse,
    Load,
    MemoryUse,
    decode_host_ask,
    encode_leases,
)
from mallee.protocol.ids import WorkerId
from mallee.protocol.messages import Frame
from mallee.protocol.parcels import CHANGED, LEAVING, Parcel, Report, decode_parcels
from mallee.protocol.subjects import Subjects, check_token
from mallee.runtime.bus.bus import Bus
from mallee.runtime.tasks import Tasks
from mallee.runtime.transport.server import Sink
from mallee.worker.transfer.values import Ask, Loan

if TYPE_CHECKING:
    from mallee.runtime.telemetry.tracing.provider import Tracing
    from mallee.runtime.telemetry.tracing.workers import WorkerSpans

log = logging.getLogger(__name__)

MAX_STEP_S = 120.0
DRAIN_S = 30.0
# A lease, or a reader, waits so long for the engine's load; during a step it goes with the last.
LOAD_WAIT_S = 0.05
LEASES_PER_MESSAGE = 16  # taken in by a gateway in one turn of its loop


class HostStats(NamedTuple):
    """`slow_streams` were cut because their reader fell behind, `silent_gateways` for silence."""

    workers: int
    gateways: int
    open_requests: int
    steps: int
    batches: int
    slow_streams: int
    silent_gateways: int
    is_failed: bool  # every engine has
    compiling: int  # grammars, those that wait for their turn included


class Host:
    """The workers of one process; a `Lender` of their KV. All methods but `lend` belong to one event loop.

    `clock` gives monotonic seconds. After an exception in an engine, or a step of more than
    `max_step_s` seconds, its worker is failed for good: it is lost to its gateways and takes
    nothing any more; the others go on. Gateways ask it by its `name` (`protocol.events.HostAsk`).
    """

    def __init__(
        self,
        name: str,
        bus: Bus,
        *,
        address: str = "",
        fleet: str,
        clock: Callable[[], float],
        lease_period_s: float = 1.0,
        max_waiting_nbytes: int = MAX_WAITING_NBYTES,
        heartbeat_s: float = HEARTBEAT_S,
        max_step_s: float = MAX_STEP_S,
        drain_s: float = DRAIN_S,
        max_grammar_wait_s: float = MAX_WAIT_S,
        tracing: "Tracing | None" = None,
        device: str = "",
        measure_memory: Callable[[Load | None], MemoryUse | None] = lambda load: None,
    ) -> None:
        """Without `tracing` there are no spans. `device`: what the workers compute on, for people.

        `address` and `serves_kv` go into leases; they may change later. `measure_memory` gives the memory
        of the process by the last load of its one worker.

        Raises ConfigError if `name` or `fleet` can't be part of a subject.
        """
        self.name = check_token(name, "host")
        self.address = address
        self.serves_kv = False
        self.metrics_at = ""
        self.device = device
        self.kv_use: Callable[[], LendingUse] | None = None  # for metrics
        self._measure_memory = measure_memory
        self.administer: Callable[[Admin], Awaitable[bytes]] = _not_mocked
        self.on_add: Callable[[Worker], None] = lambda worker: None
        self.workers: dict[WorkerId, Worker] = {}
        self.tracing = tracing
        self._bus = bus
        self._subjects = Subjects.of(fleet)
        self.clock = clock
        self._lease_period_s = lease_period_s
        self._heartbeat_s = heartbeat_s
        self._max_step_s = max_step_s
        self._drain_s = drain_s
        self._streams = Streams(
            on_batch=self._submit,
            on_end=self._drop,
            clock=clock,
            max_waiting_nbytes=max_waiting_nbytes,
        )
        self._batches = self._past_steps = 0
        self._is_started = self._is_closed = False
        self.tasks = Tasks(f"host {name}")
        self._compiler = Compiler(name, self.tasks, max_wait_s=max_grammar_wait_s)
        self._sources: dict[WorkerId, WeightSource] = {}
        self._changes = WeightChanges(self.tasks, self)

    # Life

    async def start(self, metrics_at: str = "") -> None:
        """Start the engines, answer gateways, publish the first leases, which say where metrics are read."""
        self.metrics_at = metrics_at
        self._is_started = True
        for worker in self.workers.values():
            worker.start()
        self._bus.on_state(self._on_bus)
        await self._bus.serve(self._subjects.host(self.name), self._answer)
        self.tasks.spawn(self._lease())
        self.tasks.spawn(self._watch())

    async def close(self) -> None:
        """End leases, engines and streams. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        await self.tasks.close()
        self._compiler.close()
        workers = list(self.workers.values())
        self._publish_leases([w for w in workers if w.failure is None], is_leaving=True)
        for gateway in self.gateways:
            for worker in workers:
                self.send(gateway, worker.lost(LEAVING))
            self._streams.end(gateway)
        reason = "it is shutting down"
        await asyncio.gather(*(w.runner.stop(WorkerLost(w.worker, reason)) for w in workers))

    def healthy(self) -> bool:
        """Whether an engine computes (started, not failed, not closed) and its leases go out."""
        if self._is_closed or self.tasks.failure is not None or self._bus.failure is not None:
            return False
        if self._changes.num_replacing:
            return True
        return any(w.is_serving for w in self.workers.values())

    # Workers

    def spans_of(self, worker: str) -> "WorkerSpans | None":
        """For the spans of a worker of this host, if there are any."""
        if self.tracing is None:
            return None
        from mallee.runtime.telemetry.tracing.workers import WorkerSpans  # OpenTelemetry

        return WorkerSpans(self.tracing, worker)

    def add(self, worker: Worker, source: WeightSource | None = None) -> None:
        """One more worker; after `start` it runs at once, and its first lease is out.

        Without a `source` its weights can't be changed.
        """
        assert worker.worker not in self.workers, f"{worker.worker} is here already"
        self.workers[worker.worker] = worker
        self.on_add(worker)
        if source is not None:
            self._sources[worker.worker] = source
        if self._is_started:
            worker.start()
            self.publish_lease(worker)

    async def drain(self, name: WorkerId, drain_s: float) -> None:
        """Have gateways send the worker nothing new, and remove it when they need it no more.

        What runs there after `drain_s` seconds goes on elsewhere.
        """
        worker = self.workers[name]
        if not worker.is_draining:
            worker.is_draining = True
            self.publish_lease(worker)
        with suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await worker.wait_released()
        if self.workers.get(name) is worker:
            await self.remove(name)

    async def end_life(self, worker: Worker, within_s: float) -> bool | None:
        """End a life, for the next one of its worker; None if that is over or leaves, False: not in time."""
        if self.workers.get(worker.worker) is not worker or worker.failure or worker.is_draining:
            return None
        del self.workers[worker.worker]
        self._publish_leases([worker], is_leaving=True)
        return await self._end(worker, CHANGED, within_s)

    async def drain_all(self, drain_s: float) -> None:
        """Drain every worker."""
        await asyncio.gather(*(self.drain(name, drain_s) for name in list(self.workers)))

    async def remove(self, name: WorkerId) -> None:
        """Remove the worker, after a last lease with `is_leaving`; what runs there goes on elsewhere."""
        worker = self.workers.pop(name)
        self._publish_leases([worker], is_leaving=True)
        await self._end(worker, LEAVING)

    async def crash(self, name: WorkerId, reason: str) -> None:
        """Remove the worker as if its process had died alone: without a last lease."""
        await self._end(self.workers.pop(name), reason)

    async def _end(self, worker: Worker, reason: str, within_s: float = STOP_S) -> bool:
        """End a life and report it lost; False: its runner has not ended within `within_s`."""
        self._past_steps += worker.num_steps
        worker.abandon()
        is_over = await worker.runner.stop(WorkerLost(worker.worker, reason), within_s=within_s)
        for gateway in self.gateways:
            self.send(gateway, worker.lost(reason))
        return is_over

    def lend(self, ask: Ask) -> Loan:
        """Blocks of one of its workers, by its name and life. From any thread but the loop's and engines'."""
        holder = ask.holder
        worker = self.workers.get(WorkerId(holder.worker))
        if worker is None or worker.incarnation != holder.incarnation:
            raise WorkerLost(holder.worker, "that life of it is over")
        if worker.failure is not None:
            raise WorkerLost(holder.worker, worker.failure)
        if worker.runner.lend is None:
            raise WorkerLost(holder.worker, "its engine lends no KV")
        return worker.runner.lend(ask)

    # Requests of gateways

    def open(self, gateway: str, sink: Sink) -> Stream:
        """Begin a stream to `gateway`, instead of its last. Raises WorkerLost: closed, or all failed.

        It ends when another stream of the gateway begins, its connection is lost, the gateway reads too
        slowly or is silent for ten seconds, every engine has failed, or the host closes. At its end the
        gateway's requests are cancelled.
        """
        self._check_open()
        return self._streams.open(gateway, sink)

    def _submit(self, stream: Stream, raw: bytes) -> asyncio.Future[None] | None:
        """Pass on a batch, after those before it; done when the engines have taken it (None: they will).

        Commands for a life that is not here are answered by a report that it is lost.
        Raises CodecError (nothing taken), WorkerLost: closed, all failed, or the stream has ended.
        """
        parcels = decode_parcels(raw)
        self._check_open()
        if stream.is_ended:
            raise WorkerLost(self.name, f"the stream of gateway {stream.gateway} has ended")
        stream.last_seen = self.clock()
        if not parcels:
            return None
        return self._hand_all_over(stream.gateway, parcels)

    def _hand_all_over(
        self, gateway: str, parcels: Sequence[Parcel]
    ) -> asyncio.Future[None] | None:
        self._batches += 1
        taken = [self._hand_over(gateway, parcel) for parcel in parcels]
        waiting = [future for future in taken if future is not None]
        if len(waiting) > 1:
            # One failed worker of several reports that itself.
            return self.tasks.spawn(_all(waiting), name="the receipt of a batch")
        return waiting[0] if waiting else None

    def _hand_over(self, gateway: str, parcel: Parcel) -> asyncio.Future[None] | None:
        worker = self._worker_of(parcel)
        if worker is None:
            if parcel.commands and not parcel.is_end:
                reason = "that life of it is over"
                here = self.workers.get(WorkerId(parcel.worker))
                if here is not None and here.incarnation == parcel.incarnation and here.failure:
                    reason = here.failure
                lost = Report(parcel.worker, parcel.incarnation, Frame(0, ()), reason)
                self.send(gateway, lost)
            return None
        taken = worker.submit(gateway, parcel.commands) if parcel.commands else None
        if parcel.is_end:
            worker.drop(gateway)
        return taken

    def _worker_of(self, parcel: Parcel) -> Worker | None:
        worker = self.workers.get(WorkerId(parcel.worker))
        if worker is None or worker.incarnation != parcel.incarnation or worker.failure:
            return None
        return worker

    def _check_open(self) -> None:
        if self._is_closed:
            raise WorkerLost(self.name, "it is shutting down")
        if (reason := self._failure()) is not None:
            raise WorkerLost(self.name, reason)

    def _failure(self) -> str | None:
        """The reason why nothing is served here any more: every engine has failed."""
        reason = None
        for worker in self.workers.values():
            if (reason := worker.failure) is None:
                return None
        return reason

    def _drop(self, gateway: str) -> None:
        """Free everything that the gateway has running: it reads no more."""
        for worker in self.workers.values():
            worker.drop(gateway)

    async def _watch(self) -> None:
        """Give up gateways that are silent, and engines that hang: their leases would go on. Heartbeats."""
        while True:
            await asyncio.sleep(self._heartbeat_s)
            now = self.clock()
            for worker in list(self.workers.values()):
                if worker.runner.turn_age(now) > self._max_step_s:
                    worker.fail(f"a step takes more than {self._max_step_s:g} s")
            self._streams.end_silent()
            for gateway in self.gateways:
                self._streams.beat(gateway, self._progress(gateway))

    def _progress(self, gateway: str) -> list[Report]:
        """Empty frames of the workers that have something of the gateway's to do."""
        return [
            report
            for worker in self.workers.values()
            if (report := worker.progress_for(gateway)) is not None
        ]

    # Output of workers

    @property
    def gateways(self) -> Sequence[str]:
        return self._streams.gateways

    def publish(self, events: EventBatch) -> None:
        self._bus.publish(self._subjects.events(events.worker), encode(events))

    def send(self, gateway: str, report: Report) -> bool:
        return self._streams.send(gateway, report)

    def compile(
        self, tenant: str, prepare: Callable[[], None], done: Done, *, is_new: bool
    ) -> None:
        self._compiler.submit(tenant, prepare, done, is_new=is_new)

    def failed(self, worker: Worker) -> None:
        self._publish_leases([worker], is_leaving=True)
        if self._failure() is not None:
            for gateway in self.gateways:
                self._streams.end(gateway)

    # The bus

    async def _lease(self) -> None:
        while True:
            self._publish_leases(self._renewing())
            await asyncio.sleep(self._lease_period_s)
            asked = [f for w in self._renewing() if (f := w.ask_load()) is not None]
            if asked:
                await asyncio.wait(asked, timeout=min(LOAD_WAIT_S, self._lease_period_s))

    def _renewing(self) -> list[Worker]:
        return [w for w in self.workers.values() if w.failure is None]

    def _on_bus(self, is_up: bool) -> None:
        if is_up and self.healthy():
            self._publish_leases(self._renewing())

    def _publish_leases(self, workers: Sequence[Worker], *, is_leaving: bool = False) -> None:
        subject = self._subjects.lease(self.name)
        for i in range(0, len(workers), LEASES_PER_MESSAGE):
            leases = [
                w.lease(
                    self.address,
                    self.name,
                    is_leaving=is_leaving,
                    serves_kv=self.serves_kv,
                    metrics_at=self.metrics_at,
                    device=self.device,
                )
                for w in workers[i : i + LEASES_PER_MESSAGE]
            ]
            self._bus.publish(subject, encode_leases(leases))

    def publish_lease(self, worker: Worker) -> None:
        """Publish a lease of one worker now."""
        self._publish_leases([worker])

    async def _answer(self, raw: bytes) -> bytes:
        """The answer to a `HostAsk`. Raises WorkerLost: it is left without one."""
        try:
            asked = decode_host_ask(raw)
            match asked:
                case AskSnapshot():
                    return await self._snapshot(asked.worker)
                case AskLoads():
                    return await self._loads()
                case AskDrain() | AskWeights():
                    return asked.worker.encode() if self._begins(asked) else b""
                case _:
                    return await self.administer(asked)
        except (CodecError, ConfigError, NotFound) as error:
            return json.dumps({"error": str(error)}).encode()

    def _begins(self, asked: AskDrain | AskWeights) -> bool:
        """Begin a drain, or a change of weights, which leases tell of; False: the worker is not here."""
        worker = self.workers.get(asked.worker)
        if worker is None:
            return False
        if isinstance(asked, AskWeights):
            if worker.failure is None:
                self._changes.ask(worker, asked, self._sources.get(worker.worker))
            return worker.failure is None
        if not worker.is_draining:
            self.tasks.spawn(self.drain(worker.worker, self._drain_s))
        return True

    async def _snapshot(self, name: WorkerId) -> bytes:
        self._check_open()
        worker = self.workers.get(name)
        if worker is None or worker.failure is not None:
            raise WorkerLost(name, "it is not here any more")
        return encode(await worker.runner.snapshot())

    async def _loads(self) -> bytes:
        """The loads of all workers with their engines' use, which leases lack: few ask for it."""
        await self.renew_loads()
        workers = self.workers.values()
        return encode({w.worker: load for w in workers if (load := w.load) is not None})

    async def renew_loads(self) -> None:
        """Ask engines for their loads, and wait a moment for those that compute."""
        asked = [worker.renew_load() for worker in self._renewing()]
        if asked:
            await asyncio.wait(asked, timeout=LOAD_WAIT_S)

    # Reading

    def stats(self) -> HostStats:
        workers = self.workers.values()
        return HostStats(
            workers=len(workers),
            gateways=len(self.gateways),
            open_requests=sum(worker.num_open for worker in workers),
            steps=self._past_steps + sum(worker.num_steps for worker in workers),
            batches=self._batches,
            slow_streams=self._streams.num_slow,
            silent_gateways=self._streams.num_silent,
            is_failed=self._failure() is not None,
            compiling=self._compiler.num_open,
        )

    def memory(self) -> MemoryUse | None:
        """The memory of the process; None if it is not measured."""
        worker = self.workers.get(WorkerId(self.name))
        return self._measure_memory(None if worker is None else worker.load)

    def demand(self) -> Demand:
        """The sum over the workers that serve."""
        serving = [worker.demand for worker in self._renewing()]
        return Demand(*map(sum, zip(*serving, strict=True))) if serving else NO_DEMAND

    def check(self) -> None:
        """Raises AssertionError if open requests have no reader, or too much waits for a reader."""
        for worker in self.workers.values():
            worker.check()
        self._streams.check()


async def _all(taken: Sequence[asyncio.Future[None]]) -> None:
    """Wait for all, however they end."""
    await asyncio.gather(*taken, return_exceptions=True)


async def _not_mocked(asked: Admin) -> bytes:
    raise ConfigError("workers join and crash by command where they are mocked alone")
