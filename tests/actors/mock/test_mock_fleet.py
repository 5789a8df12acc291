"""Mocked engines live, behind a real gateway: K21 (part), K28 (live).

Workers join, drain and crash in the middle of a run; every request is answered, every index forgets the
dead.
"""

import asyncio
import time
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mallee.actors.hosting.meters import HostMetrics
from mallee.actors.mock.fleet import replica_names, timing_of
from mallee.actors.mock.words import words_of
from mallee.api.text.tokenizer import Tokenizer
from mallee.gateway.requests.deltas import Delta
from mallee.gateway.requests.request import RunningRequest
from mallee.mocker.timing import Fixed, Timing
from mallee.protocol.codec import encode
from mallee.protocol.errors import ConfigError, WorkerLost
from mallee.protocol.events import decode_leases
from mallee.protocol.hashing import Tokens, as_tokens
from mallee.protocol.messages import Generate, Limits
from mallee.protocol.parcels import Parcel
from mallee.protocol.subjects import Subjects
from mallee.router.config import RouterConfig
from mallee.router.dispatch.jobs import GenerateJob
from mallee.router.router import Router
from mallee.runtime.transport.link import HostLink
from support.expositions import check_exposition
from support.mock_scene import MockScene, make_folder, mock_config, mocked
from support.reading import Reader
from support.waiting import elapse, until


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("tiny"))


def prompt(number: int, length: int = 70) -> Tokens:
    return as_tokens([(number * 31 + i * (number % 7 + 1)) % 300 + 1 for i in range(length)])


def generate(number: int, max_tokens: int = 8, length: int = 70) -> GenerateJob:
    return GenerateJob(prompt(number, length), Limits(max_tokens, ignore_eos=True))


async def collect(stream: RunningRequest) -> list[Delta]:
    return [delta async for delta in stream]


async def ask(scene: MockScene, job: GenerateJob) -> tuple[str, list[Delta]]:
    stream = await scene.gateway.requests.start(job)
    return str(stream.worker), await collect(stream)


def num_tokens(deltas: list[Delta]) -> int:
    return sum(len(delta.tokens) for delta in deltas)


def tokens_of(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.tokens]


def set_timing(monkeypatch: pytest.MonkeyPatch, timing: Timing) -> None:
    monkeypatch.setattr("mallee.actors.mock.fleet.timing_of", lambda config: timing)


async def test_workers_are_asked_for_their_use_and_leases_lack_it(folder: Path) -> None:
    """D36, part: a process that does not answer leaves a gap, and no error."""
    async with mocked(mock_config(folder, mock__engines_per_worker=2)) as scene:
        leases: list[bytes] = []
        await scene.gateway_bus.subscribe(Subjects.of(scene.config.fleet).lease(), leases.append)
        worker, _ = await ask(scene, generate(1))
        await until(lambda: any(each.load for raw in leases for each in decode_leases(raw)))
        loads = [each.load for raw in leases for each in decode_leases(raw)]
        assert all(load is None or load.use is None for load in loads)
        uses = {
            each["worker"]: each["use"] for each in (await scene.gateway.operator.workers())["data"]
        }
        assert uses.keys() == {"w0", "w1"}
        assert {name for name, use in uses.items() if use["prefill_tokens"] == 70} == {worker}
        await scene.bus.close()
        silent = (await scene.gateway.operator.workers())["data"]
        assert [(each["use"], each["tiers"]) for each in silent] == [(None, None)] * 2


async def test_a_scrape_of_many_workers_lets_others_have_their_turn(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K21, part: after each family, where it has taken its slice of the event loop."""
    monkeypatch.setattr("mallee.actors.hosting.meters.SLICE_S", 0.0)
    async with mocked(mock_config(folder, mock__engines_per_worker=3)) as scene:
        metrics, turns = HostMetrics(scene.fleet.host), 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        text = (await metrics.render()).decode()
        counting.cancel()
        assert turns >= text.count("# TYPE")
        assert "mallee_worker_live_blocks" not in check_exposition(text, "worker")


async def test_every_engine_answers_and_all_events_arrive(folder: Path) -> None:
    """K21, part: the router's digest of each engine is that of what the engine says it holds."""
    async with mocked(
        mock_config(folder, mock__engines_per_worker=20, routing__policy="round_robin")
    ) as scene:
        answers = await asyncio.gather(*(ask(scene, generate(i)) for i in range(60)))
        assert {worker for worker, _ in answers} == {f"w{i}" for i in range(20)}
        assert {num_tokens(deltas) for _, deltas in answers} == {8}
        await until(lambda: same_digests(scene))
        assert scene.router.stats().gaps == 0
        assert scene.fleet.host.stats().gateways == 1
        scene.fleet.check()


def same_digests(scene: MockScene) -> bool:
    """Whether a router that is told snapshots alone comes to the same sums."""
    truth = Router(RouterConfig(block_size=scene.config.engine.block_size), clock=lambda: 0.0)
    for name, worker in scene.fleet.host.workers.items():
        truth.on_lease(worker.lease("here", "m0"))
        snapshot = worker.runner._mocked.engine.snapshot()  # type: ignore[attr-defined]
        truth.on_snapshot(snapshot, asked_at=0.0)
        while truth.work():
            pass
        if truth.digest(name) != scene.router.digest(name) or not len(snapshot.hashes):
            return False
    return True


async def test_answers_read_like_words(folder: Path) -> None:
    async with mocked(mock_config(folder)) as scene:
        _, deltas = await ask(scene, generate(1, 40))
        tokenizer = Tokenizer.load(folder)
        words = words_of(tokenizer)
        tokens = [token for delta in deltas for token in delta.tokens]
        assert set(tokens) <= set(words)
        assert len(set(tokens)) > 3
        assert " tree" in {tokenizer.decode([word]) for word in words}
        assert not set(words) & set(scene.plan.spec.eos_token_ids)
        _, again = await ask(scene, generate(1, 40))
        assert [token for delta in again for token in delta.tokens] == tokens


async def test_a_loop_that_is_behind_tells_several_steps_at_once_and_keeps_the_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_timing(monkeypatch, Timing(Fixed(0.0, 0.005)))
    monkeypatch.setattr("mallee.actors.mock.pacer.Pacer.pace_s", 0.05)
    async with mocked(mock_config(folder)) as scene:
        begin = time.monotonic()
        stream = await scene.gateway.requests.start(generate(1, 61))
        deltas, times = [], []
        async for delta in stream:
            deltas.append(delta)
            times.append(time.monotonic() - begin)
        assert num_tokens(deltas) == 61
        assert len(deltas) <= 12  # a stride ends where a block does, too
        assert times[-1] == pytest.approx(0.3)
        stream = await scene.gateway.requests.start(generate(2, 200))
        await elapse(0.02)
        await stream.aclose()  # cuts the stride under way
        await until(lambda: scene.fleet.host.stats().open_requests == 0)
        scene.fleet.check()


async def test_requests_that_outlast_the_drain_go_on_elsewhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K28, X4, part: token for token, and without blame for a worker's death."""
    set_timing(monkeypatch, Timing(Fixed(0.0, 0.02)))
    config = mock_config(
        folder, mock__engines_per_worker=2, routing__policy="round_robin", drain_s=0.2
    )
    async with mocked(config) as scene:
        undisturbed = [tokens_of((await ask(scene, generate(i, 40)))[1]) for i in range(4)]
        streams = [await scene.gateway.requests.start(generate(i, 40)) for i in range(4)]
        running = [asyncio.ensure_future(collect(stream)) for stream in streams]
        await elapse(0.05)
        await scene.admin("drain", "w1")
        await until(lambda: scene.names() == {"w0"})
        ended = await asyncio.gather(*running)
        assert [tokens_of(deltas) for deltas in ended] == undisturbed
        assert {deltas[-1].worker for deltas in ended if deltas[-1].worker} == {"w0"}
        assert scene.gateway.shell.dispatcher.num_moved
        scene.gateway.check()


async def test_leases_that_overtake_the_last_frames_of_a_worker_end_no_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K28, part: leases take the bus, frames a stream; the worker is long gone when its last ones come."""
    whole = HostLink.on_reports

    def on_reports(link: HostLink, raw: bytes) -> None:
        asyncio.get_running_loop().call_later(0.05, whole, link, raw)

    monkeypatch.setattr(HostLink, "on_reports", on_reports)
    set_timing(monkeypatch, Timing(Fixed(0.0, 0.01)))
    config = mock_config(folder, mock__engines_per_worker=2, routing__policy="round_robin")
    async with mocked(config) as scene:
        streams = [await scene.gateway.requests.start(generate(i, 12)) for i in range(2)]
        running = [asyncio.ensure_future(collect(stream)) for stream in streams]
        await until(lambda: scene.fleet.host.stats().open_requests == 2)
        await scene.admin("drain", "w1")
        await until(lambda: scene.names() == {"w0"})
        assert (await ask(scene, generate(9, 1)))[0] == "w0"
        assert not all(task.done() for task in running)
        for ended in await asyncio.gather(*running):
            assert ended[-1].error is None
            assert num_tokens(ended) == 12
        await until(lambda: list(scene.gateway.shell.links._links) == ["w0"])


async def test_engines_are_there_after_their_start_up_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_timing(monkeypatch, Timing(Fixed(0.0, 0.0), startup_s=0.1))
    begin = time.monotonic()
    async with mocked(mock_config(folder)) as scene:
        assert 0.0999 < time.monotonic() - begin < 0.12
        begin = time.monotonic()
        assert (await scene.admin("join", "w9"))["starting"] == ["w9"]
        await until(lambda: "w9" in scene.names())
        assert 0.0999 < time.monotonic() - begin < 0.12


async def test_what_is_no_command_of_the_fleet_is_answered_with_why(folder: Path) -> None:
    async with mocked(mock_config(folder)) as scene:
        assert "no worker w77" in (await scene.admin("crash", "w77"))["error"]
        assert "there already" in (await scene.admin("join", "w1"))["error"]
        assert "dance" in (await scene.admin("dance"))["error"]
        listed = await scene.admin("list")
        assert set(listed["workers"]) == {"w0", "w1", "w2", "w3"}
        for raw in (b"[", b"[1]", b"7", b"{}", b"\xff"):
            answer = await scene.gateway_bus.request("mallee.test.host.m0", raw, 5.0)
            assert b"not a request to a host" in answer
        for name in ("", "a.b", "a b", "*"):
            assert "worker" in (await scene.admin("join", name))["error"]


async def test_a_reader_that_falls_behind_leaves_the_engines_at_work(folder: Path) -> None:
    """Its requests are freed in the very turn that has news of them."""
    async with mocked(mock_config(folder, routing__policy="round_robin")) as scene:
        host = scene.fleet.host
        others = [asyncio.ensure_future(ask(scene, generate(i, 1500))) for i in range(8)]
        await until(lambda: host.stats().open_requests == 8)
        host._streams._max_waiting_nbytes = 20_000
        async with aclosing(Reader(host, "lazy")) as frames:
            frames.is_slow = True
            parcels = [
                Parcel(
                    *(name, worker.incarnation),
                    tuple(
                        Generate(f"{name}.{i}", prompt(i).tobytes(), Limits(900)) for i in range(3)
                    ),
                )
                for name, worker in host.workers.items()
            ]
            await frames.submit(encode(parcels))
            await until(lambda: host.stats().slow_streams == 1)
        answers = await asyncio.gather(*others)
        assert [num_tokens(deltas) for _, deltas in answers] == [1500] * 8
        await until(lambda: host.stats().open_requests == 0)
        assert not any(worker.failure for worker in host.workers.values())
        for worker in host.workers.values():
            worker.runner._mocked.engine.check()  # type: ignore[attr-defined]
        scene.fleet.check()


async def test_who_waits_for_a_snapshot_of_a_worker_that_crashes_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_timing(monkeypatch, Timing(Fixed(60.0, 60.0)))
    async with mocked(mock_config(folder, mock__engines_per_worker=1)) as scene:
        stream = await scene.gateway.requests.start(generate(1))
        host = scene.fleet.host
        await until(lambda: host.stats().open_requests == 1)
        (worker,) = host.workers.values()
        asked = worker.runner.snapshot()
        await scene.admin("crash", "w0")
        with pytest.raises(WorkerLost):
            await asyncio.wait_for(asked, 2.0)
        await stream.aclose()  # it waits for a worker that comes
        assert host.stats().open_requests == 0


async def test_an_engine_that_breaks_while_its_load_is_asked_leaves_the_others_their_leases(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with mocked(mock_config(folder, mock__engines_per_worker=2)) as scene:
        runner: Any = scene.fleet.host.workers["w0"].runner  # type: ignore[index]
        runner._mocked = SimpleNamespace(
            is_busy=False, engine=SimpleNamespace(has_work=True, next_seq=0)
        )
        await until(lambda: scene.names() == {"w1"})
        before = scene.bus.num_published
        await until(lambda: scene.bus.num_published > before + 2)
    assert any("SimpleNamespace" in str(record.exc_info) for record in caplog.records)


async def test_what_an_engine_has_no_room_for_comes_back_from_host_memory(folder: Path) -> None:
    """K15, part, K21, part: live too; and no lease says that a block is here only if all before it are."""
    config = mock_config(
        folder, mock__engines_per_worker=1, engine__kv_tokens=256, mock__host_kv_tokens=4096
    )
    async with mocked(config) as scene:
        for i in (1, 2, 3, 4, 1):
            await ask(scene, generate(i, length=100))
        (worker,) = scene.fleet.host.workers.values()
        assert not worker.lease("here", "m0").is_prefix_closed
        tiers = worker.runner._mocked.engine.stats().tiers  # type: ignore[attr-defined]
        assert tiers.num_fetched_host == 6


def test_the_timing_is_as_the_settings_say(folder: Path) -> None:
    config = mock_config(folder, mock__speedup=2.0, mock__startup_s=1.5, mock__jitter=0.1)
    timing = timing_of(config)
    assert (timing.speedup, timing.startup_s, timing.jitter) == (2.0, 1.5, 0.1)
    assert timing_of(mock_config(folder)).step_s([(100, 0)], 4, 1e5) == 0.0
    with pytest.raises(ConfigError, match="no-such-timing"):
        timing_of(mock_config(folder, mock__timing="no-such-timing", mock__speedup=1.0))


def test_replicas_with_old_and_new_numbers_of_engines_share_no_name(folder: Path) -> None:
    """K28, part: a rollout may change `mock.engines_per_worker`; two living replicas differ in number."""
    configs = [mock_config(folder, mock__engines_per_worker=n) for n in (1, 2, 3, 12)]
    for number in range(12):
        mine = {name for config in configs for name in replica_names(config, number)}
        others = (n for n in range(12) if n != number)
        beside = {name for n in others for config in configs for name in replica_names(config, n)}
        assert mine.isdisjoint(beside)
    assert replica_names(configs[0], 3) == ["w3"]
    assert len(set(replica_names(configs[-1], 3))) == 12


async def test_a_host_needs_memory_for_what_runs_and_not_for_answers_capsules(folder: Path) -> None:
    """Its demand is the sum over its engines, for the autoscaler."""
    config = mock_config(folder, mock__engines_per_worker=2, mock__speedup=1.0)
    async with mocked(config) as scene:
        demand = scene.fleet.host.demand
        await until(lambda: len(scene.names()) == 2)
        assert (demand().max_rows, demand().num_blocks) == (2 * 256, 2 * 256)
        streams = [await scene.gateway.requests.start(generate(key, 500)) for key in (1, 2)]
        await until(lambda: demand().rows == 2 and demand().needed_blocks > 0)
        for stream in streams:
            await stream.aclose()
        await ask(scene, generate(3, 20))
        await until(lambda: demand().rows == 0)
        loads = [await worker.runner.load() for worker in scene.fleet.host.workers.values()]
        assert sum(load.active_blocks for load in loads) > 0
        await until(lambda: demand().needed_blocks == 0)
