"""Clients, gateways and workers of a replay on one clock, and the record of what happens."""

import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from math import nan

from mallee.mocker.engine import Outcome
from mallee.mocker.replay.build import ReplayBuilder
from mallee.mocker.replay.clients import Clients
from mallee.mocker.replay.clock import Clock
from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.replay.fleet.faults import actions
from mallee.mocker.replay.fleet.transfers import Transfers
from mallee.mocker.replay.fleet.workers import Worker
from mallee.mocker.replay.gateway.gateway import Gateway
from mallee.mocker.replay.gateway.prompts import PromptTexts
from mallee.mocker.replay.gateway.requests import RequestState, Shard
from mallee.mocker.replay.records import EventLog, Gaps, Rows
from mallee.mocker.replay.sharing import Sharing
from mallee.mocker.texts import Texts
from mallee.mocker.updates import CountedUpdate
from mallee.protocol.bookings import BookingBatch
from mallee.protocol.events import EventBatch, Lease, Snapshot
from mallee.protocol.messages import Release, Share
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
        self._shares: dict[str, Share] = {}  # by session
        self._connections: dict[str, Gateway] = {}  # by session
        self.clients = Clients(
            workload,
            self.clock,
            self._begin,
            speedup=config.speedup,
            concurrency=config.concurrency,
            keeps_order=config.keeps_order and workload.kind not in _PLAIN,
            max_requests=config.max_requests,
        )
        self._prompts = PromptTexts(self.texts, workload.id_tokens)
        self._draw = random.Random(config.seed)
        builder = ReplayBuilder(config, self.timing, self.block_size, self.clock)
        self.fleet = builder.fleet(self, self.texts, has_forks=self.has_forks)
        self.transfers = Transfers(self.clock, self.fleet, config.link)
        shards: dict[str, Shard] = {}
        self.gateways = [
            builder.gateway(
                index,
                self.transfers,
                fleet=self.fleet,
                prompts=self._prompts,
                recorder=self,
                shards=shards,
                has_forks=self.has_forks,
                on_booked=self._broadcast_bookings if config.gateways > 1 else None,
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
        share = self._shares.get(request.session)
        if share is None:
            share = self._shares[request.session] = Share(request.session)
        state = RequestState(request, gateway, self.clock.now, share)
        if request.parent == NO_PARENT:
            state.shared = self.sharing.begin(request.ids, request.input_tokens, request.branches)
        max_tokens = request.output_tokens
        if self.config.max_output_tokens:
            max_tokens = min(max_tokens, self.config.max_output_tokens)
        if request.parent != NO_PARENT:
            max_tokens = max(1, max_tokens)
        if not self.clients.num_begun % _WORK_EVERY:
            for router in gateway.routers.values():
                router.work()
        gateway.begin(state, max_tokens)

    def _gateway(self, session: str) -> Gateway:
        """Any gateway for a request on its own; always the same one for a session."""
        if len(self.gateways) == 1:
            return self.gateways[0]
        if not session:
            return self._draw.choice(self.gateways)
        gateway = self._connections.get(session)
        if gateway is None:
            gateway = self._connections[session] = self._draw.choice(self.gateways)
        return gateway

    def first(self, shard: Shard, update: CountedUpdate) -> None:
        """Take the first update of a shard, which has the number of cached tokens."""
        state, worker = shard.state, shard.worker
        if worker.tiers is not None:
            worker.engine.unsupply(update.request)
        if state.first != state.first:  # not a number yet: this is its first shard
            state.cached = update.cached_tokens
        self.sharing.computed(state.shared, update.cached_tokens)

    def tokens(self, shard: Shard, update: CountedUpdate, ended: float) -> None:
        """Take a branch's first token, drawn at `ended`, or the tokens up to its end."""
        state, num = shard.state, update.num_tokens
        state.output += num
        if len(shard.rows) == 1:
            is_first, last = not shard.num_reported, shard.last
            shard.num_reported += num
            shard.last = ended
        else:
            last, num_reported = -1.0, shard.reported_by_row.get(update.branch, 0)
            is_first = not num_reported
            if update.finish is None:
                shard.reported_by_row[update.branch] = num_reported + num
            else:
                shard.reported_by_row.pop(update.branch, None)
        if is_first:
            state.computed += update.prefill_tokens
            if state.first != state.first:
                state.first = ended
            elif last >= 0.0:
                self.gaps.add(ended - last, 1)  # since its last token on a worker that was lost

    def over(self, state: RequestState) -> None:
        """Take the end of a request, well or not."""
        request, now = state.request, self.clock.now
        if state.error:
            self.errors[state.error] += 1
            state.first = nan  # a part of an answer is none: it counts in no latency
            self.reasons.setdefault(state.error, f"request {state.request.number}: {state.reason}")
        self.rows.add(
            state.arrival,
            state.routed,
            state.first,
            now,
            request.number,
            state.prompt_tokens,
            state.output,
            state.cached,
            state.computed,
            state.worker,
            self.sessions.setdefault(request.session, len(self.sessions)),
            self.classes.setdefault(request.cls, len(self.classes)),
            state.retries,
            request.branches,
        )
        if request.num_children:
            self._keep(state)
        if request.parent != NO_PARENT:
            self._release(request.parent)
        self._prompts.drop(state)
        self.clients.ended(request)

    def _keep(self, state: RequestState) -> None:
        """Keep what forks of this request will continue."""
        request = state.request
        num_tokens = request.input_tokens + state.output // max(1, request.branches)
        self._prompts.leave(state, num_tokens)
        self.sharing.fork(request.ids, num_tokens)

    def _release(self, parent: int) -> None:
        """Count a fork of `parent` as over; after the last one release its capsule."""
        capsule = self._prompts.child_ended(parent)
        if capsule is not None:
            self.fleet.send(capsule.worker, Release(capsule.id))

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
        shards = worker.shards
        for update in updates:
            shard = shards.get(update.request)
            if shard is not None:
                log.update(shard.state.request.number, update)
                shard.gateway.on_update(shard, update, ended)

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

    def _take_events(self, gateway: Gateway, worker: Worker, events: EventBatch) -> None:
        if gateway.router_for(worker).on_events(events):
            self._want_snapshot(gateway, worker)

    def _want_snapshot(self, gateway: Gateway, worker: Worker) -> None:
        if worker.is_alive:
            take = partial(self._take_snapshot, gateway, worker, self.clock.now)
            self.fleet.ask_snapshot(worker, take)

    def _take_snapshot(
        self, gateway: Gateway, worker: Worker, asked_at: float, snapshot: Snapshot
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
            if self.clock.now:
                gateway.poke(None)

    def on_death(self, worker: Worker, unreported: Sequence[CountedUpdate]) -> None:
        """End this life of `worker`; gateways notice `detect_s` later."""
        now = self.clock.now
        self.log.note(now, f"{worker.name} is gone")
        for update in unreported:
            shard = worker.shards.get(update.request)
            if shard is not None and len(shard.rows) == 1:
                shard.num_reported += update.num_tokens
                shard.state.output += update.num_tokens
                shard.last = now  # at most a part of a step late
        if self.config.detect_s and not worker.is_leaving:  # a leaving worker is known to leave
            self.clock.at(now + self.config.detect_s, self._lose, worker)
        else:
            self._lose(worker)

    def _lose(self, worker: Worker) -> None:
        for gateway in self.gateways:
            gateway.router_for(worker).lose_worker(worker.name, worker.incarnation)
        lost = list(dict.fromkeys(worker.shards.values()))
        for shard in lost:
            shard.gateway.lost(shard)
        for gateway in self.gateways:
            gateway.poke(None)

    def on_broker(self, is_up: bool) -> None:
        """Lose what workers publish from now on, or let it arrive again."""
        self.log.note(self.clock.now, f"broker up: {is_up}")
        for gateway in self.gateways:
            for router in gateway.routers.values():
                router.set_broker_up(is_up)

    # Bookings

    def _broadcast_bookings(self, gateway: Gateway) -> None:
        outbox = gateway.router.outbox
        assert outbox is not None
        while (batch := outbox.take()) is not None:
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
        source: Gateway, gateway: Gateway, replicas: Replicas, batch: BookingBatch
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
        assert len(self.rows) == self.clients.num_ended, "a request ended twice or without a row"
