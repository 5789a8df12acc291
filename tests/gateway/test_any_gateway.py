"""Capsules at two gateways, where the workers' events come late: an id holds at any gateway at once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import pytest

from mallee.gateway.gateway import Gateway
from mallee.mocker.passes import mock_spec
from mallee.protocol.errors import LookupIncomplete, Unavailable, UnknownCapsule
from mallee.protocol.hashing import as_tokens
from mallee.protocol.ids import COMMON, CapsuleId
from mallee.protocol.messages import Limits
from mallee.protocol.subjects import BusRole
from mallee.router.config import RouterConfig
from mallee.router.dispatch.jobs import ForkJob, PrefillJob
from mallee.testing.bus import LocalBus, LocalHub
from support.live_fleet import LiveFleet, collect, lose, running
from support.waiting import until

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
        self._last = max(self._last, loop.time() + self._random.uniform(self._least, self._most))
        loop.call_at(self._last, super().publish, subject, raw)


@asynccontextmanager
async def fleet() -> AsyncIterator[LiveFleet]:
    """Two gateways that know each other, and two workers whose events are slow."""
    random = Random(7)

    def bus(role: BusRole) -> LocalBus:
        least, most = (0.05, NEWS_S) if role == "worker" else (0.0005, 0.02)
        return LateBus(made.hub, random, least, most)

    made = LiveFleet(SPEC, RouterConfig(block_size=16), num_blocks=4096, syncs=True, make_bus=bus)
    async with running(made, workers=2, gateways=2):
        await until(lambda: all(each.peers.others for each in made.gateways))
        yield made
        for gateway in made.gateways:
            gateway.check()
            assert gateway.operator.failure is None


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
        turns = asyncio.Semaphore(at_once)

        async def pair(i: int) -> None:
            async with turns:
                here, there = f.gateways[i % 2], f.gateways[1 - i % 2]
                capsule = await make(here)
                await fork(there, capsule)
                await there.capsules.release(capsule, COMMON)

        async with asyncio.TaskGroup() as group:
            for i in range(num):
                group.create_task(pair(i))
        outcomes = f.gateways[0].records.outcomes + f.gateways[1].records.outcomes
        assert outcomes["unanswered"] == outcomes["unknown"] == 0
        assert outcomes["found"] > num * 0.9
        # Of what is known here, or has a wrong tag, nobody is asked.
        capsule = await make(f.gateways[0])
        await until(lambda: f.gateways[1].capsules.is_kept(capsule))
        before = f.gateways[1].records.outcomes.copy()
        await fork(f.gateways[1], capsule)
        with pytest.raises(UnknownCapsule):
            await fork(f.gateways[1], CapsuleId("req_0.0"))
        assert f.gateways[1].records.outcomes == before


async def test_every_verb_of_a_capsule_is_taken_by_the_other_gateway_at_once() -> None:
    async with fleet() as f:
        one, two = f.gateways
        assert (await two.capsules.tokens(await make(one), COMMON)).tolist() == PROMPT.tolist()
        assert (await two.capsules.inspect(await make(one), COMMON)).worker
        assert (await two.capsules.pin(await make(one), 60.0, COMMON)).status
        rewound = await two.capsules.rewind(await make(one), 20, 60.0, COMMON)
        await fork(one, rewound.capsule)
        await fork(two, rewound.capsule)
        assert two.records.outcomes["unknown"] == one.records.outcomes["unknown"] == 0


async def test_a_question_outlives_the_first_that_asked_it() -> None:
    """Two forks wait for one answer, and the client of the first one hangs up."""
    async with fleet() as f:
        one, two = f.gateways
        capsule = await make(one)
        first, second = (asyncio.create_task(fork(two, capsule)) for _ in range(2))
        await until(lambda: bool(two.records._asked))
        first.cancel()
        await second
        assert first.cancelled()
        assert two.records.outcomes == {"found": 1}


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
        await until(lambda: len(new.records._others() or ()) == 2, timeout_s=0.1)
        assert await new.wait_for_worker(10.0)
        await fork(new, capsule)


async def test_what_waits_while_its_gateway_closes_is_refused_and_hangs_nowhere() -> None:
    """A fork whose capsule is asked for, and a question to a worker whose link has ended."""
    async with fleet() as f:
        one, two = f.gateways
        known = await make(one)
        await until(lambda: two.capsules.is_kept(known))
        fresh = await make(one)
        two.shell.links.send = lambda *_: None  # type: ignore[method-assign]
        waiting = [
            asyncio.create_task(fork(two, fresh)),
            asyncio.create_task(two.capsules.pin(known, 60.0, COMMON)),
        ]
        await until(lambda: bool(two.records._asked and two.shell.questions._asked))
        await two.close()
        f.gateways.remove(two)
        f.routers.pop()
        waiting.append(asyncio.create_task(two.capsules.pin(known, 60.0, COMMON)))
        async with asyncio.timeout(5.0):
            ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(each) for each in ended] == [LookupIncomplete, Unavailable, Unavailable]


async def test_a_request_whose_lookup_ends_after_its_gateway_began_to_close_is_refused() -> None:
    async with fleet() as f:
        one, two = f.gateways
        capsule = await make(one)
        asking = asyncio.create_task(fork(two, capsule))
        await until(lambda: bool(two.records._asked))
        two.shell.is_closed = True  # its answer comes while the links end
        with pytest.raises(Unavailable, match="shutting down"):
            async with asyncio.timeout(5.0):
                await asking
        two.shell.is_closed = False
