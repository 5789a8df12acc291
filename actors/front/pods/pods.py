"""The pods as workers of our router: leases from their metrics, blocks from their KV events.

One task for each endpoint asks for its metrics, another reads its events. A pod is in routing while its
metrics arrive; one that is silent for a lease gets nothing, and is back with its next answer. Blocks of a pod
whose events are not known from the beginning are predicted beside what is known.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias, get_args

from mallee.actors.front.http.backends import Backends
from mallee.actors.front.pods.endpoints import Endpoint
from mallee.actors.front.pods.event_order import Arrival
from mallee.actors.front.pods.kv_events import PodContents
from mallee.actors.front.pods.metrics import (
    MAX_NBYTES,
    NO_MODELS,
    NO_REPORT,
    PodModels,
    PodReport,
    read_metrics,
    read_models,
)
from mallee.actors.front.pods.subscriber import EventPlaces, Subscriber, told_places
from mallee.protocol.events import Event, EventBatch, Lease, Load
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.router.router import Router
from mallee.runtime.tasks import Tasks

if TYPE_CHECKING:
    import zmq.asyncio

log = logging.getLogger(__name__)

SCRAPE_TIMEOUT_S: Final = 2.0
SWEEP_S: Final = 0.25
MODELS_EVERY: Final = 10  # looks; adapters come and go in a running pod
NOT_ASKED: Final = "it was not asked yet"
SLACK_BLOCKS: Final = (
    65_536  # that an engine may tell of beyond its device: other tiers, other groups
)


class PodLimits(NamedTuple):
    """Figures of a pod that its metrics do not tell; and the ports of its KV events, where it has no
    `/kv_event_sources` (vLLM before 0.32).
    """

    block_size: int
    num_blocks: int  # where its metrics have none
    max_rows: int
    scrape_s: float
    events_port: int | None
    replay_port: int | None
    topic: str


State: TypeAlias = Literal["exact", "predicted", "blind"]
STATES: Final = get_args(State)


class Knowledge(NamedTuple):
    """The knowledge of a pod's cache, and the reason where it is not by its own events."""

    state: State
    reason: str = ""


class Served(NamedTuple):
    """The models that the pods serve. Never changed, so that it may be read in any thread."""

    adapters: frozenset[str] = frozenset()
    """Names whose blocks are a LoRA adapter's."""
    workers: Mapping[str, tuple[WorkerId, ...]] = MappingProxyType({})
    """The pods that serve a model, by its name."""
    num_pods: int = 0

    def of(self, model: str) -> tuple[WorkerId, ...] | None:
        """The pods that alone serve it; None: all do, or none is known to."""
        found = self.workers.get(model)
        return None if found is None or len(found) == self.num_pods else found


class PodView(NamedTuple):
    """A pod as people see it."""

    address: str
    models: tuple[str, ...]
    max_model_len: int
    block_size: int | None
    num_blocks: int | None
    running: int
    waiting: int
    num_blocks_known: int  # of its cache, by its events
    num_gaps: int  # times that events of its were missing
    queried_tokens: int  # of prompts, by its own count
    cached_tokens: int  # of those, found in its cache
    left_out: Mapping[str, int]  # blocks in its events, by the reason why they were not taken in
    knowledge: Knowledge


@dataclass(slots=True)
class _Pod:
    """One endpoint that is followed."""

    endpoint: Endpoint
    contents: PodContents
    report: PodReport | None = None
    models: PodModels = NO_MODELS
    looks: int = 0
    life: int = 1  # as its metrics told it last; a younger one has a larger number
    failure: str = NOT_ASKED
    knowledge: Knowledge | None = None  # as it was logged
    places: dict[int, EventPlaces] = field(default_factory=dict)  # of its events, by rank
    no_events: str = "its metrics come first"  # why there are no places
    num_left_out: int = 0  # reasons that were logged
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    readers: list[asyncio.Task[None]] = field(default_factory=list)  # of its events

    @property
    def worker(self) -> WorkerId:
        return WorkerId(self.endpoint.address)


class Pods:
    """The endpoints that are followed. Belongs to one event loop.

    `on_join(worker, incarnation)` is called for each new life.
    """

    def __init__(
        self,
        router: Router,
        backends: Backends,
        context: "zmq.asyncio.Context | None",
        limits: PodLimits,
        *,
        max_pods: int,
        on_join: Callable[[WorkerId, Incarnation], object],
    ) -> None:
        """`context`: of ZeroMQ, to read events."""
        self._router = router
        self._backends = backends
        self._context = context
        self._limits = limits
        self._max_pods = max_pods
        self._on_join = on_join
        self._pods: dict[str, _Pod] = {}
        self.served = Served()
        self._awaited: set[str] | None = None  # those of the first list that were not asked yet
        self.tasks = Tasks("the pods of a picker")

    def start_up(self) -> None:
        """Take leases that run out from now on."""
        self.tasks.spawn(self._sweep())

    async def close(self) -> None:
        """Follow nothing any more."""
        await self.tasks.close()

    @property
    def is_synced(self) -> bool:
        """Whether each endpoint of the first list was asked once, or is gone."""
        return self._awaited is not None and not self._awaited

    def views(self) -> list[PodView]:
        """All pods, in the order in which they came."""
        return [self._view(pod) for pod in self._pods.values()]

    def _view(self, pod: _Pod) -> PodView:
        report = pod.report or NO_REPORT
        return PodView(
            address=pod.endpoint.address,
            models=pod.models.names,
            max_model_len=pod.models.max_model_len,
            block_size=report.block_size,
            num_blocks=report.num_blocks,
            running=report.running,
            waiting=report.waiting,
            num_blocks_known=len(pod.contents.names),
            num_gaps=pod.contents.num_gaps,
            queried_tokens=report.queried_tokens,
            cached_tokens=report.cached_tokens,
            left_out=dict(pod.contents.names.left_out),
            knowledge=self.knowledge(pod),
        )

    def knowledge(self, pod: _Pod) -> Knowledge:
        """The knowledge of the pod's cache now."""
        report, size = pod.report, self._limits.block_size
        if report is None or pod.failure:
            return Knowledge("blind", pod.failure)
        if report.block_size not in (None, size):
            return Knowledge(
                "predicted", f"its block size is {report.block_size}, the router's {size}"
            )
        if pod.contents.is_whole:
            return Knowledge("exact")
        if not report.is_vllm:
            return Knowledge("predicted", "its /metrics are not vLLM's")
        if self._context is None:
            return Knowledge("predicted", "without a tokenizer (model) KV events can't be used")
        return Knowledge("predicted", pod.no_events or pod.contents.why_incomplete)

    @property
    def num_gaps(self) -> int:
        """Times that events were found missing, over the pods there are."""
        return sum(pod.contents.num_gaps for pod in self._pods.values())

    @property
    def num_incomplete(self) -> int:
        """Endpoints whose events are not known from the beginning."""
        return sum(not pod.contents.is_whole for pod in self._pods.values())

    @property
    def num_unknown_blocks(self) -> int:
        """Blocks in events whose beginning is not known, over the pods there are."""
        return sum(pod.contents.names.num_unknown for pod in self._pods.values())

    def __len__(self) -> int:
        return len(self._pods)

    def update(self, endpoints: Sequence[Endpoint]) -> None:
        """These are all the endpoints that there are."""
        wanted = {endpoint.address: endpoint for endpoint in endpoints}
        for address in [a for a, pod in self._pods.items() if _is_other(pod, wanted.get(a))]:
            self._forget(address)
        for address, endpoint in wanted.items():
            pod = self._pods.get(address)
            if pod is None:
                self._follow(endpoint)
            elif pod.endpoint != endpoint:
                pod.endpoint = endpoint
                self._renew(pod)
        if self._awaited is None:
            self._awaited = set(self._pods)
        self._serve()

    def _serve(self) -> None:
        """Note the models that the pods serve now."""
        by_name: dict[str, list[WorkerId]] = {}
        adapters: set[str] = set()
        for pod in self._pods.values():
            adapters |= pod.contents.names.adapters | set(pod.models.adapters)
            for name in {*pod.models.names, *pod.models.adapters}:
                by_name.setdefault(name, []).append(pod.worker)
        workers = {name: tuple(found) for name, found in by_name.items()}
        self.served = Served(frozenset(adapters), MappingProxyType(workers), len(self._pods))

    def _follow(self, endpoint: Endpoint) -> None:
        if len(self._pods) >= self._max_pods:
            log.error(
                "endpoint %s is one more than routing.max_workers=%d: it gets no requests",
                endpoint.address,
                self._max_pods,
            )
            return
        limits = self._limits
        contents = PodContents(limits.block_size, max_blocks=limits.num_blocks + SLACK_BLOCKS)
        pod = self._pods[endpoint.address] = _Pod(endpoint, contents)
        pod.tasks.append(self.tasks.spawn(self._scrape(pod), name=f"metrics of {pod.worker}"))
        log.info("endpoint %s is followed", endpoint.address)

    def _forget(self, address: str) -> None:
        pod = self._pods.pop(address)
        if self._awaited:
            self._awaited.discard(address)
        for task in pod.tasks + pod.readers:
            self.tasks.cancel(task)
        for request in self._router.detach_worker(pod.worker, pod.contents.incarnation):
            self._router.free(request)
        log.info("endpoint %s is gone", address)

    async def _scrape(self, pod: _Pod) -> None:
        while True:
            began = asyncio.get_running_loop().time()
            pod.failure = await self._ask(pod)
            if self._awaited:
                self._awaited.discard(pod.endpoint.address)
            if (knowledge := self.knowledge(pod)) != pod.knowledge:
                pod.knowledge = knowledge
                level = logging.WARNING if knowledge.state == "blind" else logging.INFO
                reason = f": {knowledge.reason}" if knowledge.reason else ""
                log.log(level, "cache of %s: %s%s", pod.worker, knowledge.state.upper(), reason)
            took = asyncio.get_running_loop().time() - began
            await asyncio.sleep(max(0.01, self._limits.scrape_s - took))

    async def _ask(self, pod: _Pod) -> str:
        """Ask for the metrics, and sometimes for the models; returns what went wrong."""
        try:
            async with asyncio.timeout(SCRAPE_TIMEOUT_S):
                status, text = await self._get(pod, "/metrics")
                if status not in (200, 404):
                    return f"/metrics: status {status}"
                report = read_metrics(text) if status == 200 else NO_REPORT
                before = pod.report
                is_same = before is not None and (before.started_at, before.model) == (
                    report.started_at,
                    report.model,
                )
                if not is_same or pod.looks % MODELS_EVERY == 0:
                    status, text = await self._get(pod, "/v1/models")
                    found = read_models(text) if status == 200 else PodModels()
                    self._learn(pod, found, report)
                if self._context is not None and not is_same:
                    self._read_events(pod, *await self._event_places(pod), self._context)
        except ConnectionRefusedError:
            self._close(pod)
            return "nothing listens there"
        except (OSError, TimeoutError) as error:
            return f"/metrics: {type(error).__name__} {error}".strip()
        pod.looks += 1
        pod.report = report
        self._renew(pod)
        return ""

    async def _get(self, pod: _Pod, path: str) -> tuple[int, str]:
        """Status and text. Raises OSError."""
        address = pod.endpoint.address
        status, body = await self._backends.fetch(address, path, most_nbytes=MAX_NBYTES)
        return status, body.decode("utf-8", "replace")

    def _learn(self, pod: _Pod, found: PodModels, report: PodReport) -> None:
        """The pod serves these; where it does not list them, what its metrics name."""
        if not found.names and report.model is not None:
            found = found._replace(names=(report.model,))
        found = found._replace(adapters=tuple({*found.adapters, *report.adapters}))
        if pod.models.names and found.names != pod.models.names:
            log.warning("%s serves %s now, not %s", pod.worker, found.names, pod.models.names)
        pod.models = found
        self._serve()

    def _close(self, pod: _Pod) -> None:
        """Nothing listens there: its process is over, and so are its cache and its requests."""
        if pod.report is None:
            return
        pod.report = None
        for request in self._router.detach_worker(pod.worker, pod.contents.incarnation):
            self._router.free(request)
        pod.contents.incarnation = Incarnation(0)  # what it holds next is a life of its own
        log.warning("endpoint %s does not listen: it gets no new requests", pod.worker)

    async def _event_places(self, pod: _Pod) -> tuple[dict[int, EventPlaces], str]:
        """The places of a pod's events as it tells them, else as the settings do; and why there are none."""
        status, text = await self._get(pod, "/kv_event_sources")
        if status == 200:
            try:
                return told_places(text, pod.endpoint.host), ""
            except ValueError as error:
                return {}, str(error)
        if self._limits.events_port is not None:
            return {0: _places(pod.endpoint, self._limits.events_port, self._limits)}, ""
        return {}, "it has no /kv_event_sources (vLLM before 0.32), and events_port is not set"

    def _read_events(
        self,
        pod: _Pod,
        places: dict[int, EventPlaces],
        why_none: str,
        context: "zmq.asyncio.Context",
    ) -> None:
        """Read the events at `places`, unless that is done already."""
        pod.no_events = why_none
        if places == pod.places:
            return
        for task in pod.readers:
            self.tasks.cancel(task)
        pod.readers.clear()
        pod.places = places
        self._publish(pod, pod.contents.reset())
        for rank, each in places.items():
            order = pod.contents.follow(rank, can_replay=each.replay is not None)
            subscriber = Subscriber(context, each, order, partial(self._arrived, pod, rank))
            name = f"events of {pod.worker}, rank {rank}"
            pod.readers.append(self.tasks.spawn(subscriber.run(), name=name))

    def _renew(self, pod: _Pod) -> None:
        """Renew the pod's lease by its last report."""
        report = pod.report
        if report is None:
            return
        contents = pod.contents
        contents.names.max_blocks = self._num_blocks(report) + SLACK_BLOCKS
        if report.started_at is not None:
            pod.life = report.incarnation
        is_new = contents.incarnation != pod.life
        held = contents.begin_life(Incarnation(pod.life)) if is_new else []
        self._router.on_lease(self._lease(pod, report))
        if is_new:
            self._on_join(pod.worker, contents.incarnation)
            self._publish(pod, held)

    def _lease(self, pod: _Pod, report: PodReport) -> Lease:
        contents, limits = pod.contents, self._limits
        num_blocks = self._num_blocks(report)
        load = Load(
            rows=report.running,
            waiting=report.waiting,
            active_blocks=int(report.kv_usage * num_blocks),
            prefill_tokens=int(report.waiting * report.mean_prompt_tokens),
        )
        return Lease(
            worker=pod.worker,
            incarnation=contents.incarnation,
            address=pod.endpoint.address,
            model=report.model or "",
            fingerprint="",
            block_size=limits.block_size,
            num_blocks=num_blocks,
            max_rows=limits.max_rows,
            max_model_len=pod.models.max_model_len,
            next_seq=contents.next_seq,
            kv_events=contents.is_whole and report.block_size in (None, limits.block_size),
            load=load,
            is_draining=pod.endpoint.is_draining,
        )

    def _num_blocks(self, report: PodReport) -> int:
        """The pod's KV memory in blocks of the router's size."""
        size = self._limits.block_size
        if report.num_blocks is None:
            return self._limits.num_blocks
        return max(1, report.num_blocks * (report.block_size or size) // size)

    def _arrived(self, pod: _Pod, rank: int, arrival: Arrival) -> None:
        events = pod.contents.take(arrival, rank)
        left_out = pod.contents.names.left_out
        for reason in list(left_out)[pod.num_left_out :]:
            log.info("endpoint %s: left out of its KV events: %s", pod.worker, reason)
        pod.num_left_out = len(left_out)
        self._publish(pod, events)

    def _publish(self, pod: _Pod, events: Sequence[Event]) -> None:
        if not events or not pod.contents.incarnation:
            return  # before its first metrics, with which all that is known is told
        contents = pod.contents
        batch = EventBatch(pod.worker, contents.incarnation, contents.next_seq, tuple(events))
        contents.next_seq = batch.next_seq
        self._router.on_events(batch)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            for worker in self._router.expire_leases():
                log.warning("endpoint %s is silent: it gets no new requests", worker)
            self._router.work()


def _is_other(pod: _Pod, endpoint: Endpoint | None) -> bool:
    """Whether the pod is gone, or another one has its address now."""
    return endpoint is None or endpoint.owner != pod.endpoint.owner


def _places(endpoint: Endpoint, port: int, limits: PodLimits) -> EventPlaces:
    """Engines of one pod publish on ports one after the other, by rank."""
    host, replay = endpoint.host, limits.replay_port
    return EventPlaces(
        live=f"tcp://{host}:{port + endpoint.rank}",
        replay=None if replay is None else f"tcp://{host}:{replay + endpoint.rank}",
        topic=limits.topic,
    )
