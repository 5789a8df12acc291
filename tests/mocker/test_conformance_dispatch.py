"""X15: a live gateway and a replay tell the same story: decisions and answers, event for event.

Both drive one dispatcher over the same engines in virtual time: the live one with tokens, frames, links, a
bus and an event loop, the replay with names and counts. Stories have prompts, fan-outs and forks, too few
rows, crashes, restarts, drains with kept capsules, slow workers, a broker that is gone for a while, cancels
and capsules that are pushed out; one gateway plays, or two.
"""

import random
from typing import NamedTuple

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from msgspec import structs

from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.replay.simulation import Simulation
from mallee.mocker.run_length import mixed
from mallee.mocker.timing import Timing
from mallee.protocol.ids import RequestId
from mallee.traces.workload import NO_PARENT, Request
from support.examples import examples
from support.faults import random_faults
from support.fleets import SIZE, TIMING, named, traffic, workload
from support.lockstep import SPEC, Decisions, LiveWorld, TokenEngine

QUICK = (Phase.explicit, Phase.reuse, Phase.generate)  # a story that fails is told by its seed
BEGIN_S = 1.0  # by then all workers have joined
# No two workers' steps end at the same time: their order would follow from rounding.
JITTERED = Timing(TIMING.model, TIMING.overhead_s, jitter=0.05, startup_s=0.2)


class Cancelled(NamedTuple):
    """The client gives up a branch, or all that is left."""

    at_s: float
    name: RequestId
    branch: int | None


def requests_of(seed: int, sessions: int) -> list[Request]:
    """Traffic whose ids name all of its text; some prompts are only there to be forked."""
    return [
        structs.replace(request, arrival_s=request.arrival_s + BEGIN_S)
        for request in named(traffic(seed, num=30, kept=0.5, sessions=sessions))
    ]


def cancels_of(rng: random.Random, requests: list[Request], share: float) -> list[Cancelled]:
    """Some clients of requests that nobody forks hang up, soon or late."""
    return [
        Cancelled(
            r.arrival_s + rng.random() * 0.3,
            RequestId(f"r{r.number}"),
            rng.choice([None, r.branches - 1]),
        )
        for r in requests
        if not r.num_children and rng.random() < share
    ]


def replayed(
    requests: list[Request], config: ReplayConfig, cancels: list[Cancelled]
) -> list[Decisions]:
    """The decisions of each gateway."""
    simulation = Simulation(workload(requests), config)
    dispatchers = [gateway._dispatcher for gateway in simulation.gateways]  # type: ignore[union-attr]
    decisions = [Decisions(each, simulation.clock) for each in dispatchers]

    def cancel(what: Cancelled) -> None:
        for gateway, dispatcher in zip(simulation.gateways, dispatchers, strict=True):
            state = dispatcher._requests.get(what.name)
            if state is not None and (state.home is not None or what.branch is None):
                gateway.cancel(what.name, what.branch)  # type: ignore[union-attr, call-arg]

    for what in cancels:
        simulation.clock.at(what.at_s, cancel, what)
    simulation.run()
    simulation.check()
    return decisions


def lived(requests: list[Request], config: ReplayConfig, cancels: list[Cancelled]) -> LiveWorld:
    world = LiveWorld(requests, config, SIZE)
    for what in cancels:
        world.clock.at(what.at_s, lambda what: world.cancel(what.name, what.branch), what)
    world.run()
    return world


def drawn(position: int) -> int:
    """The token that a greedy mocked engine draws at `position`."""
    return mixed(mixed(position)) % SPEC.vocab_size


def lengths(requests: list[Request]) -> dict[int, int]:
    """Tokens before the answer of each request, by number."""
    starts: dict[int, int] = {}
    by_number = {request.number: request for request in requests}
    for request in requests:
        starts[request.number] = request.input_tokens
        if request.parent != NO_PARENT:
            parent = by_number[request.parent]
            starts[request.number] += starts[parent.number] + parent.output_tokens
    return starts


def agree(found: Decisions, expected: Decisions) -> None:
    """They are the same, at the same times."""
    assert [what for _, what in found.log] == [what for _, what in expected.log]
    times = [at for at, _ in expected.log]
    assert [at for at, _ in found.log] == pytest.approx(times, abs=1e-6)


@pytest.mark.parametrize("gateways", [1, 2])
@pytest.mark.slow
@settings(examples(25), phases=QUICK)
@given(
    seed=st.integers(0, 1 << 32),
    max_rows=st.sampled_from([2, 4, 8]),
    answer_capsules=st.sampled_from([1, 3, 256]),
    hang_ups=st.sampled_from([0.0, 0.2]),
)
def test_a_live_gateway_decides_and_answers_as_its_replay(
    seed: int, gateways: int, max_rows: int, answer_capsules: int, hang_ups: float
) -> None:
    """X15, X4, part, K28, part, X8, part: the same bookings, commands and ends at the same times; no text
    differs.
    """
    requests = requests_of(seed, sessions=4 * gateways - 3)
    cancels = cancels_of(random.Random(seed), requests, hang_ups)
    config = ReplayConfig(
        engines=3,
        gateways=gateways,
        kv_tokens=1024 * SIZE,
        timing=JITTERED,
        max_rows=max_rows,
        answer_capsules=answer_capsules,
        keeps_order=False,
        faults=tuple(random_faults(seed, BEGIN_S, drains=3)),
    )
    expected = replayed(requests, config, cancels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mallee.mocker.replay.fleet.workers.MockedEngine", TokenEngine)
        world = lived(requests, config, cancels)
    for gateway, decisions in zip(world.gateways, expected, strict=True):
        agree(gateway.decisions, decisions)
    assert_answered(requests, world, {what.name for what in cancels})


def assert_answered(requests: list[Request], world: LiveWorld, given_up: set[RequestId]) -> None:
    """Each client has the tokens of an undisturbed run, all of them unless it hung up."""
    starts = lengths(requests)
    for (name, _), tokens in world.tokens.items():
        start = starts[int(name[1:])]
        assert tokens == [drawn(start + k) for k in range(len(tokens))]
    for request in requests:
        if (name := RequestId(f"r{request.number}")) not in given_up:
            told = [len(world.tokens[name, b]) for b in range(request.branches)]
            assert told == [request.output_tokens] * request.branches
    assert not world.errors
