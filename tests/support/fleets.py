"""Fleets in virtual time for tests: traffic, whole runs, and what must be true after each."""

import random
from collections.abc import Sequence
from typing import Any

from msgspec import structs

from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.replay.fleet.faults import Fault
from mallee.mocker.replay.fleet.workers import Worker
from mallee.mocker.replay.simulation import Simulation
from mallee.mocker.timing import ClosedForm, Plane, Timing
from mallee.protocol.events import EventBatch, Stored, unpack_hashes
from mallee.router.config import RouterConfig
from mallee.router.router import Router
from mallee.traces.workload import Request, Workload

SIZE = 4
TIMING = Timing(ClosedForm(2e-3, 1e-4, 0.0, 0.0, (Plane(4e-3, 1e-4, 0.0),)), 1e-3)


def workload(requests: Sequence[Request], kind: str = "trees") -> Workload:
    has_forks = any(request.parent != -1 for request in requests)
    return Workload("test", SIZE, lambda: iter(requests), kind, has_forks=has_forks)


def traffic(
    seed: int, num: int = 60, rate: float = 40.0, *, kept: float = 0.0, sessions: int = 1
) -> Workload:
    """Prompts with shared beginnings, fan-outs, and forks of some of their answers.

    `kept`: of the prompts that are forked, the share without an answer, whose capsules are kept.
    """
    rng, draw = random.Random(seed), random.Random(seed + 1).random
    requests: list[Request] = []
    parents: dict[int, int] = {}
    now = 0.0
    for number in range(num):
        now += rng.expovariate(rate)
        roots = [r for r in requests if r.parent == -1 and not r.wait_for and r.branches == 1]
        if roots and rng.random() < 0.35:
            root = rng.choice(roots)
            parent, session = root.number, root.session
            parents[parent] = parents.get(parent, 0) + 1
            fork = Request(
                number,
                now,
                (),
                rng.choice([0, 3, 9]),
                rng.randint(1, 12),
                session,
                parent=parent,
                branches=rng.choice([1, 1, 3]),
            )
            requests.append(fork)
            continue
        first, second = rng.randrange(3), rng.randrange(4)
        ids = [first, 10 + 4 * first + second, 100 + number, 200 + number][: rng.randint(1, 4)]
        tokens = len(ids) * SIZE + rng.choice([-2, 0, 7])
        requests.append(
            Request(
                number,
                now,
                tuple(ids),
                tokens,
                rng.randint(1, 30),
                f"s{number % sessions}",
                branches=rng.choice([1, 1, 1, 2]),
            )
        )
    told = [
        structs.replace(
            r,
            output_tokens=0 if r.number in parents and draw() < kept else r.output_tokens,
            num_children=parents.get(r.number, 0),
        )
        for r in requests
    ]
    return workload(told)


def named(load: Workload) -> list[Request]:
    """Its requests, with prompts cut where their ids end: what no id names has another text in each run."""
    return [
        structs.replace(request, input_tokens=min(request.input_tokens, len(request.ids) * SIZE))
        if request.parent == -1
        else request
        for request in load
    ]


def simulate(
    load: Workload, *faults: Fault, blocks: set[int] | None = None, **more: Any
) -> Simulation:
    """A run, whole: nobody is lost, nobody failed, everybody is in order.

    `blocks` gets the hashes of all blocks that were ever stored: they tell the texts.
    """
    settled: dict[str, Any] = {
        "engines": 3,
        "kv_tokens": 64 * SIZE,
        "timing": TIMING,
        "max_rows": 8,
    }
    simulation = Simulation(load, ReplayConfig(faults=faults, **(settled | more)))
    if blocks is not None:
        _note_blocks(simulation, blocks)
    simulation.run()
    simulation.check()
    num = len(list(load))
    assert (simulation.clients.num_begun, simulation.clients.num_ended) == (num, num)
    assert len(simulation.rows) == num
    assert not simulation.errors
    for request, output in zip(*_outputs(load, simulation), strict=True):
        least = 0 if request.parent == -1 else 1  # without an answer it is there to be forked
        assert output == max(least, request.output_tokens) * request.branches
    return simulation


def _note_blocks(simulation: Simulation, blocks: set[int]) -> None:
    log = simulation.log.events

    def events(batch: EventBatch) -> None:
        for event in batch.events:
            if isinstance(event, Stored):
                blocks.update(unpack_hashes(event.hashes).tolist())
        log(batch)

    simulation.log.events = events  # type: ignore[method-assign]


def _outputs(load: Workload, simulation: Simulation) -> tuple[list[Request], list[int]]:
    columns = simulation.rows.columns()
    by_number = dict(zip(columns.number.tolist(), columns.output_tokens.tolist(), strict=True))
    requests = list(load)
    return requests, [by_number[request.number] for request in requests]


def truth(simulation: Simulation, worker: Worker) -> int | None:
    """The digest of what `worker` holds, by its own word, given to a router that knows nothing."""
    router = Router(
        RouterConfig(block_size=simulation.block_size, lease_s=1e12, max_workers=8),
        clock=lambda: 1.0,
    )
    router.on_lease(simulation.fleet.lease(worker))
    router.on_snapshot(worker.engine.engine.snapshot(), asked_at=1.0)
    while router.work():
        pass
    return router.digest(worker.name)


def assert_indexes_are_true(simulation: Simulation) -> None:
    """Every router knows what every living worker holds, and nothing of the dead."""
    fleet = simulation.fleet
    dead = {worker.name for worker in fleet.lives.values()} - set(fleet.workers)
    for gateway in simulation.gateways:
        for router in gateway.routers.values():
            while router.work(1 << 20):
                pass
            held = sum(view.indexed_blocks for view in router.workers())
            assert router.stats().index.num_entries == held, "blocks of nobody"
            assert not dead & {view.worker for view in router.workers()}
        for worker in fleet.workers.values():
            router = gateway.router_for(worker)
            assert router.digest(worker.name) == truth(simulation, worker), worker.name


def digest(simulation: Simulation) -> str:
    return simulation.log.digest()
