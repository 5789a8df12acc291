"""Clients, gateways and workers of a replay on one clock, and the record of what happens."""

import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from math import nan

from mallee.mocker.engine import Outcome
from mallee.mocker.replay.build import AnyGateway, ReplayBuilder
from mallee.mocker.replay.clients import Clients
from mallee.mocker.replay.clock import Clock
from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.replay.fleet.faults import actions
from mallee.mocker.replay.fleet.workers import Worker
from mallee.mocker.replay.gateway.requests import Asked, CapsuleRef
from mallee.mocker.replay.gateway.texts import ReplayTexts
from mallee.mocker.replay.records import EventLog, Gaps, Rows
from mallee.mocker.replay.sharing import Sharing
from mallee.mocker.texts import Texts
from mallee.mocker.updates import CountedUpdate
from mallee.protocol.bookings import BookingBatch
from mallee.protocol.errors import MalleeError
from mallee.protocol.events import EventBatch, Lease, Snapshot
from mallee.protocol.ids import CapsuleId, RequestId
from mallee.protocol.messages import Release
from mallee.router.dispatch.effects import Deliver, Placed
from mallee.router.dispatch.jobs import PrefillJob
from mallee.router.sync.replicas import Replicas
from mallee.traces.workload import NO_PARENT, Request, Workload

_WORK_EVERY = 16  # requests between pieces of a router's housekeeping
_PLAIN = ("mooncake", "azure")  # kinds of workloads whose requests know nothing of one another


class Simulation:
    """One run: listens to the fleet and records for the gateways."""

    def __init__(self, workload: Workload, config: ReplayConfig) -> None:
        """Raises ConfigError for a config that can't be, alone or with this workload."""
        config.validate()
        self._actions = actions(config.faults, config.engines)
        self.config = config
        self.block_size = config.block_tokens(workload.id_tokens)
        self.timing = config.load_timing()
        self.clock = Clock()
        self.texts = Texts(self.block_size)
        self.has_forks = workload.has_forks
        self.log = EventLog()
        self.rows = Rows()
        self.gaps = Gaps()
        self.sharing = Sharing(workload.id_tokens, self.block_size)
        self.errors: Counter[str] = Counter()
        self.reasons: dict[str, str] = {}  # of the first request with each error
        self.sessions: dict[str, int] = {}
        self.classes: dict[str, int] = {}
        self.num_lost_events = 0  # while the broker was down
        self._event_lag_s = config.event_lag_s
        self._connections: dict[str, AnyGateway] = {}  # by session
        self.asked: dict[str, Asked] = {}  # under way
        self.clients = Clients(
            workload,
            self.clock,
            self._begin,
            speedup=config.speedup,
            concurrency=config.concurrency,
            keeps_order=config.keeps_order and workload.kind not in _PLAIN,
            max_requests=config.max_requests,
        )
        self._named = ReplayTexts(self.texts, workload.id_tokens, config.retain_s)
        self._draw = random.Random(config.seed)  # noqa: S311 # a replay
        builder = ReplayBuilder(config, self.timing, self.block_size, self.clock)
        self.fleet = builder.fleet(self, self.texts, has_forks=self.has_forks)
        self.gateways: list[AnyGateway] = [
            builder.gateway(
                index,
                fleet=self.fleet,
                texts=self._named.of(f"g{index}"),
                recorder=self,
                on_booked=self._broadcast_bookings if config.are_synced else None,
            )
            for index in range(config.gateways)
        ]
        self._replicas = [builder.replicas(gateway) for gateway in self.gateways]
        for index in range(config.engines):
            self.fleet.open(index, builder.role(index))

    def run(self) -> None:
        """Run from the first request to the end of the last."""
        for action in self._actions:
            self.clock.at(action.at_s, action.play, self.fleet)
        self.clients.start()
        self.clock.run()

    # Requests

    def _begin(self, request: Request) -> None:
        gateway = self._gateway(request.session)
        asked = Asked(request, gateway, self.clock.now)
        self.asked[asked.name] = asked
        max_tokens = request.output_tokens
        if self.config.max_output_tokens:
            max_tokens = min(max_tokens, self.config.max_output_tokens)
        if request.parent == NO_PARENT:
            asked.shared = self.sharing.begin(request.ids, request.input_tokens, request.branches)
        else:
            max_tokens = max(1, max_tokens)
        asked.job = self._named.job(asked, max_tokens)
        if request.parent != NO_PARENT:
            held = asked.prompt_tokens - request.input_tokens - 1
            asked.shared = held // self.block_size * self.block_size
        if not self.clients.num_begun % _WORK_EVERY:
            for router in gateway.routers.values():
                router.work()
        gateway.begin(asked.name, asked.job)

    def _gateway(self, session: str) -> AnyGateway:
        """Any gateway for a request on its own; always the same one for a session."""
        if len(self.gateways) == 1:
            return self.gateways[0]
        if not session:
            return self._draw.choice(self.gateways)
        gateway = self._connections.get(session)
        if gateway is None:
            gateway = self._connections[session] = self._draw.choice(self.gateways)
        return gateway

    def placed(self, effect: Placed) -> None:
        """Take the booking of a shard."""
        asked, shard = self.asked[effect.request], effect.shard
        asked.unseen.add(shard.name)
        asked.num_retries += shard.dispatch.num_moves > 0
        if asked.worker < 0:
            asked.worker = shard.incarnation - 1  # lives are numbered from 1
            asked.routed = self.clock.now

    def prompted(self, request: RequestId, effect: Deliver) -> None:
        """Take the end of a prompt that is computed apart from its answer."""
        asked, update = self.asked[request], effect.update
        self.log.update(asked.request.number, update)
        self._found(asked, update.cached_tokens)
        asked.is_prompted = True
        asked.computed += update.prefill_tokens

    def deliver(self, effect: Deliver, ended: float) -> None:
        """Take news of a branch: its first token, drawn at `ended`, or the tokens up to its end."""
        name, branch, shard, update, _ = effect
        asked, num = self.asked[name], update.num_tokens
        self.log.update(asked.request.number, update)
        asked.output += num
        if shard.counts[update.branch] == num:  # nothing was told of the branch before
            self._on_first(asked, effect, ended)
        if update.finish is None:
            asked.last[branch] = ended
        elif update.capsule is not None:
            self._learn(asked, effect)

    def _on_first(self, asked: Asked, effect: Deliver, ended: float) -> None:
        """Take the first news of a branch on a worker."""
        _, branch, shard, update, _ = effect
        cached, computed = update.cached_tokens, update.prefill_tokens
        if shard.prompt is not None and not update.branch:  # what it forks was brought there before
            cached, brought = shard.prompt
            computed += brought
        if shard.name in asked.unseen:
            asked.unseen.remove(shard.name)
            self._found(asked, cached)
        asked.computed += computed
        if asked.first != asked.first:  # not a number yet
            asked.first = ended
        elif (last := asked.last.get(branch)) is not None:
            self.gaps.add(ended - last, 1)  # since its last token on a worker that was lost

    def _found(self, asked: Asked, cached_tokens: int) -> None:
        """Count the tokens of a prompt that its worker had."""
        if asked.first != asked.first and not asked.is_prompted:
            asked.cached = cached_tokens
        self.sharing.computed(asked.shared, cached_tokens)

    def _learn(self, asked: Asked, effect: Deliver) -> None:
        """Note a capsule of an answer. One that no request will fork is released at once."""
        shard, update = effect.shard, effect.update
        worker = self.fleet.lives[shard.incarnation]
        if not asked.request.num_children and isinstance(asked.job, PrefillJob):
            self._release(CapsuleId(update.capsule), [worker])
        elif not effect.branch:
            asked.capsule = CapsuleRef(CapsuleId(update.capsule), update.boundary, worker)

    def failed(self, name: RequestId, error: MalleeError) -> None:
        """Take the failure of a request, or of a branch of it."""
        asked = self.asked[name]
        asked.error, asked.reason = error.code, error.message

    def over(self, name: RequestId) -> None:
        """Take the end of a request, well or not."""
        asked = self.asked.pop(name)
        request = asked.request
        if asked.error:
            self.errors[asked.error] += 1
            asked.first = nan  # a part of an answer is none: it counts in no latency
            self.reasons.setdefault(asked.error, f"request {request.number}: {asked.reason}")
        self.rows.add(
            asked.arrival,
            asked.routed,
            asked.first,
            self.clock.now,
            request.number,
            asked.prompt_tokens,
            asked.output,
            asked.cached,
            asked.computed,
            asked.worker,
            self.sessions.setdefault(request.session, len(self.sessions)),
            self.classes.setdefault(request.cls, len(self.classes)),
            asked.num_retries,
            request.branches,
        )
        if request.num_children:
            self._named.leave(asked)
            num_tokens = request.input_tokens + asked.output // max(1, request.branches)
            self.sharing.fork(request.ids, num_tokens)
        if request.parent != NO_PARENT:
            abandoned = self._named.child_ended(request.parent)
            if abandoned is not None:
                self._release(*abandoned)
                for gateway in self.gateways:
                    gateway.release(abandoned.capsule)
        self._named.drop(asked)
        self.clients.ended(request)

    def _release(self, capsule: CapsuleId, workers: Sequence[Worker]) -> None:
        for worker in workers:
            self.fleet.send(worker, Release(capsule))

    # Workers

    def on_outcome(self, worker: Worker, outcome: Outcome) -> None:
        """Record a step of `worker` that ends now, and hand on its updates and events."""
        begun, ended, num_steps, num_gaps, late_s, updates, events = outcome
        log = self.log
        log.outcome(ended, worker.index, num_steps)
        if num_gaps:
            self.gaps.add((ended - begun) / num_steps, num_gaps)
        for seconds in late_s:
            self.gaps.add(seconds, 1)
        if events is not None:
            log.events(events)
            self._publish(worker, events)
        if updates:
            if len(self.gateways) == 1:
                self.gateways[0].on_updates(worker, updates, ended)
            else:
                self._tell(worker, updates, ended)

    def _tell(self, worker: Worker, updates: Sequence[CountedUpdate], ended: float) -> None:
        """Hand each gateway the updates of its requests, and all of them those that are no client's."""
        own: dict[AnyGateway, list[CountedUpdate]] = {}
        for update in updates:
            asked = self.asked.get(update.request.partition("-")[0])  # of a shard's name
            for gateway in self.gateways if asked is None else (asked.gateway,):
                own.setdefault(gateway, []).append(update)
        for gateway, its in own.items():
            gateway.on_updates(worker, its, ended)

    def _publish(self, worker: Worker, events: EventBatch) -> None:
        if not self.fleet.is_broker_up:
            self.num_lost_events += len(events.events)
            return
        lag_s = self._event_lag_s
        for gateway in self.gateways:
            if lag_s:
                take = partial(self._take_events, gateway, worker)
                self.clock.at(self.clock.now + lag_s, take, events)
            elif gateway.router_for(worker).on_events(events):
                self._want_snapshot(gateway, worker)

    def _take_events(self, gateway: AnyGateway, worker: Worker, events: EventBatch) -> None:
        if gateway.router_for(worker).on_events(events):
            self._want_snapshot(gateway, worker)

    def _want_snapshot(self, gateway: AnyGateway, worker: Worker) -> None:
        if worker.is_alive:
            take = partial(self._take_snapshot, gateway, worker, self.clock.now)
            self.fleet.ask_snapshot(worker, take)

    def _take_snapshot(
        self, gateway: AnyGateway, worker: Worker, asked_at: float, snapshot: Snapshot
    ) -> None:
        router = gateway.router_for(worker)
        if not self.fleet.is_broker_up:
            return  # the lease after the outage makes the router ask again
        if router.on_snapshot(snapshot, asked_at=asked_at):
            self._want_snapshot(gateway, worker)
        while router.work():
            pass

    def on_lease(self, worker: Worker, lease: Lease) -> None:
        """Send the lease of `worker` to all gateways."""
        if not self.fleet.is_broker_up and self.clock.now:
            return
        for gateway, replicas in zip(self.gateways, self._replicas, strict=True):
            if gateway.router_for(worker).on_lease(lease):
                self._want_snapshot(gateway, worker)
            replicas.worker_joined(worker.name, worker.incarnation)
            gateway.on_lease(worker, lease)

    def on_death(self, worker: Worker, unreported: Sequence[CountedUpdate]) -> None:
        """End this life of `worker`; gateways notice `detect_s` later."""
        now = self.clock.now
        self.log.note(now, f"{worker.name} is gone")
        if unreported:
            self._tell(worker, unreported, now)  # the last are at most a part of a step late
        if self.config.detect_s and self.is_needed(worker):
            self.clock.at(now + self.config.detect_s, self._lose, worker)
        else:
            self._lose(worker)

    def _lose(self, worker: Worker) -> None:
        for gateway in self.gateways:
            gateway.router_for(worker).lose_worker(worker.name, worker.incarnation)
        for gateway in self.gateways:
            gateway.lost(worker)

    def is_needed(self, worker: Worker) -> bool:
        """Whether a gateway has not let go of `worker`."""
        return any(gateway.is_linked(worker) for gateway in self.gateways)

    def on_broker(self, is_up: bool) -> None:
        """Lose what workers publish from now on, or let it arrive again."""
        self.log.note(self.clock.now, f"broker up: {is_up}")
        for gateway in self.gateways:
            for router in gateway.routers.values():
                router.set_broker_up(is_up)
        if is_up and self.config.are_synced:
            for gateway in self.gateways:  # the others see what they missed
                assert gateway.router.outbox is not None
                beat = gateway.router.outbox.heartbeat(lags=gateway.room.lags())
                self._broadcast(gateway, beat)

    # Bookings

    def _broadcast_bookings(self, gateway: AnyGateway) -> None:
        outbox = gateway.router.outbox
        assert outbox is not None
        while (batch := outbox.take()) is not None:
            self._broadcast(gateway, batch)

    def _broadcast(self, gateway: AnyGateway, batch: BookingBatch) -> None:
        for other, replicas in zip(self.gateways, self._replicas, strict=True):
            if other is gateway or not self.fleet.is_broker_up:
                continue
            take = partial(self._take_bookings, gateway, other, replicas)
            if self.config.booking_lag_s:
                self.clock.at(self.clock.now + self.config.booking_lag_s, take, batch)
            else:
                take(batch)

    @staticmethod
    def _take_bookings(
        source: AnyGateway, gateway: AnyGateway, replicas: Replicas, batch: BookingBatch
    ) -> None:
        if replicas.on_batch(batch):
            assert source.router.outbox is not None
            replicas.on_snapshot(source.router.outbox.snapshot())
        gateway.poke(None)  # something may have been freed

    def check(self) -> None:
        """Raises AssertionError on a broken invariant of any part, or if a request was lost."""
        self.fleet.check()
        self.clients.check()
        for gateway in self.gateways:
            for router in gateway.routers.values():
                router.check()
            gateway.check()
        assert len(self.rows) == self.clients.num_ended, "a request ended twice or without a row"
