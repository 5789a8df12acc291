"""Jobs split over several workers: gateway, workers and engines in one process (mocked model)."""

from contextlib import AbstractAsyncContextManager

import pytest

from bench.doubles.forward import linear_tokens
from mallee.gateway.gateway import Gateway
from mallee.gateway.requests.deltas import Delta
from mallee.gateway.requests.request import RunningRequest
from mallee.mocker.passes import mock_spec
from mallee.protocol.errors import CapsuleLost, UnknownCapsule
from mallee.protocol.hashing import as_tokens, block_hashes
from mallee.protocol.ids import COMMON, CapsuleId, Scope, WorkerId, branch_seed
from mallee.protocol.messages import Limits, Sampling
from mallee.router.config import CostModel, RouterConfig, SpillModel
from mallee.router.dispatch.jobs import ForkJob, PrefillJob
from mallee.router.dispatch.shards import Shard
from support.live_fleet import LiveFleet, collect, lose, running
from support.waiting import until

SPEC = mock_spec(max_model_len=100_000)
PROMPT = as_tokens([i % 61 for i in range(200)])
HOT = Sampling(temperature=1.0, seed=9)
BLOCK = 16
ROWS = 4  # what a worker says it can run at once
SUFFIXES = [as_tokens([i] * (i % 3)) for i in range(12)]


def fleet(workers: int = 3, gateways: int = 1) -> AbstractAsyncContextManager[LiveFleet]:
    """Gateways that split where it saves anything at all, and workers with few rows."""
    spill = SpillModel(min_gain=0.0, min_gain_fitting=0.0)
    routing = RouterConfig(block_size=BLOCK, cost=CostModel(prefill_weight=1.0), spill=spill)
    made = LiveFleet(SPEC, routing, num_blocks=512, rows=ROWS, syncs=True)
    return running(made, workers, gateways)


def expect(prompt: list[int], n: int, branch: int) -> list[int]:
    return linear_tokens(SPEC, prompt, n, sampling=HOT, seed=branch_seed(HOT.seed, branch))


async def make_capsule(f: LiveFleet, *, salt: str = "", gateway: int = 0) -> Delta:
    stream = await f.gateways[gateway].requests.start(PrefillJob(PROMPT, scope=Scope(salt)))
    ((_, made),) = (await collect(stream)).values()
    assert made.capsule is not None
    return made


def shards_of(f: LiveFleet, stream: RunningRequest) -> list[Shard]:
    """The shards of a running request."""
    for gateway in f.gateways:
        state = gateway.shell.dispatcher._requests.get(stream.request)
        if state is not None:
            return list(state.shards.values())
    return []


def workers_of(f: LiveFleet, stream: RunningRequest) -> set[WorkerId]:
    return {shard.worker for shard in shards_of(f, stream)}


async def test_a_split_fork_draws_what_it_would_draw_unsplit() -> None:
    """X6, part, D3: twelve branches with suffixes of three lengths, over three workers of four rows each."""
    async with fleet() as f:
        made = await make_capsule(f)
        fork = await f.gateways[0].requests.start(ForkJob(made.capsule, SUFFIXES, Limits(8), HOT))
        assert workers_of(f, fork) == {"w0", "w1", "w2"}
        ran = {branch: shard.worker for shard in shards_of(f, fork) for branch in shard.branches}
        answers = await collect(fork)
        assert sorted(answers) == list(range(12))
        for i, suffix in enumerate(SUFFIXES):
            assert answers[i][0] == expect(PROMPT.tolist() + suffix.tolist(), 8, i)
            assert (answers[i][1].worker or fork.worker) == ran[i]
        # Each worker computed the prefix once, and the answer says so.
        for engine in f.engines.values():
            assert engine.stats().num_prefill_tokens <= len(PROMPT) + 12
        told = sum(last.prefill_tokens for _, last in answers.values())
        assert told == 2 * len(PROMPT) + sum(map(len, SUFFIXES))
        await until(f.is_clean)
        for router in f.routers:
            router.check()


async def test_a_split_fork_of_a_capsules_beginning_draws_what_it_would_draw_unsplit() -> None:
    """F5, part, X1, X6, part: all go on from the same first tokens, as do the children's children."""
    cut = len(PROMPT) - 3
    async with fleet() as f:
        made = await make_capsule(f)
        gateway = f.gateways[0]
        fork = await gateway.requests.start(ForkJob(made.capsule, SUFFIXES, Limits(8), HOT, at=cut))
        assert len(workers_of(f, fork)) == 3
        answers = await collect(fork)
        begun = PROMPT.tolist()[:cut]
        for i, suffix in enumerate(SUFFIXES):
            assert answers[i][0] == expect(begun + suffix.tolist(), 8, i)
        tokens, last = answers[5]
        text = begun + SUFFIXES[5].tolist() + tokens
        known = await gateway.capsules.show(last.capsule, COMMON)
        assert known.boundary == len(text) == last.boundary
        again = await gateway.requests.start(ForkJob(last.capsule, SUFFIXES, Limits(4), HOT))
        assert len(workers_of(f, again)) == 3
        for k, (drawn, _) in (await collect(again)).items():
            assert drawn == expect(text + SUFFIXES[k].tolist(), 4, k)
        await until(f.is_clean)


async def test_a_capsule_whose_tokens_are_not_known_is_not_split() -> None:
    async with fleet(gateways=2) as f:
        made = await make_capsule(f)
        other = f.gateways[1]
        await until(lambda: bool(f.routers[1].stats().num_capsules))
        fork = await other.requests.start(ForkJob(made.capsule, SUFFIXES, Limits(4), HOT))
        assert len(shards_of(f, fork)) == 1
        assert len(await collect(fork)) == 12


async def test_a_tenants_salt_goes_with_its_tokens() -> None:
    """A prefix computed elsewhere is not found by other tenants."""
    async with fleet() as f:
        made = await make_capsule(f, salt="acme")
        with pytest.raises(UnknownCapsule):
            await f.gateways[0].requests.start(ForkJob(made.capsule, SUFFIXES, Limits(4), HOT))
        job = ForkJob(made.capsule, SUFFIXES, Limits(4), HOT, scope=Scope("acme"))
        fork = await f.gateways[0].requests.start(job)
        assert len(workers_of(f, fork)) == 3
        await collect(fork)
        await until(f.is_clean)
        salted = set(block_hashes(PROMPT, BLOCK, salt=SPEC.salt("acme")).tolist())
        plain = set(block_hashes(PROMPT, BLOCK, salt=SPEC.salt("")).tolist())
        for engine in f.engines.values():
            held = set(engine._tree.held_hashes().tolist())
            assert salted <= held
            assert not plain & held


async def test_the_parts_of_a_lost_worker_go_on_elsewhere() -> None:
    """X4, part: each branch after its own last token, with what it had drawn; counted so."""
    async with fleet() as f:
        made = await make_capsule(f)
        fork = await f.gateways[0].requests.start(ForkJob(made.capsule, SUFFIXES, Limits(400), HOT))
        (shard,) = [shard for shard in shards_of(f, fork) if shard.worker == "w2"]
        await until(lambda: min(shard.counts) > 3)
        host = f.hosts.pop("w2#3")
        await host.tasks.close()
        host._streams.end("g0")
        answers = await collect(fork)
        for i, suffix in enumerate(SUFFIXES):
            tokens, last = answers[i]
            assert tokens == expect(PROMPT.tolist() + suffix.tolist(), 400, i)
            assert last.worker != "w2"
        assert f.gateways[0].shell.dispatcher.num_moved == 1
        lines = f.gateways[0].operator.metrics().decode().splitlines()
        assert f'mallee_branches_moved_total{{reason="death"}} {len(shard.branches)}.0' in lines
        assert f"mallee_branch_stall_seconds_count {len(shard.branches)}.0" in lines
        assert 'mallee_branch_latency_seconds_count{how="recompute"} 0.0' not in lines
        await host.close()
        del f.engines["w2"]
        await until(f.is_clean)


async def met(f: LiveFleet) -> None:
    """Both gateways know each other, and the capsule."""
    await until(lambda: all(len(each.peers.others) == 1 for each in f.gateways))
    await until(lambda: all(router.stats().num_capsules == 1 for router in f.routers))


async def check_fork(gateway: Gateway, capsule: CapsuleId) -> None:
    """Branches of the prompt draw what they would where its worker lives."""
    answers = await collect(
        await gateway.requests.start(ForkJob(capsule, SUFFIXES, Limits(8), HOT))
    )
    for k, suffix in enumerate(SUFFIXES):
        assert answers[k][0] == expect(PROMPT.tolist() + suffix.tolist(), 8, k)


async def test_gateways_tell_each_other_the_texts_of_lost_capsules() -> None:
    """X4, part: made through one gateway, its worker dead, forked through another."""
    async with fleet(gateways=2) as f:
        made = await make_capsule(f)
        one, two = f.gateways
        await met(f)
        host = await lose(f, (await one.capsules.show(made.capsule, COMMON)).worker)
        info = await two.capsules.show(made.capsule, COMMON)
        assert (info.worker, info.boundary) == (None, len(PROMPT))
        await check_fork(two, made.capsule)
        assert (await two.capsules.show(made.capsule, COMMON)).worker
        assert b"mallee_capsules_rebuilt_total 1.0" in two.operator.metrics()
        await host.close()


async def test_a_gateway_that_ends_leaves_the_texts_of_kept_capsules_in_the_store() -> None:
    """X4, part, X24, part: any other computes them again, also one that came later."""
    async with fleet(gateways=2) as f:
        made = await make_capsule(f)
        one, two = f.gateways
        await met(f)
        worker = (await one.capsules.show(made.capsule, COMMON)).worker
        await one.close()
        await one.context.bus.close()
        f.gateways.remove(one)
        f.routers.pop(0)
        host = await lose(f, worker)
        await check_fork(two, made.capsule)
        await host.close()


async def test_a_capsule_whose_text_nobody_knows_is_lost() -> None:
    async with fleet(gateways=2) as f:
        made = await make_capsule(f)
        one, two = f.gateways
        await until(lambda: len(two.peers.others) == 1)
        host = await lose(f, (await one.capsules.show(made.capsule, COMMON)).worker)
        await one.store.flush(1.0)
        one.memory.forget(made.capsule)
        f.hub.kept.buckets.clear()
        for gateway in (one, two):
            with pytest.raises(CapsuleLost):
                await gateway.capsules.show(made.capsule, COMMON)
        with pytest.raises(UnknownCapsule):
            await one.capsules.show(CapsuleId("never.0"), COMMON)
        await host.close()


async def test_a_part_whose_prefix_is_refused_ends_with_that_error() -> None:
    async with fleet() as f:
        made = await make_capsule(f)
        for name in ("w1", "w2"):
            f.engines[name]._intake._num_blocks = 3  # smaller than its lease says
        fork = await f.gateways[0].requests.start(ForkJob(made.capsule, SUFFIXES, Limits(8), HOT))
        home = next(s.branches for s in shards_of(f, fork) if s.worker == fork.worker)
        answers = await collect(fork)
        for i, (_, last) in answers.items():
            assert (last.error is None) == (i in home)
        assert len(home) < 12
        await until(f.is_clean)
