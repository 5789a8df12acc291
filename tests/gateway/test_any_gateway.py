"""Capsules at two gateways, where the workers' events come late: an id holds at any gateway at once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any

import pytest

from bench.doubles.bus import LocalBus, LocalHub
from mallee.gateway.capsules import texts
from mallee.gateway.gateway import Gateway
from mallee.gateway.peers import Peers
from mallee.mocker.passes import mock_spec
from mallee.protocol.errors import (
    CapsuleAbandoned,
    CapsulesFull,
    LookupIncomplete,
    MalleeError,
    NotFound,
    PeerSilent,
    Saturated,
    Unavailable,
    UnknownCapsule,
)
from mallee.protocol.hashing import as_tokens
from mallee.protocol.ids import COMMON, CapsuleId, Scope, WorkerId, capsule_id
from mallee.protocol.messages import Delete, Limits
from mallee.protocol.subjects import BusRole
from mallee.router.config import RouterConfig
from mallee.router.dispatch.jobs import ForkJob, GenerateJob, PrefillJob
from support.live_fleet import LiveFleet, collect, kill_gateway, lose, running
from support.plain_ids import scopes_at
from support.waiting import elapse, until

SPEC = mock_spec(max_model_len=100_000)
PROMPT = as_tokens([i % 61 for i in range(40)])
SUFFIX = (as_tokens([3]),)
NEWS_S = 0.2  # the longest way of a worker's event


class LateBus(LocalBus):
    """Delivers in order, after `least` to `most` seconds."""

    def __init__(self, hub: LocalHub, random: Random, least: float, most: float) -> None:
        super().__init__(hub)
        self._random, self._least, self._most = random, least, most
        self._last = 0.0

    def publish(self, subject: str, raw: bytes) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + self._random.uniform(self._least, self._most)
        self._last = max(self._last + 1e-6, due)  # a loop calls those of one time in any order
        loop.call_at(self._last, super().publish, subject, raw)


@asynccontextmanager
async def fleet(gateways: int = 2, **options: Any) -> AsyncIterator[LiveFleet]:
    """Gateways that know each other, and two workers whose events are slow."""
    random = Random(7)

    def bus(role: BusRole) -> LocalBus:
        least, most = (0.05, NEWS_S) if role == "worker" else (0.0005, 0.02)
        return LateBus(made.hub, random, least, most)

    made = LiveFleet(
        *(SPEC, RouterConfig(block_size=16)),
        num_blocks=4096,
        syncs=True,
        make_bus=bus,
        ids=scopes_at,
        **options,
    )
    async with running(made, workers=2, gateways=gateways):
        await until(lambda: all(len(each.peers.others) == gateways - 1 for each in made.gateways))
        yield made
        for gateway in made.gateways:
            gateway.check()
            assert gateway.operator.failure is None


class Asked:
    """Counts the questions of a gateway to others, by kind."""

    def __init__(self, gateway: Gateway) -> None:
        self.kinds: list[str] = []
        self._ask = gateway.peers.ask
        gateway.peers.ask = self.ask  # type: ignore[method-assign]

    async def ask(self, gateway: str, kind: str, *given: Any, **more: Any) -> bytes | None:
        self.kinds.append(kind)
        return await self._ask(gateway, kind, *given, **more)


async def close(f: LiveFleet, gateway: Gateway) -> None:
    """End a gateway in order, and have the others know."""
    number = f.gateways.index(gateway)
    del f.gateways[number], f.routers[number]
    await gateway.close()
    await gateway.context.bus.close()


async def make(gateway: Gateway, ttl_s: float = 300.0) -> CapsuleId:
    ((_, last),) = (
        await collect(await gateway.requests.start(PrefillJob(PROMPT, ttl_s=ttl_s)))
    ).values()
    assert last.capsule is not None
    return last.capsule


async def fork(gateway: Gateway, capsule: CapsuleId) -> None:
    ((tokens, last),) = (
        await collect(await gateway.requests.start(ForkJob(capsule, SUFFIX, Limits(1))))
    ).values()
    assert (last.error, len(tokens)) == (None, 1)


@pytest.mark.parametrize(("num", "at_once"), [(100, 1), (500, 64)])
async def test_a_capsule_is_forked_at_the_other_gateway_as_soon_as_it_is_answered(
    num: int, at_once: int
) -> None:
    """X24, part: idle and loaded none is refused; each is deleted where it was forked."""
    async with fleet() as f:
        turns, asked = asyncio.Semaphore(at_once), [*map(Asked, f.gateways)]

        async def pair(i: int) -> None:
            async with turns:
                here, there = f.gateways[i % 2], f.gateways[1 - i % 2]
                capsule = await make(here)
                await fork(there, capsule)
                await there.capsules.release(capsule, COMMON)

        async with asyncio.TaskGroup() as group:
            for i in range(num):
                group.create_task(pair(i))
        assert len(asked[0].kinds) + len(asked[1].kinds) > num * 0.9
        # Of what is known here, or has a wrong tag, nobody is asked.
        capsule = await make(f.gateways[0])
        await until(lambda: f.gateways[1].capsules.is_kept(capsule))
        asked[1].kinds.clear()
        await fork(f.gateways[1], capsule)
        with pytest.raises(UnknownCapsule):
            await fork(f.gateways[1], CapsuleId("req_0.0"))
        assert not asked[1].kinds


async def test_every_verb_of_a_capsule_is_taken_by_the_other_gateway_at_once() -> None:
    async with fleet() as f:
        one, two = f.gateways
        assert (await two.capsules.tokens(await make(one), COMMON)).tolist() == PROMPT.tolist()
        assert (await two.capsules.inspect(await make(one), COMMON)).worker
        assert (await two.capsules.pin(await make(one), 60.0, COMMON)).status
        rewound = await two.capsules.rewind(await make(one), 20, 60.0, COMMON)
        await fork(one, rewound.capsule)
        await fork(two, rewound.capsule)


async def test_a_capsule_that_went_before_its_event_came_is_computed_at_the_other_gateway() -> None:
    """X24, part: its worker dies while this gateway has not heard of it."""
    async with fleet() as f:
        one, two = f.gateways
        capsule = await make(one)
        host = await lose(f, (await one.capsules.show(capsule, COMMON)).worker)
        assert not two.context.router.was_lost(capsule)
        await fork(two, capsule)
        await host.close()


async def test_a_gateway_that_comes_knows_the_others_before_it_has_a_worker() -> None:
    """Two messages after its first, so that it asks them for what it can't know yet."""
    async with fleet() as f:
        capsule = await make(f.gateways[0])
        new = await f.add_gateway()
        await until(lambda: len(new.peers.others) == 2, timeout_s=0.1)
        assert await new.wait_for_worker(10.0)
        await fork(new, capsule)


async def test_what_waits_while_its_gateway_closes_is_refused_and_hangs_nowhere() -> None:
    """A fork whose capsule is asked for, and a question to a worker whose link has ended."""
    async with fleet() as f:
        one, two = f.gateways
        known = await make(one)
        await until(lambda: two.capsules.is_kept(known))
        fresh, asked = await make(one), Asked(two)
        one.peers.share("capsule", _silent)
        two.shell.links.send = lambda *_: None  # type: ignore[method-assign]
        waiting = [
            asyncio.create_task(fork(two, fresh)),
            asyncio.create_task(two.capsules.pin(known, 60.0, COMMON)),
        ]
        await until(lambda: bool(asked.kinds and two.shell.questions._asked))
        await close(f, two)
        waiting.append(asyncio.create_task(two.capsules.pin(known, 60.0, COMMON)))
        async with asyncio.timeout(5.0):
            ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(each) for each in ended] == [PeerSilent, Unavailable, Unavailable]


async def _silent(name: str, scope: Scope, given: bytes) -> bytes | None:
    await elapse(60.0)
    return None


async def test_a_request_whose_lookup_ends_after_its_gateway_began_to_close_is_refused() -> None:
    async with fleet() as f:
        one, two = f.gateways
        capsule, asked = await make(one), Asked(two)
        tell, may_tell = one.peers._answers["capsule"], asyncio.Event()

        async def late(name: str, scope: Scope, given: bytes) -> bytes | None:
            await may_tell.wait()
            return await tell(name, scope, given)

        one.peers.share("capsule", late)
        asking = asyncio.create_task(fork(two, capsule))
        await until(lambda: bool(asked.kinds))
        two.shell.is_closed = True
        may_tell.set()  # while the links end
        with pytest.raises(Unavailable, match="shutting down"):
            async with asyncio.timeout(5.0):
                await asking
        two.shell.is_closed = False


async def test_a_silent_gateway_s_capsule_is_not_called_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """X24, part: 503, so that clients ask again; once the gateway is gone, the store tells its text."""
    monkeypatch.setattr(Peers.ask_maker, "__kwdefaults__", {"given": b"", "wait_s": 0.1})
    async with fleet() as f:
        one, two = f.gateways
        capsule = await make(one)
        worker = (await one.capsules.show(capsule, COMMON)).worker
        assert worker is not None
        await one.store.flush(1.0)
        host = await lose(f, worker)
        kill_gateway(f, 0)
        with pytest.raises(PeerSilent):
            await fork(two, capsule)
        await close(f, one)
        await until(lambda: not two.peers.others)
        await fork(two, capsule)
        await host.close()


async def answer(gateway: Gateway) -> CapsuleId:
    """The capsule that an answer leaves: no client asked to keep it."""
    job = GenerateJob(PROMPT, Limits(3))
    ((_, last),) = (await collect(await gateway.requests.start(job))).values()
    assert last.capsule is not None
    return last.capsule


# Released elsewhere


async def test_a_lost_capsule_that_was_released_elsewhere_is_not_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """X24, part: also where its text is remembered, so long that it would be stored anew for a fork.

    Nobody is told of the release but its maker and the store.
    """
    async with fleet(3) as f:
        one, two, three = f.gateways
        capsule = await make(one)
        await until(lambda: all(each.capsules.is_kept(capsule) for each in f.gateways))
        for each in (two, three):
            await each.capsules.tokens(capsule, COMMON)
        worker = (await one.capsules.show(capsule, COMMON)).worker
        assert worker is not None
        host = await lose(f, worker)
        assert three.context.router.was_lost(capsule)
        await two.capsules.release(capsule, COMMON)
        assert capsule not in one.memory
        assert capsule in three.memory
        monkeypatch.setattr(texts, "TTL_S", 0.0)
        for each in f.gateways:
            with pytest.raises(NotFound):
                await fork(each, capsule)
        assert all(each.shell.dispatcher.num_rebuilt == 0 for each in f.gateways)
        await host.close()


async def test_an_answer_s_capsule_that_was_released_elsewhere_is_not_computed_again() -> None:
    """X24, part: the worker's event is under way, so its worker is asked, and then the store.

    One that had to go for others is computed again all the same.
    """
    async with fleet() as f:
        one, two = f.gateways
        for is_released in (True, False):
            capsule = await answer(one)
            await until(lambda c=capsule: two.capsules.is_kept(c))
            await two.capsules.tokens(capsule, COMMON)
            before = two.context.router.capsule(capsule)
            if is_released:
                await one.capsules.release(capsule, COMMON)
            else:
                question = Delete(one.context.ids.new(COMMON), capsule)
                await one.shell.questions.ask(before.worker, question)
            assert two.context.router.capsule(capsule).worker == before.worker
            if is_released:
                forked = await two.requests.start(ForkJob(capsule, SUFFIX, Limits(1)))
                ((_, last),) = (await collect(forked)).values()
                assert isinstance(last.error, UnknownCapsule)
                assert capsule not in two.memory
            else:
                await fork(two, capsule)
        assert two.shell.dispatcher.num_rebuilt == 1


# Gateways that go, and a store that is away


async def test_a_capsule_survives_all_gateways_that_were_there_when_it_was_made() -> None:
    """X24, part: with its worker gone as well, and a fork of it that was kept at another gateway."""
    async with fleet() as f:
        one, two = f.gateways
        root = await make(one)
        job = ForkJob(root, SUFFIX, Limits(2), keep_s=300.0)
        ((_, last),) = (await collect(await two.requests.start(job))).values()
        kept = last.capsule
        assert kept is not None
        text = (await two.capsules.tokens(kept, COMMON)).tolist()
        new = await f.add_gateway()
        assert await new.wait_for_worker(10.0)
        for gateway in (one, two):
            await close(f, gateway)
        hosts = [await lose(f, "w0")]
        await f.add_worker("w2")
        await f.ready(2)
        hosts.append(await lose(f, "w1"))
        await until(lambda: not new.peers.others and new.peers.knows_all)
        await f.ready(1)
        assert (await new.capsules.tokens(kept, COMMON)).tolist() == text
        await fork(new, kept)
        await fork(new, root)
        assert (await new.capsules.show(root, COMMON)).worker == "w2"
        for host in hosts:
            await host.close()


async def test_a_capsule_whose_time_may_be_over_is_not_computed_from_the_store() -> None:
    """By a gateway that came when its worker and its maker were gone."""
    wall = [1_000_000.0]
    async with fleet(wall_clock=lambda: wall[0]) as f:
        one, two = f.gateways
        short, long = await make(one, 60.0), await make(one, 600.0)
        await one.store.flush(1.0)
        hosts = [await lose(f, worker) for worker in ("w0", "w1")]
        for gateway in (one, two):
            await close(f, gateway)
        await f.add_worker("w2")
        await elapse(2 * NEWS_S)
        new = await f.add_gateway()
        assert await new.wait_for_worker(10.0)
        await f.ready(1)
        with pytest.raises(LookupIncomplete):  # it may not know all gateways
            await fork(new, long)
        await until(lambda: new.peers.knows_all)
        wall[0] += 61.0
        with pytest.raises(UnknownCapsule):
            await fork(new, short)
        await fork(new, long)
        for host in hosts:
            await host.close()


async def test_with_the_broker_away_the_known_goes_on_and_the_unknown_is_503() -> None:
    """X24, part: never 404, as it may be there."""
    async with fleet() as f:
        one, two = f.gateways
        capsule = await make(one)
        await until(lambda: two.capsules.is_kept(capsule))
        fresh = await make(one)
        f.hub.set_up(False)
        for each in f.gateways:
            await fork(each, capsule)
        await fork(one, fresh)
        with pytest.raises(Unavailable) as told:
            await fork(two, fresh)
        assert told.value.fields["retry_after_s"] == 1.0
        with pytest.raises(UnknownCapsule):
            await fork(two, CapsuleId("req_0.0"))
        released = await make(two)
        await two.capsules.release(released, COMMON)
        f.hub.set_up(True)
        await until(lambda: two.store.num_waiting == 0)
        await fork(two, fresh)
        with pytest.raises(UnknownCapsule):
            await fork(one, released)


# Promised elsewhere


async def promise(f: LiveFleet, monkeypatch: pytest.MonkeyPatch) -> tuple[CapsuleId, Any]:
    """A capsule that waits for a worker at the first gateway, and its prefill."""

    def no_room(*_: Any) -> int:
        raise Saturated(1, 1)

    one = f.gateways[0]
    monkeypatch.setattr(one.shell.dispatcher, "_place", no_room)
    name = one.requests.new_name(COMMON)
    job = PrefillJob(PROMPT, ttl_s=300.0, makes=capsule_id(name))
    return capsule_id(name), await one.requests.begin(job, name=name)


async def test_a_fork_waits_at_the_gateway_that_promised_its_capsule_and_polls_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with fleet() as f:
        one, two = f.gateways
        capsule, prefill = await promise(f, monkeypatch)
        asked = Asked(two)
        forking = asyncio.create_task(fork(two, capsule))
        await elapse(4.0)
        assert not forking.done()
        assert asked.kinds == ["capsule"] * 2
        monkeypatch.undo()
        one.shell.dispatcher.on_room()
        await collect(prefill)
        await forking
        assert asked.kinds.count("capsule") == 3


@pytest.mark.parametrize("how", ["released", "failed", "gone"])
async def test_a_fork_that_waits_for_a_promise_learns_how_it_ends(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X24, part: by the error that forks at its own gateway get; if that is gone, it computes the capsule."""
    async with fleet() as f:
        one, two = f.gateways
        capsule, prefill = await promise(f, monkeypatch)
        forking = asyncio.create_task(fork(two, capsule))
        await elapse(0.5)
        match how:
            case "released":
                await two.capsules.release(capsule, COMMON)
            case "failed":
                monkeypatch.setattr(one.shell.dispatcher, "_place", _full)
                one.shell.on_change(WorkerId("w0"))
            case "gone":
                kill_gateway(f, 0)
        async with asyncio.timeout(20.0):
            (error,) = await asyncio.gather(forking, return_exceptions=True)
        expected = {"released": CapsuleAbandoned, "failed": CapsulesFull, "gone": type(None)}
        assert isinstance(error, expected[how]), error
        with suppress(MalleeError):
            await prefill.opened()
        await prefill.aclose()
        if how == "gone":
            await close(f, one)
            assert (await two.capsules.show(capsule, COMMON)).worker
        else:
            assert await one.store.flush(1.0)
            with pytest.raises((UnknownCapsule, CapsulesFull)):
                await fork(two, capsule)


def _full(*_: Any) -> int:
    raise CapsulesFull(1, 1, 1)


# Workers that leave


async def test_capsules_of_a_gateway_that_is_gone_are_made_again_before_their_worker_leaves() -> (
    None
):
    """X4, part: by one of those that live, though none had their texts."""
    async with fleet(3) as f:
        one, two, three = f.gateways
        capsules = [await make(one) for _ in range(3)]
        await until(lambda: all(each.capsules.is_kept(capsules[2]) for each in f.gateways))
        await one.store.flush(1.0)
        await close(f, one)
        await until(lambda: len(two.peers.others) == len(three.peers.others) == 1)
        worker = two.context.router.capsule(capsules[0]).worker
        held = set(two.context.router.capsules_of(worker)) & set(capsules)
        host = next(host for host in f.hosts.values() if host.name == worker)
        await host.drain_all(20.0)
        rebuilt = [each.shell.dispatcher.num_rebuilt for each in (two, three)]
        assert rebuilt == [len(held), 0]
        for capsule in held:
            assert two.context.router.capsule(capsule).worker != worker
        del f.hosts[host.address]
        await host.close()
