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
from typing import TYPE_CHECKING, Final, NamedTuple

import httpx

from mallee.actors.front.pods.endpoints import Endpoint
from mallee.actors.front.pods.event_order import Arrival
from mallee.actors.front.pods.kv_events import PodContents
from mallee.actors.front.pods.metrics import MAX_NBYTES, PodReport, read_metrics
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


class PodCache(NamedTuple):
    """The knowledge of one pod's cache."""

    is_whole: bool  # what is not known is not there
    why: str  # not whole, for the user
    num_blocks: int  # held, by its own names
    num_gaps: int
    left_out: Mapping[str, int]  # blocks in its events, by the reason why they were not taken in


@dataclass(slots=True)
class _Pod:
    """One endpoint that is followed."""

    endpoint: Endpoint
    contents: PodContents
    report: PodReport | None = None
    failure: str = ""  # logged once
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

    `on_join(worker, incarnation)` is called for each new life, `on_gone(worker, requests)` for endpoints that
    are no more, with what was booked there.
    """

    def __init__(
        self,
        router: Router,
        client: httpx.AsyncClient,
        context: "zmq.asyncio.Context | None",
        limits: PodLimits,
        *,
        max_pods: int,
        on_join: Callable[[WorkerId, Incarnation], object],
    ) -> None:
        """`context`: of ZeroMQ, to read events."""
        self._router = router
        self._client = client
        self._context = context
        self._limits = limits
        self._max_pods = max_pods
        self._on_join = on_join
        self._pods: dict[str, _Pod] = {}
        self._tried: set[str] = set()
        self.tasks = Tasks("the pods of a picker")

    def start_up(self) -> None:
        """Take leases that run out from now on."""
        self.tasks.spawn(self._sweep())

    async def close(self) -> None:
        """Follow nothing any more."""
        await self.tasks.close()

    @property
    def is_synced(self) -> bool:
        """Whether each endpoint was asked once."""
        return self._pods.keys() <= self._tried

    @property
    def models(self) -> frozenset[str]:
        """Names of the models that pods serve without an adapter."""
        return frozenset(p.report.model for p in self._pods.values() if p.report and p.report.model)

    @property
    def adapters(self) -> frozenset[str]:
        """LoRA adapters that pods were seen to use."""
        found: set[str] = set()
        for pod in self._pods.values():
            found |= pod.contents.names.adapters
            found.update(pod.report.adapters if pod.report else ())
        return frozenset(found)

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

    def caches(self) -> dict[WorkerId, PodCache]:
        """The knowledge of each pod's cache, and why it is not whole."""
        found: dict[WorkerId, PodCache] = {}
        for pod in self._pods.values():
            contents = pod.contents
            found[pod.worker] = PodCache(
                is_whole=contents.is_whole,
                why=pod.no_events or contents.why_incomplete,
                num_blocks=len(contents.names),
                num_gaps=contents.num_gaps,
                left_out=contents.names.left_out,
            )
        return found

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
        self._tried.discard(address)
        for task in pod.tasks + pod.readers:
            self.tasks.cancel(task)
        for request in self._router.detach_worker(pod.worker, pod.contents.incarnation):
            self._router.free(request)
        log.info("endpoint %s is gone", address)

    async def _scrape(self, pod: _Pod) -> None:
        while True:
            began = asyncio.get_running_loop().time()
            failure = await self._ask(pod)
            if failure != pod.failure:
                log.log(
                    logging.WARNING if failure else logging.INFO,
                    "metrics of %s: %s",
                    pod.worker,
                    failure or "they are there",
                )
                pod.failure = failure
            self._tried.add(pod.endpoint.address)
            took = asyncio.get_running_loop().time() - began
            await asyncio.sleep(max(0.01, self._limits.scrape_s - took))

    async def _ask(self, pod: _Pod) -> str:
        """Ask for the metrics, and in a new life for the places of its events; returns what went wrong."""
        try:
            status, page = await self._get(pod, "/metrics")
            if status != 200:
                return f"status {status}"
            report = read_metrics(page)
            if report is None:
                return "they have no vllm:num_requests_waiting"
            size = self._limits.block_size
            if report.block_size not in (None, size):
                return f"block size {report.block_size}, the picker's block_size={size}"
            if pod.contents.incarnation != report.incarnation and self._context is not None:
                self._read_events(pod, *await self._event_places(pod), self._context)
        except (httpx.HTTPError, OSError, TimeoutError, ValueError) as error:
            return f"{type(error).__name__} {error}".strip()
        pod.report = report
        self._renew(pod)
        return ""

    async def _get(self, pod: _Pod, path: str) -> tuple[int, str]:
        """Status and text. Raises HTTPError, OSError, TimeoutError, and ValueError if it is too long."""
        url = f"http://{pod.endpoint.address}{path}"
        text = bytearray()
        async with (
            asyncio.timeout(SCRAPE_TIMEOUT_S),
            self._client.stream("GET", url) as answer,
        ):
            async for part in answer.aiter_bytes():
                text += part
                if len(text) > MAX_NBYTES:
                    raise ValueError(f"more than {MAX_NBYTES} bytes at {path}")
        return answer.status_code, text.decode("utf-8", "replace")

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
        if why_none != pod.no_events and why_none:
            log.warning("endpoint %s: its cache is predicted: %s", pod.worker, why_none)
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
        contents.names.max_blocks = (report.num_blocks or self._limits.num_blocks) + SLACK_BLOCKS
        is_new = contents.incarnation != report.incarnation
        held = contents.begin_life(Incarnation(report.incarnation)) if is_new else []
        self._router.on_lease(self._lease(pod, report))
        if is_new:
            self._on_join(pod.worker, contents.incarnation)
            self._publish(pod, held)

    def _lease(self, pod: _Pod, report: PodReport) -> Lease:
        contents, limits = pod.contents, self._limits
        num_blocks = report.num_blocks or limits.num_blocks
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
            max_model_len=0,
            next_seq=contents.next_seq,
            kv_events=contents.is_whole,
            load=load,
            is_draining=pod.endpoint.is_draining,
        )

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
