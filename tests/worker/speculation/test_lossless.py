"""Answers with drafts are those without, to the token, whoever drafts and whatever else happens."""

import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, cast, get_args

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test

from bench.doubles.forward import MockForward, draw_token
from bench.doubles.random_model import random_model
from bench.doubles.structures import MockStructures
from mallee.mocker.passes import mock_spec
from mallee.protocol import model
from mallee.protocol.errors import DeviceMemoryExhausted
from mallee.protocol.ids import branch_seed
from mallee.protocol.messages import (
    Capture,
    Command,
    Fork,
    Generate,
    Grammar,
    Limits,
    Prefill,
    Sampling,
    pack_tokens,
)
from mallee.worker.engine import Engine
from mallee.worker.forward import Forward, ForwardBatch
from mallee.worker.kv.watch import KVChecks
from mallee.worker.model.parity.tolerance import TOLERANCES
from mallee.worker.records import EngineConfig
from mallee.worker.sched.branch import Branch
from mallee.worker.sched.policy import SchedulerConfig
from mallee.worker.speculation.drafters import Drafter
from mallee.worker.speculation.speculator import SpeculationConfig
from support.driving import engine_over
from support.engine_machine import QUIET, EngineMachine, Fallible, PassFailed, TorchMachine
from support.examples import examples
from support.fold_forward import FoldForward
from support.speculating import (
    CheckedModel,
    EachAlone,
    Free,
    Kind,
    Knowing,
    Name,
    Teller,
    Unsure,
    draft_by,
)
from support.tiered_machine import TieredStateMachine

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB, SIZE = 24, 4
SPEC = mock_spec(vocab_size=VOCAB, max_model_len=4096)
KINDS: tuple[Kind | Literal["model"], ...] = (*get_args(Kind), "model")
WAYS = {
    "greedy": Sampling(),
    "sampled": Sampling(0.8, seed=5, logprobs=2),
    "penalised": Sampling(0.7, seed=6, repetition_penalty=1.2, presence_penalty=0.4, top_p=0.9),
}
TINY_VOCAB, EOS = 128, 2
GRAMMARS = (
    Grammar("choice", "[[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 9], [10, 11, 12, 13, 14, 15]]"),
    Grammar("json_object", ""),
    Grammar("regex", "7"),  # breaks after so many tokens
)


HYBRID = pytest.mark.parametrize("is_hybrid", [False, True])


def make_mocked(is_hybrid: bool = False, **options: Any) -> MockForward:
    options = {"num_blocks": 400, "block_size": SIZE, **options}
    return (
        FoldForward(**{"vocab_size": VOCAB, **options})
        if is_hybrid
        else MockForward(SPEC, **options)
    )


def make_engine(forward: Any = None, *, speculates: bool = False, **sched: Any) -> Engine:
    config = {"max_step_tokens": 24, "max_rows": 8, **sched}
    is_mocked = isinstance(forward, MockForward | None)
    checks = KVChecks("guards", sweep_steps=8) if is_mocked else KVChecks()
    forward = forward or make_mocked()
    return engine_over(
        forward,
        config=EngineConfig(
            SchedulerConfig(**config),
            max_answer_capsules=64,
            kv_checks=checks,
            speculation=SpeculationConfig("auto" if speculates else "off", 5),
        ),
        structures=MockStructures(forward.spec.vocab_size, (EOS,)),
    )


def make_drafter(kind: Kind | Literal["model"], answers: Mapping[Name, Sequence[int]]) -> Drafter:
    """One that knows `answers`, or a model with fewer blocks than the texts of all branches have."""
    if kind != "model":
        return Knowing(kind, answers, vocab=VOCAB)
    forward = MockForward(SPEC, num_blocks=40, block_size=SIZE)
    return CheckedModel(Unsure(forward), lambda draw: forward.sample([draw])[0], max_step_tokens=9)


def generate(name: str, text: Sequence[int], limits: Limits, **options: Any) -> Generate:
    return Generate(name, pack_tokens(list(text)), limits, **options)


# Of tiny real models


def make_tiny(family: str, *, speculates: bool) -> Engine:
    """With room for all states: what is evicted is no matter here."""
    forward: Any = make_mocked(is_hybrid=True, vocab_size=TINY_VOCAB, num_blocks=1024)
    if family != "hybrid":
        forward = random_model(family, 3).forward(num_blocks=1024, block_size=SIZE)
    return make_engine(forward, speculates=speculates, max_step_tokens=64, max_rows=16)


def play(engine: Engine) -> Teller:
    """Prompts, forks in mid-block with and without suffixes, and answers under grammars, all at once."""
    rng = random.Random(3)
    teller = Teller(engine)
    text = [rng.randrange(TINY_VOCAB) for _ in range(37)]
    teller.run(Prefill("p", pack_tokens(text)))
    suffixes = (b"", pack_tokens([5, 6, 7]))
    for name, sampling in WAYS.items():
        limits = Limits(24, ignore_eos=True, stop_token_ids=(3, 77), min_tokens=4)
        engine.submit(Fork(f"f-{name}", "p.0", suffixes, limits, sampling), "g")
        engine.submit(Generate(name, pack_tokens(text[:21]), limits, sampling, 2), "g")
    for i, grammar in enumerate(GRAMMARS):
        engine.submit(generate(f"c{i}", text[5:9], Limits(20), grammar=grammar), "g")
    teller.run()
    return teller


def read_kv(engine: Engine) -> Any:
    """Of the layers with full attention, all of it; of windows what is read elsewhere is no more there."""
    forward: Any = engine._forward

    def read(table: list[int], num: int) -> Any:
        if isinstance(forward, MockForward):
            return torch.from_numpy(forward.kv[table].reshape(-1)[:num].view(np.int64))
        memory = forward._memory
        slots = [block * SIZE + i for block in table for i in range(SIZE)][:num]
        return memory[:, slots].clone()

    return read


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize(
    "family",
    [
        *(
            pytest.param(family, marks=pytest.mark.slow)
            for family in ("llama", "qwen3", "gemma3_text", "qwen3_5_text")
        ),
        "hybrid",
    ],
)
def test_every_family_answers_as_without_drafts(
    family: str, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I15, F27, part: greedy, sampled, penalised and constrained rows in one batch, beyond a window.

    The same tokens, log-probabilities, ends and capsules, the same blocks and states stored, and the same KV
    but for rounding; drafts that are right, wrong, right at first, or anything. Slots for states are many: if
    they are few, which capsules give theirs up depends on what else runs just then.
    """
    monkeypatch.setattr(model, "MIN_STATES", 256)
    monkeypatch.setattr(model, "FEWEST_STATES", 256)
    plain = make_tiny(family, speculates=False)
    expected = play(plain)
    engine = make_tiny(family, speculates=True)
    draft_by(engine, Knowing(kind, expected.answers(), vocab=TINY_VOCAB))
    teller = play(engine)
    atol = TOLERANCES["float32"].logits
    for name, told in expected.told().items():
        found = teller.told()[name]
        assert found._replace(logprobs=()) == told._replace(logprobs=())
        for (ours, _), (theirs, _) in zip(found.logprobs, told.logprobs, strict=True):
            assert ours == pytest.approx(theirs, abs=atol)
    stats = engine.stats().speculation
    assert stats.num_drafted > 30
    if kind == "wrong":
        assert not stats.num_accepted
    if kind == "right":
        assert teller.most_tokens == (SIZE if engine.spec.has_states else 6)  # up to a block's end
        assert stats.num_accepted == stats.num_drafted
        assert teller.num_steps < 0.6 * expected.num_steps
    assert (teller.drafts.total(), teller.accepted.total()) == stats
    assert not expected.drafts.total()
    assert teller.stored() == expected.stored()
    kept, theirs = teller.kv(read_kv(engine)), expected.kv(read_kv(plain))
    assert kept.keys() == theirs.keys() != set()
    for name, values in kept.items():
        torch.testing.assert_close(values, theirs[name], atol=atol, rtol=atol)


# Of mocked ones


def played(command: Command, *, is_hybrid: bool = False) -> Teller:
    """By an engine that doesn't speculate."""
    teller = Teller(make_engine(make_mocked(is_hybrid)))
    teller.run(command)
    return teller


@HYBRID
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_stop_inside_a_draft_rolls_back_to_it(temperature: float, is_hybrid: bool) -> None:
    """F27, F13, part: the capsule goes on from there as a cold prompt of the same text does."""
    sampling, text = Sampling(temperature, seed=3), list(range(1, 14))
    command = generate("r", text, Limits(40, ignore_eos=True), sampling=sampling)
    whole = played(command, is_hybrid=is_hybrid).answers()["r", 0]
    at = next(i for i in range(9, 40) if whole[i] not in whole[:i] and i % 6 not in (0, 1))
    limits = Limits(40, stop_token_ids=(whole[at],), ignore_eos=True)
    engine = make_engine(make_mocked(is_hybrid), speculates=True)
    draft_by(engine, Knowing("right", {("r", 0): whole}, vocab=VOCAB))
    teller = Teller(engine)
    teller.run(generate("r", text, limits, sampling=sampling))
    told = teller.told()["r", 0]
    assert told.tokens == tuple(whole[:at])
    assert (told.finish, told.boundary) == ("stop", len(text) + at)
    assert engine.stats().speculation.num_accepted > at // 2
    assert told.capsule is not None
    after = Limits(12, ignore_eos=True)
    teller.run(Fork("f", told.capsule, (b"",), after))
    cold = played(generate("c", text + whole[:at], after), is_hybrid=is_hybrid)
    assert teller.answers()["f", 0] == cold.answers()["c", 0]


@HYBRID
@pytest.mark.parametrize("kind", KINDS)
def test_a_running_branch_is_captured_at_what_was_accepted(
    kind: Kind | Literal["model"], is_hybrid: bool
) -> None:
    """F27, part: its capsule has the tokens that were told, and goes on as the branch itself."""
    sampling, text = Sampling(0.9, seed=3), list(range(1, 14))
    command = generate("r", text, Limits(40, ignore_eos=True), sampling=sampling)
    plain = played(command, is_hybrid=is_hybrid)
    whole = plain.answers()["r", 0]
    engine = make_engine(make_mocked(is_hybrid), speculates=True)
    draft_by(engine, make_drafter(kind, plain.answers() | {("f", 0): whole[4:]}))
    teller = Teller(engine)
    engine.submit(command, "g")
    for i in range(6):
        teller.step()
        engine.submit(Capture(f"c{i}", "r"), "g")
        if ("r", 0) in teller.told():
            engine.submit(Fork(f"f{i}", f"c{i}.0", (b"",), Limits(0), resumes=True), "g")
    teller.run()
    assert teller.answers()["r", 0] == whole
    forks = {name[0]: tokens for name, tokens in teller.answers().items() if name[0] != "r"}
    assert len(forks) == 6 - is_hybrid  # whose prompt takes two steps
    assert all(tokens == whole[40 - len(tokens) :] for tokens in forks.values())


def test_what_a_sister_drew_is_accepted_and_what_differs_costs_little() -> None:
    """X23: an answer drawn again takes few steps; sisters that differ are soon drafted for no more."""
    engine = make_engine(speculates=True, max_rows=16)
    teller, text = Teller(engine), list(range(1, 14))
    limits = Limits(60, ignore_eos=True)
    teller.run(generate("r", text, limits))
    num_first = teller.num_steps
    teller.run(generate("s", text, limits, n=2))
    assert teller.answers()["s", 1] == teller.answers()["r", 0]
    assert teller.num_steps - num_first < 0.3 * num_first
    before = engine.stats().speculation
    assert before.num_accepted > 90
    teller.run(generate("t", text, limits, sampling=Sampling(0.9, seed=2), n=8))
    after = engine.stats().speculation
    assert after.num_drafted - before.num_drafted < 0.2 * 8 * 60


@HYBRID
def test_a_step_too_large_by_its_drafts_ends_no_branch(is_hybrid: bool) -> None:
    """F27, part: it is taken again without drafts, and those branches have none for a while."""
    text, limits = list(range(1, 6)), Limits(60, ignore_eos=True)
    command = generate("r", text, limits, n=3, sampling=Sampling(0.9, seed=1))
    plain = played(command, is_hybrid=is_hybrid)
    engine = make_engine(make_mocked(is_hybrid), speculates=True)
    draft_by(engine, Knowing("right", plain.answers(), vocab=VOCAB))
    forward: Any = engine._forward
    compute = forward.forward

    def narrow(batch: ForwardBatch) -> Sequence[Any]:
        num = sum(len(row.tokens) for row in batch.rows)
        if num > 6:
            raise DeviceMemoryExhausted(f"no room for {num} tokens")
        found: Sequence[Any] = compute(batch)
        return found

    forward.forward = narrow
    teller = Teller(engine)
    teller.run(command)
    assert teller.told() == plain.told()
    assert teller.num_steps > plain.num_steps / 2


@pytest.mark.parametrize("kind", get_args(Kind))
def test_an_answer_leaves_states_where_it_does_without_drafts(kind: Kind) -> None:
    """F12, part, F27, part: each 32 blocks, whatever is accepted there; a text that ends there resumes there.

    No draft goes beyond such a place, and no pass that verifies one leaves a state of its own.
    """
    text, limits = list(range(1, 14)), Limits(270, ignore_eos=True)
    command = generate("r", text, limits, sampling=Sampling(0.9, seed=3))
    plain = played(command, is_hybrid=True)
    engine = make_engine(make_mocked(is_hybrid=True), speculates=True)
    draft_by(engine, Knowing(kind, plain.answers(), vocab=VOCAB))
    teller = Teller(engine)
    teller.run(command)
    assert teller.told() == plain.told()
    assert teller.stored() == plain.stored()
    whole = plain.answers()["r", 0]
    for each in (teller, plain):
        each.run(generate("s", [*text, *whole[:260]], Limits(1)))
        assert each.updates("s")[0].cached_tokens == 256


def test_drafts_need_no_free_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """F27, part: where all slots are cache, a draft still gets blocks: its pass has a slot."""
    monkeypatch.setattr(model, "MIN_STATES", 6)
    command = generate("r", list(range(1, 14)), Limits(60, ignore_eos=True))
    plain = played(command, is_hybrid=True)
    engine = make_engine(make_mocked(is_hybrid=True), speculates=True)
    draft_by(engine, Knowing("right", plain.answers(), vocab=VOCAB))
    teller = Teller(engine)
    for i in range(8):
        teller.run(generate(f"s{i}", [5 + i] * 13, Limits(1)))
    assert engine._tree.sides[0].pool.num_free <= 1  # it is the next branch's
    before = teller.num_steps
    teller.run(command)
    assert teller.answers()["r", 0] == plain.answers()["r", 0]
    assert teller.num_steps - before < 19  # a block of 4 a step


def test_ended_branches_are_forgotten() -> None:
    """X23, part: drafters remember no more branches than twice those that live."""
    engine = make_engine(speculates=True)
    teller = Teller(engine)
    for i in range(150):
        teller.run(generate(f"r{i}", [1 + i % 20, 2, 3], Limits(3, ignore_eos=True)))
    assert engine._speculator is not None
    assert len(engine._speculator._branches) <= 64
    assert all(len(each._drawn) <= 64 for each in engine._speculator.drafters)  # type: ignore[attr-defined]


# Everything that can happen to an engine that speculates, in any order: nothing leaks, no answer changes


class Rerunning(EachAlone):
    """A drafter that runs the branch by itself, and tells the truth up to a token drawn by lot."""

    def __init__(self, machine: EngineMachine) -> None:
        self._machine = machine
        self._rng = random.Random(0)

    def read(self, branch: Branch) -> None:
        """It needs nothing of what was drawn."""

    def forget(self, branch: Branch) -> None:
        """It remembers nothing of a branch."""

    def propose(self, branch: Branch, num_tokens: int) -> list[int]:
        plan = self._machine.plans[branch.job.command.request, branch.index]
        seed, num = branch_seed(plan.sampling.seed, branch.index), branch.num_output
        if plan.grammar is None:
            draft = self._machine.rerun(plan, num + num_tokens, seed)[num:]
        else:
            draft = [self._rng.randrange(3, 7) for _ in range(num_tokens)]
        wrong = self._rng.randrange(num_tokens + 3)
        return [t if i < wrong else 3 + (t + 1) % 3 for i, t in enumerate(draft)]


class SpeculatingMachine(EngineMachine):
    """Drafts that are right at first."""

    speculation = SpeculationConfig("auto", 6)

    def begun(self) -> None:
        drafter: Drafter = Rerunning(self)
        draft_by(self.engine, drafter)


class SpeculatingStates(SpeculatingMachine, TieredStateMachine):
    """The same with a layer that folds all tokens into a state, and tiers below."""


class LookingUp(EngineMachine):
    """Drafts from texts that repeat themselves, as their vocabulary is small."""

    speculation = SpeculationConfig("auto")

    def begun(self) -> None:
        assert self.engine._speculator is not None
        self.engine._speculator._costs = Free()


class LookingUpTorch(TorchMachine):
    """The same on a real, tiny model in float32."""

    speculation = SpeculationConfig("auto")

    def begun(self) -> None:
        assert self.engine._speculator is not None
        self.engine._speculator._costs = Free()


class Drafting(EngineMachine):
    """Drafts of a model that is mostly right, has few blocks, and may fail or have too little memory."""

    speculation = SpeculationConfig("auto", 6)

    def begun(self) -> None:
        forward = MockForward(self.forward.spec, num_blocks=14, block_size=4)
        self.draft = Fallible(cast(Forward, Unsure(forward)))
        self.drafter = CheckedModel(self.draft, partial(draw_token, 8), max_step_tokens=7)
        draft_by(self.engine, self.drafter)

    @rule(point=st.sampled_from(["before", "after", "sampling"]), is_full=st.booleans())
    def fail_to_draft_soon(self, point: str, is_full: bool) -> None:
        """One of the next passes of drafts raises: with too little memory that ends nothing."""
        self.draft.fails = point
        self.draft.error = DeviceMemoryExhausted("full") if is_full else PassFailed()

    @invariant()
    def drafts_are_well(self) -> None:
        self.drafter.check()

    def teardown(self) -> None:
        self.draft.fails = None
        super().teardown()
        for branch in list(self.drafter._followed):
            self.drafter.forget(branch)
        self.drafter.check()
        tree = self.drafter._tree
        assert tree.num_available == tree.pool.num_blocks, "a leak"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "num", "steps"),
    [
        *((SpeculatingMachine, 60, 40), (Drafting, 60, 40), (SpeculatingStates, 60, 50)),
        *((LookingUp, 40, 40), (LookingUpTorch, 8, 25)),
    ],
)
def test_every_branch_draws_what_a_linear_rerun_draws(
    machine: type[EngineMachine], num: int, steps: int
) -> None:
    """F27, part, I15, part: random trees of all kinds of requests on small pools, under every policy, with
    passes that fail, cancels, lost gateways, preemption, eviction and releases while drafts are under way.
    """
    bounds = settings(examples(num), stateful_step_count=steps, suppress_health_check=QUIET)
    run_state_machine_as_test(machine, settings=bounds)
