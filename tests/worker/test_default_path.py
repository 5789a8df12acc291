"""The path without tiers and without capsules of answers: the same frames and events as before there were
any, and as with tiers that hold nothing.
"""

import hashlib
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import pytest

from mallee.mocker.passes import mock_spec
from mallee.protocol.codec import encode
from mallee.protocol.events import CapsuleReleased, CapsuleStored, Event
from mallee.protocol.ids import Incarnation, WorkerId, branch_seed
from mallee.protocol.messages import (
    Cancel,
    Command,
    Fork,
    Generate,
    Limits,
    Prefill,
    Prioritize,
    Release,
    Sampling,
    Share,
    pack_tokens,
)
from mallee.testing.forward import MockForward, linear_tokens
from mallee.worker.engine import Engine
from mallee.worker.records import EngineConfig, StepResult
from mallee.worker.sched.policy import SchedulerConfig
from support.tiers import make_tiers

SPEC = mock_spec(vocab_size=64, max_model_len=4096)
GOLDEN = {
    "answers": "54a5bfd534980cc9e79c44c063e17d554651c463c021d6932a958bd1a6655bd8",
    "capsules": "97555699e24bc903d4d9f40af324afcd6ab7b1e51cac024c4ea3ccbee73d7b76",
}
"""By workload the digest of `told`: of commit d762123, the last one without tiers, and of every one since."""


class Plan(NamedTuple):
    """The draws of one branch, after `text`."""

    text: list[int]
    sampling: Sampling
    limits: Limits
    seed: int


class Workload:
    """Commands of two gateways, drawn by `seed`, on a device too small for them."""

    def __init__(self, seed: int, *, has_capsules: bool) -> None:
        self._rng = random.Random(seed)
        self._has_capsules = has_capsules
        self._texts = [self._ids(40), self._ids(23), self._ids(9)]
        self._capsules: dict[str, list[int]] = {}
        self.plans: dict[tuple[str, int], Plan] = {}

    def steps(self, num: int = 150) -> Iterator[tuple[list[tuple[Command, str]], int]]:
        """Commands with their gateways, and the steps after them."""
        for i in range(num):
            yield [(self._command(f"r{i}"), self._rng.choice("gh"))], self._rng.randrange(4)

    def _ids(self, n: int) -> list[int]:
        return [self._rng.randrange(64) for _ in range(n)]

    def _command(self, name: str) -> Command:
        rng, share = self._rng, Share(session=self._rng.choice("abc"))
        sampling = Sampling(rng.choice([0.0, 0.8]), seed=rng.randrange(1 << 64))
        limits = Limits(rng.randrange(1, 24), stop_token_ids=tuple(self._ids(rng.randrange(2))))
        text = rng.choice(self._texts)
        text = text[: rng.randrange(1, len(text) + 1)] + self._ids(rng.randrange(4))
        kind = rng.choice(["generate"] * 5 + ["cancel", "prioritize"])
        if self._has_capsules:
            kind = rng.choice([kind, "prefill", "fork", "release"])
        names = list(self._capsules)
        if kind == "cancel" and self.plans:
            return Cancel(*rng.choice(list(self.plans)))
        if kind == "prioritize" and self.plans:
            return Prioritize(rng.choice(list(self.plans))[0], rng.choice([-1.0, 2.0]))
        if kind == "prefill":
            self._capsules[f"{name}.0"] = text
            return Prefill(name, pack_tokens(text), share=share)
        if kind == "release" and len(names) > 2:
            del self._capsules[names[0]]
            return Release(names[0])
        if kind == "fork" and names:
            capsule = rng.choice(names)
            suffixes = [self._ids(rng.randrange(5)) for _ in range(rng.randrange(1, 4))]
            for i, suffix in enumerate(suffixes):
                self._plan(name, i, self._capsules[capsule] + suffix, sampling, limits)
            packed = tuple(pack_tokens(suffix) for suffix in suffixes)
            return Fork(name, capsule, packed, limits, sampling, share=share)
        n = rng.randrange(1, 4)
        for i in range(n):
            self._plan(name, i, text, sampling, limits)
        return Generate(name, pack_tokens(text), limits, sampling, n, share=share)

    def _plan(
        self, name: str, branch: int, text: list[int], sampling: Sampling, limits: Limits
    ) -> None:
        seed = branch_seed(sampling.seed, branch)
        self.plans[name, branch] = Plan(text, sampling, limits, seed)


def make_engine(max_answer_capsules: int, **options: Any) -> Engine:
    return Engine(
        MockForward(SPEC, num_blocks=34, block_size=4),
        config=EngineConfig(SchedulerConfig(16, 8), max_answer_capsules),
        clock=lambda: 0.0,
        worker=WorkerId("w0"),
        incarnation=Incarnation(1),
        **options,
    )


def run(engine: Engine, workload: Workload) -> list[StepResult]:
    """All steps until `engine` is idle."""
    results = []
    for commands, num_steps in workload.steps():
        for command, gateway in commands:
            engine.submit(command, gateway)
        results += [engine.step() for _ in range(num_steps)]
    while engine.has_work:
        results.append(engine.step())
    return results


def told(result: StepResult) -> Any:
    """The parts of a step's frames and events that both formats have.

    Since d762123 an update has `kept`, `retained`, `drafts` and `injected` at its end, a frame `replies`, an
    event of blocks `group` and of a capsule `scope`: here they say nothing, but that a prefill's capsule is
    kept. Of an error, code and text: its fields may be more.
    """
    frames = []
    for gateway, frame in result.frames.items():
        updates = [msgspec.structs.astuple(update) for update in frame.updates]
        new = {each[11:] for each in updates}
        assert new <= {(), ("", None, None, ""), ("kept", None, None, "")}, "fields that are new"
        assert not getattr(frame, "replies", ()), "replies to nothing"
        frames.append((gateway, frame.step, [_update(each) for each in updates]))
    batch = result.events
    events = None if batch is None else (batch.first_seq, [*map(_event, batch.events)])
    return result.step, frames, events


def _update(fields: tuple[Any, ...]) -> Any:
    *first, error, logprobs, position = fields[:11]
    return *first, error and error[:2], logprobs, position


def _event(event: Event) -> Any:
    fields = msgspec.structs.astuple(event)
    num = {CapsuleStored: 3, CapsuleReleased: 1}.get(type(event), 2)
    assert not any(fields[num:]), "fields that are new"
    return type(event).__name__, fields[:num]


def digest(results: list[StepResult]) -> str:
    return hashlib.sha256(repr([told(result) for result in results]).encode()).hexdigest()


@pytest.mark.parametrize("kind", GOLDEN)
def test_the_default_path_tells_what_it_told_before_there_were_tiers(kind: str) -> None:
    """The digest of all frames and events is that of commit d762123, and answers are linear reruns'.

    Without capsules of answers, prompts share the cache; with them, they fork. Rows and blocks are too few:
    branches wait, are preempted, and evict. Fields that came later are left out (`told`).
    """
    workload = Workload(16, has_capsules=kind == "capsules")
    engine = make_engine(8 if kind == "capsules" else 0)
    results = run(engine, workload)
    stats = engine.stats()
    assert stats.sched.num_preemptions, "there was room for all"
    assert stats.tree.num_evicted, "there was room for all"
    drawn: dict[tuple[str, int], list[int]] = {}
    ends = {}
    for result in results:
        for frame in result.frames.values():
            for update in frame.updates:
                drawn.setdefault((update.request, update.branch), []).extend(update.tokens)
                ends[update.request, update.branch] = update.finish
    for name, plan in workload.plans.items():
        tokens, num = drawn.get(name, []), plan.limits.max_tokens
        alone = linear_tokens(SPEC, plan.text, num, sampling=plan.sampling, seed=plan.seed)
        assert tokens == alone[: len(tokens)], name
        assert len(tokens) == num or ends.get(name) != "length", name
    assert sum(end == "length" for end in ends.values()) > 50, "few answers are whole"
    assert digest(results) == GOLDEN[kind]


@pytest.mark.parametrize("kind", GOLDEN)
def test_tiers_that_hold_nothing_change_no_byte(kind: str) -> None:
    """Every frame and batch of events, encoded, is that of an engine without tiers."""

    def encoded(**options: Any) -> list[bytes]:
        workload = Workload(17, has_capsules=kind == "capsules")
        results = run(make_engine(8 if kind == "capsules" else 0, **options), workload)
        return [encode([*result]) for result in results]

    assert encoded(below=make_tiers(0)) == encoded()
