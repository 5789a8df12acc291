"""Gateways in virtual time: real routers in front of stub workers, fed as they are in service.

Events, replies and bookings arrive late by fixed times. Each request goes to some gateway.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from bench.router.stub_fleet import Simulation, StubWorker, Task, Timing, Work
from mallee.protocol.bookings import BookingBatch
from mallee.protocol.events import EventBatch
from mallee.protocol.hashing import Hashes
from mallee.protocol.ids import CapsuleId, Incarnation, RequestId
from mallee.router.config import CostModel, Policy, RouterConfig, SpillModel
from mallee.router.placement.fanouts import Part
from mallee.router.placement.placer import Placement
from mallee.router.placement.splits import Prices
from mallee.router.router import Router
from mallee.router.sync.outbox import Outbox
from mallee.router.sync.replicas import Replicas

FOREVER_S = 1e12
TIMING = Timing()


class Lags(NamedTuple):
    """Seconds until something arrives."""

    event_s: float = 3e-3  # a worker's events, at every gateway
    request_s: float = 5e-4  # a request, at its worker
    booking_s: float = 1e-3  # bookings, at the other gateways


LAGS = Lags()


class Spill(NamedTuple):
    """Rows that left the worker that holds their prefix."""

    request: str
    owner: str
    worker: str
    rows: int
    how: str
    prices: Prices


@dataclass(slots=True, eq=False)
class Answer:
    """A request on its way. Times in virtual seconds; a fan-out's rows by their index."""

    request: str
    begun_s: float
    placements: list[tuple[str, range]]
    cached_tokens: int = 0
    prompt_tokens: int = 0
    first_s: dict[int, float] = field(default_factory=dict)
    end_s: dict[int, float] = field(default_factory=dict)

    @property
    def slowest_s(self) -> float:
        return max(self.end_s.values()) - self.begun_s


class Gateways:
    """`num_gateways` routers over `num_workers` stubs; with `sync` they tell each other their bookings."""

    def __init__(
        self,
        simulation: Simulation,
        num_workers: int,
        *,
        config: RouterConfig,
        num_gateways: int = 1,
        sync: bool = True,
        num_blocks: int = 28_000,
        max_rows: int = 256,
        lags: Lags = LAGS,
        seed: int = 0,
    ) -> None:
        self.simulation = simulation
        self.work = Work()
        self.spills: list[Spill] = []
        self._lags = lags
        self._rng = random.Random(seed)
        self.workers = {
            f"w{i}": StubWorker(
                simulation,
                f"w{i}",
                timing=TIMING.per_block(config.block_size),
                work=self.work,
                publish=self._publish,
                num_blocks=num_blocks,
                max_rows=max_rows,
                block_size=config.block_size,
            )
            for i in range(num_workers)
        }
        self.routers = [
            Router(
                config,
                clock=lambda: simulation.now,
                draw=random.Random(seed + i).random,
                outbox=Outbox(f"g{i}", Incarnation(1)) if num_gateways > 1 and sync else None,
            )
            for i in range(num_gateways)
        ]
        self._replicas = [
            Replicas(router, gateway=f"g{i}", clock=lambda: simulation.now, lease_s=FOREVER_S)
            for i, router in enumerate(self.routers)
        ]
        for router in self.routers:
            for worker in self.workers.values():
                router.on_lease(worker.lease())

    # Requests

    def generate(
        self,
        request: str,
        hashes: Hashes,
        *,
        more_tokens: int,
        output_tokens: int,
        max_tokens: int | None = None,
        keeps_capsule: bool = False,
    ) -> Answer:
        """Route a prompt by its blocks and send it; its state is kept as capsule `request`.0 if wanted.

        `max_tokens`: what the router is told of the answer's length, if not the truth.
        """
        router = self._next_router()
        prompt = len(hashes) * router.config.block_size + more_tokens
        placement = router.route(
            RequestId(request),
            hashes,
            prompt_tokens=prompt,
            max_tokens=output_tokens if max_tokens is None else max_tokens,
        )
        answer = Answer(request, self.simulation.now, [(placement.worker, range(1))])
        answer.prompt_tokens = prompt
        task = Task(
            request,
            tuple(hashes.tolist()),
            [more_tokens],
            [output_tokens],
            keeps_capsule=keeps_capsule,
        )
        if keeps_capsule:
            task.on_end = lambda _: router.learn_capsule(
                CapsuleId(f"{request}.0"), placement.worker, prompt, hashes
            )
        self._send(router, answer, task, placement, range(1))
        return answer

    def fork(
        self,
        request: str,
        capsule: str,
        hashes: Hashes,
        *,
        suffix_tokens: Sequence[int],
        output_tokens: int,
        can_spill: bool = True,
        can_migrate: bool = False,
    ) -> Answer:
        """Fork a capsule that ends with `hashes`, once per suffix. Not `can_spill`: all where it is."""
        router = self._next_router()
        prompt = len(hashes) * router.config.block_size
        parts = self._route_fork(
            router, request, capsule, hashes, suffix_tokens, output_tokens, can_spill, can_migrate
        )
        owner = router.capsule(CapsuleId(capsule)).worker
        answer = Answer(
            request,
            self.simulation.now,
            [(part.placement.worker, part.rows) for _, part in parts],
        )
        answer.prompt_tokens = prompt + max(suffix_tokens)
        for name, part in parts:
            if part.how != "stay":
                self.spills.append(
                    Spill(
                        request,
                        owner,
                        part.placement.worker,
                        len(part.rows),
                        part.how,
                        part.prices,
                    )
                )
            task = Task(
                name,
                tuple(hashes.tolist()),
                [suffix_tokens[row] for row in part.rows],
                [output_tokens] * len(part.rows),
                is_fork=part.how == "stay",
                pull=part.how == "migrate",
            )
            self._send(router, answer, task, part.placement, part.rows)
        return answer

    def _route_fork(
        self,
        router: Router,
        request: str,
        capsule: str,
        hashes: Hashes,
        suffix_tokens: Sequence[int],
        output_tokens: int,
        can_spill: bool,
        can_migrate: bool,
    ) -> list[tuple[str, Part]]:
        rows = len(suffix_tokens)
        prompt = len(hashes) * router.config.block_size + max(suffix_tokens)
        names = [request, *(f"{request}-{k}" for k in range(1, min(rows, 64)))]
        parts = router.route_fanout(
            [RequestId(name) for name in names],
            hashes,
            prompt_tokens=prompt,
            max_tokens=output_tokens,
            suffix_tokens=suffix_tokens,
            capsule=CapsuleId(capsule),
            can_recompute=can_spill,
            can_migrate=can_spill and can_migrate,
        )
        return list(zip(names, parts, strict=False))

    def _next_router(self) -> Router:
        return self._rng.choice(self.routers)

    def _send(
        self,
        router: Router,
        answer: Answer,
        task: Task,
        placement: Placement,
        rows: range,
    ) -> None:
        request = RequestId(task.request)
        left = len(rows)
        and_then = task.on_end

        def first(row: int) -> None:
            if not answer.first_s:
                answer.cached_tokens = task.cached_tokens
            if row == 0:
                router.first_token(request)
                if not task.is_fork and not task.pull:
                    router.observe_hit(request, task.cached_tokens)
            answer.first_s[rows[row]] = self.simulation.now

        def end(row: int) -> None:
            nonlocal left
            left -= 1
            answer.end_s[rows[row]] = self.simulation.now
            and_then(row)
            if not left:
                router.free(request)
                self._tell_bookings(router)

        task.on_first, task.on_end = first, end
        worker = self.workers[placement.worker]
        self._tell_bookings(router)
        router.work()
        self.simulation.at(self.simulation.now + self._lags.request_s, lambda: worker.submit(task))

    # News

    def _publish(self, batch: EventBatch) -> None:
        at = self.simulation.now + self._lags.event_s
        for router in self.routers:
            self.simulation.at(at, partial(self._take_events, router, batch))

    @staticmethod
    def _take_events(router: Router, batch: EventBatch) -> None:
        assert not router.on_events(batch), "no event is ever lost here"

    def _tell_bookings(self, router: Router) -> None:
        if router.outbox is None:
            return
        at = self.simulation.now + self._lags.booking_s
        while (batch := router.outbox.take()) is not None:
            for replica in self._replicas:
                self.simulation.at(at, partial(self._take_bookings, replica, batch))

    @staticmethod
    def _take_bookings(replica: Replicas, batch: BookingBatch) -> None:
        assert not replica.on_batch(batch), "no booking is ever lost here"


def chain(rng: np.random.Generator, num_blocks: int) -> Hashes:
    """Hashes that nothing else has."""
    return rng.integers(1, 1 << 64, num_blocks, dtype=np.uint64)


def router_config(
    num_workers: int, *, block_size: int = 16, policy: Policy = "cost"
) -> RouterConfig:
    """For stubs, whose timing it knows; nobody's lease, booking or prediction runs out."""
    timing = TIMING.per_block(block_size)
    return RouterConfig(
        block_size=block_size,
        max_workers=max(64, num_workers),
        lease_s=FOREVER_S,
        booking_s=FOREVER_S,
        policy=policy,
        cost=CostModel(
            prefill_token_s=timing.prefill_token_s,
            step_base_s=timing.step_base_s,
            step_row_s=timing.step_row_s,
            step_block_s=timing.step_block_s,
        ),
        spill=SpillModel(
            migrate_latency_s=timing.pull_latency_s,
            migrate_byte_s=timing.pull_block_s,
            kv_block_nbytes=1,
        ),
    )
