"""K13, K16, K21: a small trace, live behind a real gateway and in virtual time: event for event the same.

Live: gateway, transport, host, paced engines and an in-memory bus, on the wall clock. Virtual: a replay.
One request at a time, the next when the events of the last have arrived, so that routing sees the same.
"""

import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.replay.fleet.workers import Worker
from mallee.mocker.replay.simulation import Simulation
from mallee.mocker.timing import ClosedForm, Plane, Timing
from mallee.protocol.events import EventBatch
from mallee.protocol.hashing import as_tokens
from mallee.protocol.messages import Limits
from mallee.router.dispatch.jobs import GenerateJob
from mallee.traces.workload import Request, Workload
from support.conforming import flat, renamed
from support.mock_scene import make_folder, mock_config, mocked
from support.waiting import until

SIZE, ID_TOKENS, BLOCKS = 16, 32, 16
TIMING = Timing(ClosedForm(2e-3, 2e-5, 0.0, 0.0, (Plane(1e-3, 1e-5, 0.0),)))
TYPICAL_BOUND_S = 0.5
"""Half of all events are published live no later than so after the virtual ones, on a busy machine."""


class Told(NamedTuple):
    """Events that one worker published, with their times after the begin of the request under way."""

    after_s: list[float]
    events: list[Any]


def trace() -> list[Request]:
    """Prompts of up to three ids with shared beginnings; more than three workers can keep."""
    rng = random.Random(3)
    requests = []
    for number in range(30):
        first = rng.randrange(3)
        ids = [first, 3 + first, 6 + first][: rng.randint(1, 3)]
        tokens = len(ids) * ID_TOKENS - rng.choice([0, 5, 21])
        requests.append(Request(number, 0.0, tuple(ids), tokens, rng.randint(2, 40)))
    return requests


def virtual() -> dict[str, Told]:
    requests = trace()
    load = Workload("small", ID_TOKENS, lambda: iter(requests), "mooncake", has_forks=True)
    config = ReplayConfig(
        engines=3,
        kv_tokens=BLOCKS * SIZE,
        block_size=SIZE,
        timing=TIMING,
        concurrency=1,
        keeps_order=False,
    )
    simulation = Simulation(load, config)
    found: dict[str, Told] = {}
    begun = [0.0]
    publish, begin = simulation._publish, simulation._begin

    def published(worker: Worker, events: EventBatch) -> None:
        told = found.setdefault(str(worker.name), Told([], []))
        for event in flat(events.events):
            told.after_s.append(simulation.clock.now - begun[0])
            told.events.append(event)
        publish(worker, events)

    def begin_one(request: Request) -> None:
        begun[0] = simulation.clock.now
        begin(request)

    simulation._publish = published  # type: ignore[method-assign]
    simulation.clients._begin = begin_one
    simulation.run()
    simulation.check()
    return found


async def live(folder: Path) -> dict[str, Told]:
    config = mock_config(
        folder,
        mock__engines_per_worker=3,
        engine__kv_tokens=BLOCKS * SIZE,
        engine__block_size=SIZE,
        engine__max_model_len=512,
        lease_period_s=30.0,  # a load that is told while a request runs would count after it
    )
    async with mocked(config) as scene:
        await until(lambda: len(scene.names()) == 3)
        found: dict[str, Told] = {}
        begun = [0.0]
        arrived: dict[str, int] = {}
        take = scene.router.on_events

        def taken(batch: EventBatch) -> bool:
            arrived[batch.worker] = batch.next_seq
            told = found.setdefault(batch.worker, Told([], []))
            for event in flat(batch.events):
                told.after_s.append(time.monotonic() - begun[0])
                told.events.append(event)
            is_gap: bool = take(batch)
            return is_gap

        def is_all_here() -> bool:
            workers = scene.fleet.host.workers.items()
            return all(w.runner.next_seq == arrived.get(name, 0) for name, w in workers)

        scene.router.on_events = taken  # type: ignore[method-assign]
        for request in trace():
            ids = [i * ID_TOKENS + k for i in request.ids for k in range(ID_TOKENS)]
            tokens = as_tokens(ids[: request.input_tokens])
            begun[0] = time.monotonic()
            stream = await scene.gateway.start(
                GenerateJob(tokens, Limits(request.output_tokens, ignore_eos=True))
            )
            async for _ in stream:
                pass
            await until(is_all_here)
        assert scene.router.stats().gaps == 0
        return found


def named(told: Told) -> list[Any]:
    """Events by the order in which their blocks and capsules first appear."""
    capsules: dict[str, int] = {}
    found: list[Any] = []
    for _, kind, what in renamed([(0.0, *event) for event in told.events]):
        if kind == "CapsuleStored":
            capsule, boundary, hashes = what
            found.append((kind, capsules.setdefault(capsule, len(capsules)), boundary, hashes))
        elif kind == "CapsuleReleased":
            found.append((kind, capsules[what]))
        else:
            found.append((kind, what))
    return found


@pytest.mark.process
async def test_a_live_fleet_publishes_what_a_replay_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K16, K21, part: the same requests on the same workers, the same events in the same order on each."""
    monkeypatch.setattr("mallee.actors.mock.fleet.timing_of", lambda config: TIMING)
    expected = virtual()
    found = await live(make_folder(tmp_path))
    assert found.keys() == expected.keys() == {"w0", "w1", "w2"}
    late: list[float] = []
    for name, told in found.items():
        assert named(told) == named(expected[name])
        assert any(event[0] == "Removed0" for event in told.events), "nothing was evicted"
        late += [a - b for a, b in zip(told.after_s, expected[name].after_s, strict=True)]
    assert min(late) > -1e-6, "told before it was over"
    assert sorted(late)[len(late) // 2] < TYPICAL_BOUND_S
