"""One engine as a service: its thread computes, the event loop talks.

So a long step never holds up leases or heartbeats.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import NamedTuple

from mallee.actors.bus import Bus
from mallee.actors.engine_thread import EngineLike, EngineThread
from mallee.protocol.errors import InternalError, WorkerLost
from mallee.protocol.events import Lease, Load, encode
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import (
    ALL_BRANCHES,
    Command,
    Fork,
    Frame,
    Generate,
    Prefill,
    Update,
    decode_commands,
    encode_frame,
)
from mallee.protocol.model import ModelSpec
from mallee.protocol.subjects import Subjects, check_token
from mallee.worker.records import StepResult

log = logging.getLogger(__name__)

MAX_PENDING_FRAMES = 1024
MAX_STEP_S = 120.0
HEARTBEAT_S = 1.0
GATEWAY_SILENCE_S = 10.0
LOAD_WAIT_S = (
    0.05  # a lease waits so long for the engine's load; during a step it goes with the last
)


class Capacity(NamedTuple):
    """What the lease says of the engine's size."""

    block_size: int
    num_blocks: int
    max_rows: int


class HostStats(NamedTuple):
    """`slow_streams` were cut because their reader fell behind, `silent_gateways` for silence."""

    gateways: int
    open_requests: int
    steps: int
    batches: int
    slow_streams: int
    silent_gateways: int
    is_failed: bool


class _Stream:
    """Frames on their way to one gateway."""

    __slots__ = ("heard", "in_flight", "is_ended", "news", "pending")

    def __init__(self, heard: float) -> None:
        self.pending: deque[bytes] = deque()
        self.news = asyncio.Event()
        self.is_ended = False
        self.in_flight = 0  # batches that wait for the engine: meanwhile the gateway can't speak
        self.heard = heard  # when the gateway was last heard of

    def end(self) -> None:
        self.is_ended = True
        self.news.set()


class WorkerHost:
    """One engine as a service: batches in, frames out, events and leases on the bus.

    All methods belong to one event loop. `clock` gives monotonic seconds. After an exception in the
    engine, or a step of more than `max_step_s` seconds, the host is failed for good: every request ends
    with an error and nothing is taken any more.
    """

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
        self.worker = WorkerId(check_token(worker, "worker"))
        self.incarnation = incarnation
        self.address = address
        self._engine = engine
        self._bus = bus
        self._model = model
        self._capacity = capacity
        self._subjects = Subjects.of(fleet)
        self._clock = clock
        self._lease_period_s = lease_period_s
        self._max_pending = max_pending_frames
        self._heartbeat_s = heartbeat_s
        self._max_step_s = max_step_s
        self._streams: dict[str, _Stream] = {}
        self._open: dict[tuple[str, str], int] = {}  # (gateway, request): branches not ended
        # Drops that the thread has not done: until then, frames for the gateway are of its past.
        self._dropping: Counter[str] = Counter()
        self._published_seq = 0
        self._load: Load | None = None
        self._asked_load: asyncio.Future[Load] | None = None
        self._steps = self._batches = self._slow = self._silent = 0
        self._failure: str | None = None
        self._is_closed = False
        self._tasks: list[asyncio.Task[None]] = []
        self._thread = EngineThread(
            engine,
            name=f"engine of worker {worker}",
            on_result=self._deliver,
            on_dropped=self._dropped,
            on_failure=self._fail,
            clock=clock,
        )

    # Life

    async def start(self) -> None:
        """The engine runs, snapshots are answered, the first lease is out."""
        self._published_seq = self._engine.next_seq
        self._thread.start()
        self._bus.on_state(self._on_bus)
        await self._bus.serve(self._subjects.snapshot(self.worker), self._snapshot)
        self._tasks = [asyncio.create_task(self._lease()), asyncio.create_task(self._watch())]

    async def close(self) -> None:
        """Gateways are told, the thread has ended, streams too. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._failure is None:
            self._publish_lease(is_leaving=True)
        for gateway in list(self._streams):
            self._end_stream(gateway)
        await self._thread.stop()
        self._thread.refuse_all(WorkerLost(self.worker, "it is shutting down"))

    def healthy(self) -> bool:
        """Whether the engine computes: started, not failed, not closed."""
        return self._failure is None and not self._is_closed and self._thread.is_alive

    # What gateways say

    async def submit(self, gateway: str, raw: bytes) -> None:
        """The engine has taken every command of the batch, in order. An empty batch says "I live".

        Raises CodecError (nothing taken), WorkerLost: failed, closed, or `gateway` reads no frames.
        """
        commands = decode_commands(raw)
        self._check_open()
        stream = self._streams.get(gateway)
        if stream is None:
            raise WorkerLost(self.worker, f"gateway {gateway} has no open stream of frames")
        stream.heard = self._clock()
        if not commands:
            return
        stream.in_flight += 1
        try:
            await self._prepare(commands)
            self._check_open()
            if self._streams.get(gateway) is not stream:
                raise WorkerLost(self.worker, f"gateway {gateway} has no open stream of frames")
            for command in commands:
                self._note(gateway, command)
            self._batches += 1
            await self._thread.submit(gateway, commands)
        finally:
            stream.in_flight -= 1
            stream.heard = self._clock()

    async def _prepare(self, commands: Sequence[Command]) -> None:
        """Grammars take up to a tenth of a second to compile: neither the loop nor a step waits for it."""
        for command in commands:
            if isinstance(command, Generate | Fork) and command.grammar is not None:
                await asyncio.to_thread(self._engine.prepare, command)

    async def frames(self, gateway: str) -> AsyncGenerator[bytes, None]:
        """Encoded frames for `gateway`: an empty one at once and each second, one per step with news.

        Ends when another stream of the gateway begins, its reader falls behind, the gateway is silent
        for ten seconds, or the host fails or closes. At its end the gateway's requests are cancelled.
        Raises WorkerLost if the host is failed or closed already.
        """
        self._check_open()
        self._end_stream(gateway)
        stream = self._streams[gateway] = _Stream(self._clock())
        try:
            yield encode_frame(Frame(self._steps, ()))
            while True:
                while stream.pending:
                    yield stream.pending.popleft()
                if stream.is_ended:
                    return
                stream.news.clear()
                try:
                    async with asyncio.timeout(self._heartbeat_s):
                        await stream.news.wait()
                except TimeoutError:
                    yield encode_frame(Frame(self._steps, ()))
        finally:
            if self._streams.get(gateway) is stream:
                self._end_stream(gateway)

    def stats(self) -> HostStats:
        return HostStats(
            len(self._streams),
            len(self._open),
            self._steps,
            self._batches,
            self._slow,
            self._silent,
            self._failure is not None,
        )

    def check(self) -> None:
        """Raises AssertionError if requests are open that nobody reads, or have no branch left."""
        assert {gateway for gateway, _ in self._open} <= self._streams.keys()
        assert all(n > 0 for n in self._open.values())
        assert all(len(s.pending) <= self._max_pending for s in self._streams.values())

    def _check_open(self) -> None:
        if self._failure is not None:
            raise WorkerLost(self.worker, self._failure)
        if self._is_closed:
            raise WorkerLost(self.worker, "it is shutting down")

    def _note(self, gateway: str, command: Command) -> None:
        match command:
            case Generate():
                self._open[gateway, command.request] = command.n
            case Fork():
                self._open[gateway, command.request] = len(command.suffixes)
            case Prefill():
                self._open[gateway, command.request] = 1
            case _:
                pass

    def _end_stream(self, gateway: str) -> None:
        """The gateway reads no more: what it had running is freed."""
        stream = self._streams.pop(gateway, None)
        if stream is None:
            return
        stream.end()
        for key in [key for key in self._open if key[0] == gateway]:
            del self._open[key]
        if self._failure is None:
            self._dropping[gateway] += 1
            self._thread.drop(gateway)

    def _dropped(self, gateway: str) -> None:
        self._dropping[gateway] -= 1
        if not self._dropping[gateway]:
            del self._dropping[gateway]

    async def _watch(self) -> None:
        """Cut streams whose gateway is silent: a carrier may never tell that a reader was killed.

        And give up on an engine that hangs: leases and heartbeats would go on without it.
        """
        while self._failure is None:
            await asyncio.sleep(self._heartbeat_s)
            now = self._clock()
            if self._thread.turn_age(now) > self._max_step_s:
                self._fail(f"a step takes more than {self._max_step_s:g} s")
            for gateway, stream in list(self._streams.items()):
                if not stream.in_flight and now - stream.heard > GATEWAY_SILENCE_S:
                    self._silent += 1
                    log.warning("gateway %s is silent: its requests are cancelled", gateway)
                    self._end_stream(gateway)

    # What the engine says

    def _deliver(self, result: StepResult, next_seq: int) -> None:
        self._steps += 1
        if result.events is not None:
            self._bus.publish(self._subjects.events(self.worker), encode(result.events))
        self._published_seq = next_seq
        for gateway, frame in result.frames.items():
            if gateway in self._streams and gateway not in self._dropping:
                self._send(gateway, frame)

    def _send(self, gateway: str, frame: Frame) -> None:
        stream = self._streams[gateway]
        if len(stream.pending) >= self._max_pending:
            self._slow += 1
            log.warning("gateway %s reads too slowly: its requests are cancelled", gateway)
            stream.pending.clear()
            self._end_stream(gateway)
            return
        stream.pending.append(encode_frame(frame))
        stream.news.set()
        for update in frame.updates:
            if update.finish is not None:
                self._count_end(gateway, update)

    def _count_end(self, gateway: str, update: Update) -> None:
        key = (gateway, update.request)
        left = self._open.get(key, 0) - 1
        if left <= 0 or update.branch == ALL_BRANCHES:
            self._open.pop(key, None)
        else:
            self._open[key] = left

    def _fail(self, reason: str) -> None:
        """The engine can't be trusted any more: end every request with an error, then the streams."""
        if self._failure is not None:
            return
        self._failure = reason
        error = InternalError(f"worker {self.worker} failed ({reason})").to_wire()
        for gateway, stream in list(self._streams.items()):
            updates = tuple(
                Update(request, ALL_BRANCHES, finish="error", error=error)
                for owner, request in self._open
                if owner == gateway
            )
            stream.pending.append(encode_frame(Frame(self._steps, updates)))
            self._end_stream(gateway)
        self._thread.refuse_all(WorkerLost(self.worker, reason))
        self._publish_lease(is_leaving=True)

    # The bus

    async def _lease(self) -> None:
        while self._failure is None:
            self._publish_lease()
            await asyncio.sleep(self._lease_period_s)
            await self._look_at_load()

    async def _look_at_load(self) -> None:
        """The load is fresh, unless the engine computes: then it is the last one known."""
        if self._asked_load is None:
            self._asked_load = self._thread.load()
        await asyncio.wait((self._asked_load,), timeout=min(LOAD_WAIT_S, self._lease_period_s))
        if self._asked_load.done():
            if not self._asked_load.cancelled():
                self._load = self._asked_load.result()
            self._asked_load = None

    def _on_bus(self, is_up: bool) -> None:
        if is_up and self.healthy():
            self._publish_lease()

    def _publish_lease(self, *, is_leaving: bool = False) -> None:
        lease = Lease(
            worker=self.worker,
            incarnation=self.incarnation,
            address=self.address,
            model=self._model.name,
            fingerprint=self._model.fingerprint,
            block_size=self._capacity.block_size,
            num_blocks=self._capacity.num_blocks,
            max_rows=self._capacity.max_rows,
            max_model_len=self._model.max_model_len,
            next_seq=self._published_seq,
            is_leaving=is_leaving,
            load=self._load,
            is_prefix_closed=True,  # the tree evicts from its leaves
        )
        self._bus.publish(self._subjects.lease(self.worker), encode(lease))

    async def _snapshot(self, _: bytes) -> bytes:
        self._check_open()
        return encode(await self._thread.snapshot())
