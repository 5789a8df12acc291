"""A picker over gRPC, as a proxy that keeps to the endpoint picker protocol sees it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import zmq
import zmq.asyncio

from bench.doubles.bus import LocalBus, LocalHub
from bench.doubles.vllm_pod import KVPublisher, VllmPod
from mallee.actors.front.front import Front
from mallee.actors.front.picker.picker import Picker
from mallee.actors.front.pods.endpoints import Endpoint
from mallee.actors.front.pods.event_order import Arrival, EventOrder
from mallee.actors.front.pods.subscriber import EventPlaces, Subscriber
from mallee.protocol.errors import ConfigError
from mallee.runtime.addresses import free_port
from mallee.runtime.tasks import Tasks
from support.certificates import certificate
from support.expositions import check_exposition
from support.pickers import Proxy, model_folder, picker_config, pods, prompt, running
from support.waiting import until

pytestmark = pytest.mark.real_time  # gRPC waits in threads of its own

SERVING, NOT_SERVING = 1, 2


@asynccontextmanager
async def scene(
    num_pods: int = 3, **more: Any
) -> AsyncIterator[tuple[list[VllmPod], Picker, Proxy]]:
    async with (
        pods(num_pods) as found,
        running(picker_config([pod.address for pod in found], **more)) as picker,
        Proxy(picker.server.port) as proxy,
    ):
        yield found, picker, proxy


async def test_a_prompt_goes_where_its_beginning_is_and_others_elsewhere() -> None:
    async with scene() as (found, picker, proxy):
        first = [(await proxy.ask(prompt(n))).endpoints for n in range(3)]
        again = [(await proxy.ask(prompt(n, 400))).endpoints for n in range(3)]
        assert [a[0] for a in first] == [b[0] for b in again]
        assert len({a[0] for a in first}) == 3
        assert all(set(a) == {pod.address for pod in found} for a in first), "two to fall back on"
        await until(lambda: picker.router.stats().booked_requests == 0)


async def test_events_are_read_where_addresses_are_of_ipv6() -> None:
    taken: list[Arrival] = []
    with zmq.asyncio.Context() as context, context.socket(zmq.PUB) as publisher:
        publisher.setsockopt(zmq.IPV6, 1)
        port = publisher.bind_to_random_port("tcp://[::1]")
        places = EventPlaces(live=f"tcp://[::1]:{port}", replay=None, topic="")
        order = EventOrder(can_replay=False)
        task = asyncio.create_task(Subscriber(context, places, order, taken.append).run())
        async with asyncio.timeout(10):
            while not taken:
                await publisher.send_multipart([b"", bytes(8), b"batch"])
                await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert taken[0].batches == (b"batch",)


async def test_only_the_subset_is_picked_from() -> None:
    """X21, part: without a ready endpoint in it the answer is 503."""
    async with scene() as (found, picker, proxy):
        allowed = [found[1].address, found[2].address]
        for number in range(6):
            answer = await proxy.ask(prompt(number), subset=allowed)
            assert set(answer.endpoints) == set(allowed)
        warm = (await proxy.ask(prompt(9))).endpoints[0]
        others = [pod.address for pod in found if pod.address != warm]
        assert (await proxy.ask(prompt(9), subset=others)).endpoints[0] in others
        for nothing in ([], ["10.9.9.9:1"]):
            answer = await proxy.ask(prompt(0), subset=nothing)
            assert answer.status == 503
            assert json.loads(answer.body)["error"]["code"] == "no_endpoint"
        assert (await proxy.ask(prompt(0))).status == 0
        assert picker.router.stats().refused == 2


async def test_without_any_pod_requests_are_503_and_it_is_ready_still() -> None:
    """Pods that don't answer are no reason to take the picker away."""
    config = picker_config(["127.0.0.1:1"])
    async with running(config, 0) as picker, Proxy(picker.server.port) as proxy:
        assert (await proxy.ask(prompt(0))).status == 503
        assert await proxy.health("readiness") == SERVING


async def test_a_request_that_may_be_dropped_is_429_while_all_are_busy() -> None:
    objectives = {"batch": -1, "chat": 5}
    async with scene(2, max_rows=1, objectives=objectives) as (_, _, proxy):
        batch = {"headers": {"x-gateway-inference-objective": "batch"}}
        chat = {"headers": {"x-gateway-inference-objective": "chat"}}
        open_ones = [proxy.stream() for _ in range(2)]
        for number, exchange in enumerate(open_ones):
            assert (await exchange.request(prompt(number), **batch)).status == 0
        refused = await proxy.ask(prompt(5), **batch)
        assert refused.status == 429
        assert json.loads(refused.body)["error"]["code"] == "saturated"
        assert (await proxy.ask(prompt(6), **chat)).status == 0
        for exchange in open_ones:
            await exchange.respond(b"{}")
            await exchange.end()
        assert (await proxy.ask(prompt(5), **batch)).status == 0


async def test_a_booking_follows_the_endpoint_that_served() -> None:
    async with scene(2) as (_, picker, proxy):
        exchange = proxy.stream()
        answer = await exchange.request(prompt(0))
        first, second = answer.endpoints
        rows = {view.worker: view.rows for view in picker.router.workers()}
        assert rows == {first: 1, second: 0}
        await exchange.respond(b"x", b"y", served=second)
        assert picker.router.stats().booked_requests == 0  # the answer is whole
        await exchange.end()
        exchange = proxy.stream()
        answer = await exchange.request(prompt(1))
        first, second = answer.endpoints
        await exchange.respond(served=second)
        rows = {view.worker: view.rows for view in picker.router.workers()}
        assert rows == {first: 0, second: 1}
        exchange.call.cancel()
        await until(lambda: picker.router.stats().booked_requests == 0)


async def test_bodies_that_are_no_prompts_go_somewhere_too() -> None:
    """A pod knows better what it takes, and refuses in its own words."""
    async with scene(2) as (found, _, proxy):
        addresses = {pod.address for pod in found}
        for path, body in (
            ("/v1/models", None),
            ("/v1/completions", b"\xff no json"),
            ("/v1/completions", b"[1, 2]"),
            ("/v1/chat/completions", b'{"messages": 7}'),
            ("/v1/completions", json.dumps({"prompt": list(range(500_000))}).encode()),
        ):
            exchange = proxy.stream()
            answer = await exchange.request(body, path=path)
            assert set(answer.endpoints) == addresses, (path, body)
            await exchange.end()


async def test_health_tells_liveness_and_readiness_apart() -> None:
    """X21, part."""
    async with pods(1) as found:
        picker = Picker(picker_config([found[0].address]))
        async with picker, Proxy(picker.server.port) as proxy:
            assert await proxy.health("liveness") == SERVING
            await until(lambda: picker.is_ready)
            for name in ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
                assert await proxy.health(name) == SERVING
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await proxy.health("another")
            assert error.value.code() is grpc.StatusCode.NOT_FOUND
            picker.server._is_draining = True
            assert await proxy.health("readiness") == NOT_SERVING
            assert await proxy.health("liveness") == SERVING


async def test_requests_come_by_tls_and_health_checks_of_kubernetes_without(tmp_path: Path) -> None:
    """At the port of the health checks there is nothing else."""
    made = certificate(tmp_path, "picker")
    more = {"tls_cert": made.cert, "tls_key": made.key, "health_listen": "127.0.0.1:0"}
    async with pods(1) as found, running(picker_config([found[0].address], **more)) as picker:
        server = picker.server
        async with Proxy(server.port, Path(made.ca)) as proxy:
            assert (await proxy.ask(prompt(0))).endpoints == (found[0].address,)
            assert await proxy.health("readiness") == SERVING
        async with Proxy(server.health_port) as plain:
            assert await plain.health("liveness") == SERVING
            assert await plain.health("readiness") == SERVING
            assert await plain.stream().call.code() is grpc.StatusCode.UNIMPLEMENTED
        async with Proxy(server.port) as plain:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await plain.health("liveness")
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_fault_of_ours_ends_the_stream_and_makes_no_answer_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then the proxy's failure mode decides. The next request is served; no conversation is refused."""
    async with scene(1) as (_, picker, proxy):

        def fail(*_: object, **__: object) -> None:
            raise RuntimeError("a bug")

        with monkeypatch.context() as broken:
            broken.setattr(picker.placement, "pick", fail)
            exchange = proxy.stream()
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await exchange.request(prompt(0))
            assert error.value.code() is grpc.StatusCode.INTERNAL
            assert "bug" not in str(error.value.details())
        assert (await proxy.ask(prompt(0))).status == 0
        assert picker.router.stats().booked_requests == 0
        exchange = proxy.stream()
        await exchange.call.write(b"\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await exchange.receive()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_streams_are_bounded() -> None:
    async with scene(1, max_streams=2) as (_, _, proxy):
        open_ones = [proxy.stream() for _ in range(2)]
        for exchange in open_ones:
            await exchange.request(prompt(0))
        assert await proxy.stream().call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for exchange in open_ones:
            await exchange.end()


async def test_a_decision_that_takes_too_long_is_left_to_the_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with scene(1, decide_s=0.05) as (_, picker, proxy):
        slow = asyncio.Event()

        async def wait(*_: object) -> None:
            await slow.wait()

        monkeypatch.setattr("mallee.actors.front.picker.server.asyncio.to_thread", wait)
        exchange = proxy.stream()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await exchange.request(prompt(0, 5000))
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert picker.failure is None


async def test_pods_join_and_leave_while_bodies_are_read() -> None:
    """Threads read what the pods serve as it was: the loop puts another value in its place."""
    raw = json.dumps(prompt(0, 20_000)).encode()
    async with scene(1) as (found, picker, proxy):
        pods, before = picker.pods, picker.pods.served
        reading = [
            asyncio.create_task(asyncio.to_thread(picker.read, {":path": "/v1/completions"}, raw))
            for _ in range(8)
        ]
        others = [Endpoint(f"127.0.0.1:{port}") for port in range(1, 200)]
        while not all(task.done() for task in reading):
            for num in (len(others), 0):
                pods.update([Endpoint(found[0].address), *others[:num]])
                await asyncio.sleep(0)
        assert {len(task.result().hashes) for task in reading} == {20_000 // 16}
        assert before.num_pods == 1
        assert (await proxy.ask(prompt(0, 5000))).status == 0


async def test_a_pod_that_falls_silent_gets_nothing_until_it_speaks_again() -> None:
    async with pods(2) as found, VllmPod() as third:
        config, now = picker_config([*(p.address for p in found), third.address]), [100.0]
        started = running(config, clock=lambda: now[0])
        async with started as picker, Proxy(picker.server.port) as proxy:
            silent, port = third.address, third.port
            await third.__aexit__()
            now[0] += (
                2 * picker.router.config.lease_s
            )  # no pod was heard for so long, but two speak
            live = {pod.address for pod in found}
            await until(lambda: {view.worker for view in picker.router.workers()} == live)
            for number in range(4):
                assert silent not in (await proxy.ask(prompt(number))).endpoints
            async with VllmPod(port=port):
                await until(lambda: len(picker.router.workers()) == 3)


@pytest.mark.parametrize(
    ("has_replay", "is_positional", "tells_sources"),
    [(False, False, False), (True, False, True), (False, True, False), (True, True, False)],
)
async def test_caches_are_known_by_their_events(
    tmp_path: Path, has_replay: bool, is_positional: bool, tells_sources: bool
) -> None:
    """Also what a pod had stored before the picker came, where it repeats it; what it evicts is forgotten.

    A pod that tells where it publishes needs no ports in the settings.
    """
    publisher = KVPublisher(is_positional=is_positional)
    model = model_folder(tmp_path)
    ports = {} if tells_sources else {"events_port": publisher.port}
    if has_replay and not tells_sources:
        ports["replay_port"] = publisher.replay_port
    pod = VllmPod(publisher=publisher, num_blocks=32, tells_sources=tells_sources)
    async with pod as warm:
        early = prompt(0)["prompt"]
        await publisher.publish(warm.cache.take(early)[1])
        async with running(picker_config([warm.address], model=model, **ports)) as picker:
            reader, router = picker._reader, picker.router

            def overlap(number: int) -> int:
                body = json.dumps(prompt(number)).encode()
                found = reader.read({":path": "/v1/completions"}, body, adapters=())
                offers = router._placer.match(found.hashes)
                slot = router._placer.slot_of(router.workers()[0].worker)
                return int(offers.held[0, slot])

            async def store(number: int) -> None:
                await publisher.publish(warm.cache.take(prompt(number)["prompt"])[1])

            if has_replay:
                await until(lambda: overlap(0) == 12)
            else:
                (followed,) = picker.pods._pods.values()
                # ZeroMQ takes a while to subscribe.
                while not followed.contents.orders or not followed.contents.orders[0].has_begun:
                    await publisher.publish([])
                    await asyncio.sleep(0.01)
                assert overlap(0) == 0
            await store(1)
            await until(lambda: overlap(1) == 12)
            await store(2)
            await store(3)
            await until(lambda: overlap(3) == 12)
            assert overlap(0) == 0, "32 blocks: the first prompt had to go"
            assert router.worker(router.workers()[0].worker).indexed_blocks <= 32  # type: ignore[union-attr]
            if has_replay:
                await publisher.publish(warm.cache.take(prompt(4)["prompt"])[1], is_lost=True)
                await store(5)
                await until(lambda: overlap(5) == 12)
                assert overlap(4) == 12, "the replay brought what was lost"
                assert picker.pods.num_gaps >= 1
            (view,) = picker.pods.views()
            state, reason = view.knowledge
            assert (state == "exact") == (reason == "") == has_replay
            assert view.num_blocks_known == 32


async def test_a_picker_whose_task_broke_is_not_ready_and_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pods(1) as found:
        picker = Picker(picker_config([found[0].address]))
        async with picker:
            await until(lambda: picker.is_ready)
            made: Tasks = picker.pods.tasks
            next(iter(made._tasks)).cancel()
            await until(lambda: picker.failure is not None)
            assert not picker.is_ready
            with pytest.raises(Exception, match="task of the picker failed"):
                await picker.wait()


async def test_a_picker_exposes_what_it_declares_and_nothing_else() -> None:
    """At the address that is set; counts follow what happens."""
    port = free_port()
    async with scene(2, metrics_listen=f"127.0.0.1:{port}") as (_, picker, proxy):

        def shown(name: str) -> float | None:
            return picker.counts.registry.get_sample_value(f"mallee_picker_{name}")

        await until(lambda: shown("ready_endpoints") == 2)
        for _ in range(2):
            await proxy.ask(prompt(1))
        await proxy.ask(prompt(1), subset=[])
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
        assert not check_exposition(text, "picker")
        lines = text.splitlines()
        assert 'mallee_picker_decisions_total{outcome="picked"} 2.0' in lines
        assert 'mallee_picker_decisions_total{outcome="503"} 1.0' in lines
        assert "mallee_picker_overlap_blocks_total 12.0" in lines
        assert "mallee_picker_ready_endpoints 2.0" in lines


async def test_an_address_that_is_taken_is_named() -> None:
    async with scene(1) as (found, picker, _):
        taken = f"127.0.0.1:{picker.server.port}"
        for name in ("metrics_listen", "listen", "health_listen"):
            config = picker_config([found[0].address]).model_copy(update={name: taken})
            failed = Picker(config)
            with pytest.raises(ConfigError, match=f"{taken}"):
                await failed.__aenter__()
            assert not failed.backends._idle
            assert not failed.tasks._tasks


async def test_pickers_count_each_others_requests_and_agree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """X21: active and active: what one sends is load and prefix to the other, and ends with it."""
    hub = LocalHub()
    monkeypatch.setattr(f"{Front.__module__}.NatsBus", lambda *_, **__: LocalBus(hub))
    async with pods(2) as found:
        url = "nats://127.0.0.1:1"  # nothing is there, and nothing is asked
        config = picker_config([pod.address for pod in found], nats_url=url, fleet="test")
        async with (
            running(config) as one,
            running(config) as two,
            Proxy(one.server.port) as first,
            Proxy(two.server.port) as second,
        ):
            exchange = first.stream()
            chosen = (await exchange.request(prompt(0))).endpoints[0]
            await until(lambda: two.router.stats().remote_requests == 1)
            (rows,) = [v.rows for v in two.router.workers() if v.worker == chosen]
            assert rows == 1
            assert (await second.ask(prompt(7))).endpoints[0] != chosen, "the other is idle"
            await exchange.respond(b"{}")
            await exchange.end()
            await until(lambda: two.router.stats().remote_requests == 0)
            # The prompt is predicted there, too, though its events come from nowhere.
            assert (await second.ask(prompt(0, 400))).endpoints[0] == chosen
