"""Answers with drafts are those without, to the token, whoever drafts and whatever else happens."""

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import pytest
import xxhash

from mallee.mocker.passes import mock_spec
from mallee.protocol.errors import ConfigError, DeviceMemoryExhausted
from mallee.protocol.messages import (
    Cancel,
    Capture,
    Command,
    Fork,
    Generate,
    Grammar,
    Limits,
    Prefill,
    Release,
    Sampling,
    Share,
    TokenLogprobs,
    pack_tokens,
)
from mallee.testing.forward import MockForward, draw_token
from mallee.testing.structures import MockStructures
from mallee.worker.engine import Engine
from mallee.worker.forward import Draw, ForwardBatch, LogprobQuery
from mallee.worker.kv.watch import KVChecks
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig
from mallee.worker.speculation.drafters import Drafter
from mallee.worker.speculation.speculator import SpeculationConfig
from support.driving import engine_over
from support.speculating import CheckedModel, Kind, Knowing, Name, Teller, Told, Unsure, draft_by

VOCAB, EOS, SIZE = 24, 23, 4
SPEC = mock_spec(vocab_size=VOCAB, max_model_len=4096, eos_token_ids=(EOS,))
KINDS: tuple[Kind | Literal["model"], ...] = (*get_args(Kind), "model")
GRAMMARS = (
    Grammar("choice", "[[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 9], [10, 11, 12, 13, 14, 15]]"),
    Grammar("json_object", ""),
    Grammar("regex", "7"),  # breaks after so many tokens
)


class KeenForward(MockForward):
    """Its draws depend on histories too, and log-probabilities on logits."""

    def sample(self, draws: Sequence[Draw]) -> list[int]:
        return [draw_token(VOCAB, draw._replace(logits=_seen(draw))) for draw in draws]

    def logprobs(self, queries: Sequence[LogprobQuery]) -> list[TokenLogprobs]:
        chances = [-float(query.logits % 1000) / 1000 for query in queries]
        return [
            (chance, tuple((i, chance - i) for i in range(query.num_top)))
            for query, chance in zip(queries, chances, strict=True)
        ]


def _seen(draw: Draw) -> int:
    if draw.history is None:
        return int(draw.logits)
    draw.history.check()
    pairs = sorted(zip(draw.history.drawn.tolist(), draw.history.counts.tolist(), strict=True))
    key = [int(draw.logits), *(int(x) for pair in pairs for x in pair), *draw.history.prompt]
    return xxhash.xxh3_64_intdigest(np.array(key, dtype=np.uint64).tobytes())


def make_engine(*, speculates: bool = False, **sched: Any) -> Engine:
    config = {"max_step_tokens": 24, "max_rows": 8, **sched}
    return engine_over(
        KeenForward(SPEC, num_blocks=400, block_size=SIZE),
        config=EngineConfig(
            SchedulerConfig(**config),
            max_answer_capsules=64,
            kv_checks=KVChecks("guards", sweep_steps=8),
            speculation=SpeculationConfig("auto" if speculates else "off", 5),
        ),
        structures=MockStructures(VOCAB, (EOS,)),
    )


def make_drafter(kind: Kind | Literal["model"], answers: Mapping[Name, Sequence[int]]) -> Drafter:
    """One that knows `answers`, or a model with fewer blocks than the texts of all branches have."""
    if kind != "model":
        return Knowing(kind, answers, vocab=VOCAB)
    forward = KeenForward(SPEC, num_blocks=40, block_size=SIZE)
    return CheckedModel(Unsure(forward), lambda draw: forward.sample([draw])[0], max_step_tokens=9)


class Story(NamedTuple):
    """Phases of commands, each with the steps after it; a phase begins when the one before is over."""

    phases: list[list[tuple[Command, int]]]
    cancelled: set[tuple[str, int]]


def make_story(seed: int) -> Story:
    rng = random.Random(seed)
    phases: list[list[tuple[Command, int]]] = []
    cancelled: set[tuple[str, int]] = set()
    capsules: list[str] = []  # of phases that are over
    for phase in range(3):
        commands: list[tuple[Command, int]] = []
        names: list[tuple[str, int]] = []
        kept: list[str] = []
        for i in range(8):
            name = f"r{phase}-{i}"
            kind = rng.choice(["generate", "generate", "prefill", "fork", "fork", "cancel"])
            command: Command
            if kind == "prefill":
                command = Prefill(name, pack_tokens(_ids(rng, rng.randrange(1, 20))))
                kept.append(f"{name}.0")
            elif kind == "fork" and capsules + kept:
                texts = [_ids(rng, rng.randrange(4)) for _ in range(rng.randrange(1, 4))]
                suffixes = tuple(map(pack_tokens, texts))
                sampling, limits, grammar = _options(rng)
                command = Fork(
                    *(name, rng.choice(capsules + kept), suffixes, limits, sampling),
                    share=Share(session=rng.choice("ab")),
                    grammar=grammar,
                )
                names += [(name, k) for k in range(len(suffixes))]
            elif kind == "cancel" and names:
                command = Cancel(*(cut := rng.choice(names)))
                cancelled.add(cut)
            else:
                sampling, limits, grammar = _options(rng)
                n = rng.randrange(1, 4)
                command = Generate(
                    *(name, pack_tokens(_ids(rng, rng.randrange(1, 24))), limits, sampling, n),
                    share=Share(session=rng.choice("ab"), priority=float(rng.randrange(2))),
                    grammar=grammar,
                )
                names += [(name, k) for k in range(n)]
            commands.append((command, rng.randrange(4)))
        capsules += kept
        if len(capsules) > 6:
            commands.append((Release(capsules.pop(0)), 0))
        phases.append(commands)
    return Story(phases, cancelled)


def _ids(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(VOCAB - 1) for _ in range(n)]


def _options(rng: random.Random) -> tuple[Sampling, Limits, Grammar | None]:
    sampling = Sampling(
        rng.choice([0.0, 0.9]),
        seed=rng.randrange(1 << 64),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.5]),
        logprobs=rng.choice([-1, -1, 0, 2]),
    )
    most = rng.randrange(1, 40)
    limits = Limits(
        most,
        stop_token_ids=tuple(_ids(rng, rng.choice([0, 0, 1, 2]))),
        ignore_eos=rng.random() < 0.6,
        min_tokens=rng.choice([0, 0, rng.randrange(most + 1)]),
    )
    return sampling, limits, rng.choice([None, None, None, *GRAMMARS])


def play(engine: Engine, story: Story) -> Teller:
    teller = Teller(engine)
    for phase in story.phases:
        for command, num_steps in phase:
            engine.submit(command, "g")
            for _ in range(num_steps):
                teller.step()
        teller.run()
    return teller


def assert_same(found: dict[Any, Told], expected: dict[Any, Told], story: Story) -> None:
    assert found.keys() | story.cancelled == expected.keys() | story.cancelled
    for name, told in expected.items():
        if name not in story.cancelled:
            assert found[name] == told, name
            continue
        own = found.get(name)
        tokens = () if own is None else own.tokens  # cancelled elsewhere in its answer
        num = min(len(tokens), len(told.tokens))
        assert tokens[:num] == told.tokens[:num], name


def read_kv(engine: Engine) -> Any:
    forward: Any = engine._forward
    return lambda table, num: forward.kv[table].reshape(-1)[:num].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 27])  # 27 cancels nothing
def test_answers_events_and_kv_are_those_of_plain_decoding(
    seed: int, kind: Kind | Literal["model"]
) -> None:
    """F27, I15, I29, part: tokens, log-probabilities, ends, capsules and their KV, blocks stored.

    Greedy and sampled, with penalties, grammars, stop ids, EOS and least lengths, several choices, forks and
    cancels, in mixed batches; drafts that are right, wrong, right at first, or anything.
    """
    story = make_story(seed)
    plain = make_engine()
    expected = play(plain, story)
    engine = make_engine(speculates=True)
    draft_by(engine, make_drafter(kind, expected.answers()))
    teller = play(engine, story)
    assert_same(teller.told(), expected.told(), story)
    stats = engine.stats().speculation
    assert stats.num_drafted > 25
    assert (teller.drafts.total(), teller.accepted.total()) == stats
    assert not expected.drafts.total()
    for name, told in teller.told().items():
        assert teller.accepted[name] <= min(len(told.tokens), teller.drafts[name])
    if kind == "right":
        assert stats.num_accepted == stats.num_drafted > 50
        assert teller.num_steps < 0.75 * expected.num_steps
        assert teller.most_tokens == 6
    if kind == "wrong":
        assert stats == (stats.num_drafted, 0)
    if kind == "model":
        assert 0.1 * stats.num_drafted < stats.num_accepted < stats.num_drafted
    if story.cancelled:
        return
    assert teller.stored() == expected.stored()
    assert teller.kv(read_kv(engine)) == expected.kv(read_kv(plain))


def generate(name: str, text: Sequence[int], limits: Limits, **options: Any) -> Generate:
    return Generate(name, pack_tokens(list(text)), limits, **options)


def played(command: Command) -> Teller:
    """By an engine that doesn't speculate."""
    teller = Teller(make_engine())
    teller.run(command)
    return teller


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_stop_inside_a_draft_rolls_back_to_it(temperature: float) -> None:
    """F27, F13, part: the capsule goes on from there as a cold prompt of the same text does."""
    sampling, text = Sampling(temperature, seed=3), list(range(1, 14))
    plain = played(generate("r", text, Limits(40, ignore_eos=True), sampling=sampling))
    whole = plain.answers()["r", 0]
    at = next(i for i in range(9, 40) if whole[i] not in whole[:i] and i % 6 not in (0, 1))
    limits = Limits(40, stop_token_ids=(whole[at],), ignore_eos=True)
    engine = make_engine(speculates=True)
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
    cold = played(generate("c", text + whole[:at], after))
    assert teller.answers()["f", 0] == cold.answers()["c", 0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_running_branch_is_captured_at_what_was_accepted(kind: Kind | Literal["model"]) -> None:
    """F27, part: its capsule has the tokens that were told, and goes on as the branch itself."""
    sampling, text = Sampling(0.9, seed=3), list(range(1, 14))
    plain = played(generate("r", text, Limits(40, ignore_eos=True), sampling=sampling))
    whole = plain.answers()["r", 0]
    engine = make_engine(speculates=True)
    draft_by(engine, make_drafter(kind, plain.answers() | {("f", 0): whole[4:]}))
    teller = Teller(engine)
    engine.submit(generate("r", text, Limits(40, ignore_eos=True), sampling=sampling), "g")
    for i in range(6):
        teller.step()
        engine.submit(Capture(f"c{i}", "r"), "g")
        if ("r", 0) in teller.told():
            engine.submit(Fork(f"f{i}", f"c{i}.0", (b"",), Limits(0), resumes=True), "g")
    teller.run()
    assert teller.answers()["r", 0] == whole
    forks = {name[0]: tokens for name, tokens in teller.answers().items() if name[0] != "r"}
    assert len(forks) == 6
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


def test_several_steps_are_taken_at_once_only_while_nothing_is_drafted() -> None:
    """I15, part: a pause of all drafters is such a time; the answers stay."""
    text, limits = list(range(1, 14)), Limits(90, ignore_eos=True)
    plain = played(generate("r", text, limits))
    engine = make_engine(speculates=True)
    engine._tree.pool.watch = None
    assert engine._speculator is not None
    engine._speculator.drafters = (Knowing("wrong", plain.answers(), vocab=VOCAB),)
    engine.submit(generate("r", text, limits), "g")
    tokens: list[int] = []
    num_single = num_at_once = 0
    while engine.has_work:
        limit = engine.multi_step_limit()
        result = engine.multi_step(limit) if limit > 1 else engine.step()
        num_at_once += limit > 1
        num_single += limit < 2
        for frame in result.frames.values():
            tokens += [t for update in frame.updates for t in update.tokens]
    assert tokens == plain.answers()["r", 0]
    assert num_at_once > 5
    assert num_single > 5


def test_a_step_too_large_by_its_drafts_ends_no_branch() -> None:
    """F27, part: it is taken again without drafts, and those branches have none for a while."""
    text, limits = list(range(1, 6)), Limits(60, ignore_eos=True)
    plain = played(generate("r", text, limits, n=3, sampling=Sampling(0.9, seed=1)))
    engine = make_engine(speculates=True)
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
    teller.run(generate("r", text, limits, n=3, sampling=Sampling(0.9, seed=1)))
    assert teller.told() == plain.told()
    assert teller.num_steps > plain.num_steps / 2


def test_ended_branches_are_forgotten() -> None:
    """X23, part: drafters remember no more branches than twice those that live."""
    engine = make_engine(speculates=True)
    teller = Teller(engine)
    for i in range(150):
        teller.run(generate(f"r{i}", [1 + i % 20, 2, 3], Limits(3, ignore_eos=True)))
    assert engine._speculator is not None
    assert len(engine._speculator._branches) <= 64
    assert all(len(each._drawn) <= 64 for each in engine._speculator.drafters)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SpeculationConfig("prompts"), "speculation='prompts': give one of off, prompt"),  # type: ignore[arg-type]
        (SpeculationConfig("auto", 0), "num_speculative_tokens=0: give at least 1"),
    ],
)
def test_settings_out_of_range_are_refused(config: SpeculationConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(speculation=config).validate()
