"""A fault at each allocation and transfer of a step: either the step happened or it did not."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest

from bench.doubles.forward import MockForward
from mallee.mocker.passes import mock_spec
from mallee.protocol.errors import (
    DeviceMemoryExhausted,
    MalleeError,
    TierFull,
    UnknownCapsule,
    from_wire,
)
from mallee.protocol.messages import (
    Command,
    Demote,
    Fork,
    Generate,
    Limits,
    Prefill,
    Promote,
    Release,
    Sampling,
    Update,
    pack_tokens,
)
from mallee.worker.records import EngineConfig, EngineStats
from mallee.worker.sched.policy import SchedulerConfig
from mallee.worker.speculation.speculator import SpeculationConfig
from mallee.worker.transfer.values import DISK, HOST
from support.driving import engine_over
from support.fake_device import FakeDevice
from support.fold_forward import FoldForward
from support.speculating import Knowing, draft_by
from support.tiers import DictDisk, make_tiers

COMPUTES = ("forward", "refold", "sample", "logprobs", "keep")
MOVES = ("read", "write", "new_rows", "dump", "undump")
NUM_CAPSULES = 3


class Broken(Exception):
    """Raised by a forward that has a fault of its own."""


class Fault:
    """A forward fails once, at the call `at` of those that allocate or transfer, before or after its work."""

    def __init__(self, at: int, error: Exception) -> None:
        self.num_points = -1  # not counted before there is an engine
        self.failed = ""  # the call that did
        self.called: set[str] = set()
        self._at = at
        self._error = error

    def guard(self, forward: Any, names: Sequence[str]) -> None:
        for name in names:
            setattr(forward, name, self._guarded(name, getattr(forward, name)))

    def _guarded(self, name: str, call: Any) -> Any:
        def guarded(*given: Any) -> Any:
            self.reach(name)
            found = call(*given)
            self.reach(name)
            return found

        return guarded

    def reach(self, name: str) -> None:
        self.num_points += self.num_points >= 0
        self.called.add(name)
        if self.num_points == self._at:
            self.failed = name
            raise self._error


def make_forward(kind: str) -> MockForward:
    if kind.startswith("states"):
        return FoldForward(num_blocks=28, vocab_size=16)
    return MockForward(mock_spec(vocab_size=16), num_blocks=28, block_size=4)


@dataclass
class Played:
    """All that clients were told, and how the engine took the fault."""

    answers: dict[tuple[str, int], list[Update]] = field(default_factory=dict)
    replies: dict[str, MalleeError | None] = field(default_factory=dict)
    raised: list[Exception] = field(default_factory=list)
    num_points: int = 0
    failed: str = ""
    called: set[str] = field(default_factory=set)

    def tokens(self, key: tuple[str, int]) -> list[int]:
        return [token for update in self.answers[key] for token in update.tokens]

    def error(self, key: tuple[str, int]) -> MalleeError | None:
        raw = self.answers[key][-1].error
        return None if raw is None else from_wire(raw)


def commands(seed: int) -> Iterator[list[Command]]:
    """Work for more memory than there is, at every third step: shared prompts, forks, moves to tiers."""
    rng = random.Random(seed)
    stem = [rng.randrange(3, 16) for _ in range(13)]
    prompts = [stem + [rng.randrange(3, 16) for _ in range(rng.randrange(12))] for _ in range(4)]
    for i in range(NUM_CAPSULES):
        yield [Prefill(f"p{i}", pack_tokens(prompts[i]))]
    for i in range(4):
        limits, hot = Limits(rng.randrange(3, 9)), Sampling(1.0, seed=i, logprobs=i % 2 - 1)
        capsule, tier = f"p{rng.randrange(NUM_CAPSULES)}.0", rng.choice([HOST, DISK])
        suffixes = (b"", pack_tokens([rng.randrange(3, 16) for _ in range(5)]))
        yield [
            Generate(f"g{i}", pack_tokens(prompts[i]), limits, hot, n=1 + i % 2),
            Demote(f"d{i}", capsule, tier),
        ]
        yield [Fork(f"f{i}", f"p{rng.randrange(NUM_CAPSULES)}.0", suffixes, limits, hot)]
        yield [
            Generate(f"l{i}", pack_tokens([i + 3] * 60), Limits(4), hot),
            Promote(f"u{i}", capsule),
        ]


def round_trips(seed: int) -> Iterator[list[Command]]:
    """Capsules that are parked, pushed off the device, and come back while forks wait for them."""
    rng, hot, limits = random.Random(seed), Sampling(1.0, seed=seed), Limits(4)
    stem = [rng.randrange(3, 16) for _ in range(9)]
    for i in range(NUM_CAPSULES):
        yield [Prefill(f"p{i}", pack_tokens(stem + [i + 3] * (3 + i)))]
    for i, tier in enumerate((HOST, DISK, HOST, DISK)):
        names = [f"p{k % NUM_CAPSULES}.0" for k in range(i, i + 2)]
        yield [Demote(f"d{i}{name}", name, tier) for name in names]
        for k in range(2):
            yield [Generate(f"l{i}{k}", pack_tokens([i + k + 3] * 60), Limits(4), hot)]
        forks = [Fork(f"f{i}{name}", name, (b"",), limits, hot) for name in names]
        yield [*(Promote(f"u{i}{name}", name) for name in names), *forks]


def counts(stats: EngineStats) -> tuple[int, ...]:
    """The figures that a step adds to."""
    return stats.num_steps, stats.num_prefill_tokens, stats.num_output_tokens


def play(
    seed: int,
    kind: str,
    at: int = 0,
    error: Exception | None = None,
    names: Sequence[str] = COMPUTES,
    script: Callable[[int], Iterator[list[Command]]] = commands,
    known: Mapping[tuple[str, int], Sequence[int]] = MappingProxyType({}),
) -> Played:
    """Run the work of `seed` on an engine of `kind`; the caller of a step that raises calls again.

    Drafts are of `known` answers, and now and then wrong.
    """
    played = Played()
    fault, forward = Fault(at, error or Broken()), make_forward(kind)
    device: Any = None
    if "ahead" not in kind or names != COMPUTES:
        fault.guard(forward, names)
    if "ahead" in kind:
        told = (lambda call, number: fault.reach(call)) if names == COMPUTES else None
        device = FakeDevice(forward, seed=seed, **({} if told is None else {"told": told}))
    speculation = SpeculationConfig("auto" if "drafts" in kind else "off", 3)
    engine = engine_over(
        device or forward,
        device=device,
        config=EngineConfig(SchedulerConfig(12, 6, 64), 4, speculation=speculation),
        below=make_tiers(12, disk=DictDisk(40)),
    )
    if "drafts" in kind:
        draft_by(engine, Knowing("mixed", known, vocab=16))
    fault.num_points, stats = 0, engine.stats()
    batches, num_calls = script(seed), 0
    while True:
        if num_calls % 3 == 0 and (batch := next(batches, None)) is not None:
            for command in batch:
                assert engine.submit(command, "g") is None
        elif num_calls % 3 == 0 and not engine.has_work:
            break
        num_calls += 1
        assert num_calls < 400, "still working"
        before = counts(stats)
        try:
            result = engine.step()
        except Exception as raised:
            played.raised.append(raised)
            assert counts(engine.stats()) == before, "a part of the step happened"
            engine.check()
            continue
        stats = engine.stats()
        assert stats.num_steps == before[0] + 1
        if num_calls % 4 == 0:
            engine.check()
        for frame in result.frames.values():
            played.replies |= {
                r.request: from_wire(r.error) if r.error else None for r in frame.replies
            }
            for update in frame.updates:
                own = played.answers.setdefault((update.request, update.branch), [])
                if update.branch >= 0 and update.finish != "error":
                    assert update.position == sum(each.num_tokens for each in own)
                own.append(update)
    assert engine.stats().jobs == 0
    for i in range(NUM_CAPSULES):
        engine.submit(Release(f"p{i}.0"), "g")
    while engine.has_work:
        engine.step()
    engine.check()
    assert (engine.stats().capsules.kept, engine.stats().tiers.host_held) == (0, 0)
    assert not engine.audit()
    engine.close()
    if "drafts" in kind and known:
        assert stats.speculation.num_accepted > 8
        assert ("refold" in fault.called) == (kind == "states, drafts")
    played.num_points, played.failed, played.called = (
        fault.num_points,
        fault.failed,
        fault.called,
    )
    return played


def points(played: Played, first: int, most: int) -> range:
    """At most so many of its points, far apart."""
    return range(first + 1, played.num_points + 1, -(-played.num_points // most))


KINDS = pytest.mark.parametrize(
    ("seed", "kind"),
    [
        *((0, "plain"), (1, "drafts"), (2, "ahead")),
        *((3, "states"), (4, "states, drafts"), (5, "states, ahead")),
    ],
)


@KINDS
def test_a_step_that_raises_has_not_happened(seed: int, kind: str) -> None:
    """I18, part: called again, it and all after it answer as they would have, each token once."""
    plain = play(seed, kind)
    known = {key: plain.tokens(key) for key in plain.answers}
    assert not any(plain.error(key) for key in plain.answers)
    failed = set()
    for at in points(play(seed, kind, known=known), seed, 60):
        played = play(seed, kind, at, known=known)
        failed.add(played.failed)
        assert [type(each) for each in played.raised] == [Broken], (at, played.failed)
        assert played.answers.keys() == plain.answers.keys()
        for key, tokens in known.items():
            assert played.tokens(key) == tokens, (at, key)
            assert played.answers[key][-1].finish == plain.answers[key][-1].finish
    assert kind != "states, drafts" or failed == set(COMPUTES)


@KINDS
def test_too_little_memory_for_a_step_ends_its_newest_branch_and_no_other(
    seed: int, kind: str
) -> None:
    """I18, part: it tells the error after a part of its answer, and so do forks of its capsule."""
    plain = play(seed, kind)
    known = {key: plain.tokens(key) for key in plain.answers}
    error = DeviceMemoryExhausted("tried to allocate 2.00 MiB")
    for at in points(play(seed, kind, known=known), seed, 60):
        played = play(seed, kind, at, error, known=known)
        assert not played.raised, (at, played.failed)
        ended = {key for key in played.answers if played.error(key) is not None}
        for key in played.answers:
            tokens = played.tokens(key)
            if key not in ended:
                assert tokens == known[key], (at, key)
            elif key[1] >= 0:
                assert tokens == known[key][: len(tokens)], (at, key)
        told = {type(played.error(key)) for key in ended}
        assert told <= {DeviceMemoryExhausted, UnknownCapsule}
        assert len({name for name, _ in ended if not name.startswith("f")}) <= 1, (at, ended)


@pytest.mark.parametrize("script", [commands, round_trips])
@pytest.mark.parametrize(("seed", "kind"), [(0, "plain"), (1, "plain"), (2, "states")])
def test_a_transfer_that_finds_no_memory_changes_no_answer(
    seed: int, kind: str, script: Callable[[int], Iterator[list[Command]]]
) -> None:
    """I18, part: what was not copied is computed; a capsule that could not move stays, which is told."""
    error = DeviceMemoryExhausted("tried to allocate 2 MiB")
    plain = play(seed, kind, names=MOVES, script=script)
    assert script is commands or {"read", "write", "dump"} <= plain.called
    for at in points(plain, seed, min(60, plain.num_points // 2)):
        played = play(seed, kind, at, error, MOVES, script)
        assert not played.raised, (at, played.failed)
        assert played.answers.keys() == plain.answers.keys()
        for key in plain.answers:
            assert played.error(key) is None, (at, key)
            assert played.tokens(key) == plain.tokens(key), (at, key)
        was_refused = {name for name, error in plain.replies.items() if error is not None}
        refused = [e for name, e in played.replies.items() if e and name not in was_refused]
        assert sum(isinstance(each, DeviceMemoryExhausted) for each in refused) <= 1
        # A copy that stayed in host memory may leave others no room there.
        assert {type(each) for each in refused} <= {DeviceMemoryExhausted, TierFull}
