"""The draft model: what it computes, shares, remembers and gives up, and when it is not worth its time."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

from bench.doubles.forward import MockForward
from bench.doubles.random_model import random_model
from mallee.mocker.passes import mock_spec
from mallee.protocol.errors import ConfigError, DeviceMemoryExhausted
from mallee.protocol.messages import Fork, Generate, Limits, Prefill, Sampling, pack_tokens
from mallee.protocol.model import WeightVersion
from mallee.worker.engine import Engine
from mallee.worker.forward import ForwardBatch
from mallee.worker.records import EngineConfig
from mallee.worker.sched.branch import Branch
from mallee.worker.sched.policy import SchedulerConfig
from mallee.worker.speculation.draft_model import DraftModel
from mallee.worker.speculation.speculator import SpeculationConfig, SpeculationName
from support.driving import engine_over
from support.fold_forward import FoldForward
from support.speculating import EachAlone, Teller, draft_by, draft_model

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB, SIZE = 64, 4
SPEC = mock_spec(vocab_size=VOCAB, max_model_len=4096)


class Counted(MockForward):
    """Remembers the size of each pass."""

    def __init__(self, *, num_blocks: int = 400) -> None:
        super().__init__(SPEC, num_blocks=num_blocks, block_size=SIZE)
        self.sizes: list[int] = []

    def forward(self, batch: ForwardBatch) -> Sequence[Any]:
        self.sizes.append(sum(len(row.tokens) for row in batch.rows))
        return super().forward(batch)


class Timed(Counted):
    """A pass takes a time of its own, and little for each token."""

    def __init__(self, now: list[float], pass_s: float, token_s: float) -> None:
        super().__init__()
        self._now, self._pass_s, self._token_s = now, pass_s, token_s

    def forward(self, batch: ForwardBatch) -> Sequence[Any]:
        self._now[0] += self._pass_s + self._token_s * sum(len(row.tokens) for row in batch.rows)
        return super().forward(batch)


def make_engine(
    forward: Any, model: DraftModel | None, *, drafters: SpeculationName = "model", **options: Any
) -> Engine:
    return engine_over(
        forward,
        config=EngineConfig(
            SchedulerConfig(options.pop("max_step_tokens", 64), 16),
            speculation=SpeculationConfig(drafters if model else "off"),
        ),
        clock=options.pop("clock", lambda: 0.0),
        draft_model=model,
        **options,
    )


def make_mocked(forward: MockForward | None = None, **options: Any) -> tuple[Engine, DraftModel]:
    """An engine with a draft model that is always right, and is always asked."""
    model = draft_model(forward or Counted(), **options)
    engine = make_engine(MockForward(SPEC, num_blocks=400, block_size=SIZE), model)
    draft_by(engine, model)
    return engine, model


def text(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(n)]


def generate(name: str, tokens: list[int], num: int, n: int = 1, **options: Any) -> Generate:
    return Generate(name, pack_tokens(tokens), Limits(num, ignore_eos=True), n=n, **options)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_a_model_that_drafts_for_itself_is_right_every_time(family: str) -> None:
    """I15, part, I29, part: also where tokens are drawn, penalised, and beyond a window: the same noise.

    With forks in mid-block, some with a suffix.
    """
    tiny = random_model(family, 3)

    def play(model: DraftModel | None) -> Teller:
        engine = make_engine(tiny.forward(num_blocks=300, block_size=SIZE), model)
        if model is not None:
            draft_by(engine, model)
        teller, tokens = Teller(engine), text(37)
        teller.run(Prefill("p", pack_tokens(tokens)))
        for i, sampling in enumerate((Sampling(), Sampling(0.8, seed=5, top_k=40), penalised)):
            limits = Limits(24, ignore_eos=True)
            engine.submit(
                Fork(f"f{i}", "p.0", (b"", pack_tokens([5, 6, 7])), limits, sampling), "g"
            )
            engine.submit(generate(f"g{i}", tokens[:21], 24, n=2, sampling=sampling), "g")
        teller.run()
        return teller

    penalised = Sampling(0.7, seed=6, repetition_penalty=1.2, presence_penalty=0.4, top_p=0.9)
    plain = play(None)
    model = draft_model(tiny.forward(num_blocks=300, block_size=SIZE), max_step_tokens=16)
    teller = play(model)
    assert teller.answers() == plain.answers()
    stats = teller.engine.stats().speculation
    assert stats.num_accepted == stats.num_drafted > 100
    assert teller.num_steps < 0.7 * plain.num_steps


def test_sisters_and_forks_compute_what_they_share_once() -> None:
    """I29, part: eight choices of a prompt, then forks of an answer."""
    forward = Counted()
    engine, model = make_mocked(forward)
    teller = Teller(engine)
    teller.run(generate("r", text(120), 6, n=8, sampling=Sampling(0.9, seed=1)))
    before = sum(forward.sizes)
    assert before < 120 + 8 * 2 * 6
    capsule = teller.told()["r", 3].capsule
    assert capsule is not None
    forward.sizes.clear()
    teller.run(Fork("f", capsule, (b"",) * 4, Limits(6, ignore_eos=True)))
    assert sum(forward.sizes) < 4 * (SIZE + 2 * 6)
    assert model._tree.stats().num_children > 3


def test_a_long_prompt_is_computed_in_chunks_beside_answers_that_go_on() -> None:
    """I15, part: no step computes more of texts than it may, and no answer waits for it."""
    forward = Counted()
    engine, _ = make_mocked(forward, max_step_tokens=10)
    teller = Teller(engine)
    teller.run(generate("r", text(150), 40))
    assert max(forward.sizes) == 10
    assert 15 <= forward.sizes.count(10) <= 17
    assert teller.num_steps < 3 + 15 + 10
    assert engine.stats().speculation.num_accepted > 15


def test_drafts_share_the_tokens_that_a_step_has_left() -> None:
    """I15, part: a drafter is asked for no more than can be verified."""
    asked: list[int] = []

    class Asked(EachAlone):
        def read(self, branch: Branch) -> None: ...

        def forget(self, branch: Branch) -> None: ...

        def propose(self, branch: Branch, num_tokens: int) -> Sequence[int]:
            asked.append(num_tokens)
            return [1] * num_tokens

    forward = Counted()
    engine = make_engine(forward, draft_model(Counted()), max_step_tokens=12)
    draft_by(engine, Asked())
    for i in range(4):
        engine.submit(generate(f"r{i}", text(5, seed=i), 20), "g")
    Teller(engine).run()
    assert max(forward.sizes) == 12
    assert engine.stats().speculation.num_drafted == sum(asked) > 20


def test_the_texts_used_longest_ago_make_way() -> None:
    """I29, part: blocks for two texts; each is computed again after two others, and all are drafted for."""
    forward = Counted(num_blocks=22)
    engine, model = make_mocked(forward)
    teller = Teller(engine)
    for _ in range(2):
        for i in range(4):
            teller.run(generate(f"r{teller.num_steps}", text(30, seed=i), 8))
    assert engine.stats().speculation.num_accepted > 8 * 4
    assert model._tree.stats().num_evicted > 20
    forward.sizes.clear()
    teller.run(generate("last", text(30, seed=3), 8))
    assert sum(forward.sizes) < 20, "what was used last is there"


def test_a_draft_model_without_memory_rests_and_ends_nothing() -> None:
    """I29, part: every pass fails for a while; then it drafts again."""
    forward = Counted()
    engine, _ = make_mocked(forward)
    compute, failing = forward.forward, [True]

    def full(batch: ForwardBatch) -> Sequence[Any]:
        if failing:
            num_failed.append(1)
            raise DeviceMemoryExhausted("no room for a draft")
        return compute(batch)

    num_failed: list[int] = []
    forward.forward = full  # type: ignore[method-assign]
    teller = Teller(engine)
    engine.submit(generate("r", text(9), 200), "g")
    for _ in range(60):
        teller.step()
    assert 2 <= len(num_failed) <= 4, "it did not rest"
    failing.clear()
    teller.run()
    plain = Teller(make_engine(MockForward(SPEC, num_blocks=400, block_size=SIZE), None))
    plain.run(generate("r", text(9), 200))
    assert teller.told() == plain.told()
    assert engine.stats().speculation.num_accepted > 50


@pytest.mark.parametrize(("pass_s", "drafts"), [(0.02, True), (1.5, False)])
def test_a_draft_that_takes_longer_than_it_spares_is_given_up(pass_s: float, drafts: bool) -> None:
    """I15, part: its passes are timed, and count as a part of a position. Of right drafts!"""
    now = [0.0]

    model = DraftModel(Timed(now, pass_s, 1e-3), clock=lambda: now[0])
    engine = make_engine(Timed(now, 1.0, 1e-3), model, clock=lambda: now[0])
    teller = Teller(engine)
    teller.run(generate("r", text(9), 120, n=2))
    stats = engine.stats().speculation
    assert (stats.num_drafted > 120) == drafts
    if not drafts:
        assert stats.num_drafted < 2 * 16, "not even for a trial, once its cost is known"
    assert (now[0] < 60) == drafts
    assert now[0] < 140


def test_a_short_answer_is_not_worth_a_long_prompt() -> None:
    """I15, part: the time to compute a text is a part of the price of its drafts."""
    now = [0.0]

    forward = Timed(now, 0.1, 0.01)
    model = DraftModel(forward, clock=lambda: now[0], max_step_tokens=64)
    engine = make_engine(Timed(now, 1.0, 0.01), model, clock=lambda: now[0])
    teller = Teller(engine)
    teller.run(generate("r", text(20), 60))
    num = sum(forward.sizes)
    assert num > 40
    teller.run(generate("s", text(900, seed=1), 5))
    assert sum(forward.sizes) == num, "it computed a prompt of 900 tokens for 5"


def test_other_weights_in_the_same_memory_are_drafted_for(tmp_path: Path) -> None:
    """I29, part: the next engine finds nothing of the last one's, and its drafts change no answer."""
    tiny, other = random_model("llama", 3), random_model("llama", 4)
    drafts = tiny.forward(num_blocks=60, block_size=SIZE)
    target = tiny.forward(num_blocks=60, block_size=SIZE)
    other.save(tmp_path)
    command = generate("r", text(21), 30, sampling=Sampling(0.8, seed=2))
    for is_other in (False, True):
        if is_other:
            target.update(target.prepare_update(tmp_path, WeightVersion(1, "next")))
        plain = Teller(make_engine(target, None))
        engine = make_engine(target, draft_model(drafts))
        assert engine._speculator is not None
        draft_by(engine, engine._speculator.drafters[0])
        teller = Teller(engine)
        for each in (plain, teller):
            each.run(command)
        assert teller.answers() == plain.answers()
        stats = engine.stats().speculation
        assert stats.num_drafted > 20
        assert (stats.num_accepted == stats.num_drafted) != is_other


def test_a_draft_model_and_the_choice_of_drafters_must_agree() -> None:
    for drafters in get_args(SpeculationName):
        if drafters in ("model", "auto"):
            continue
        with pytest.raises(ConfigError, match=f"'{drafters}' uses no draft model.*model, auto"):
            make_engine(Counted(), draft_model(Counted()), drafters=drafters)
    for config, message in (
        (SpeculationConfig("model"), "speculation='model' needs a draft model"),
        (SpeculationConfig("prompts"), "speculation='prompts': give one of off, prompt"),  # type: ignore[arg-type]
        (SpeculationConfig("auto", 0), "num_speculative_tokens=0: give at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine_over(Counted(), config=EngineConfig(speculation=config))


def test_a_draft_model_with_recurrent_layers_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"draft_model mock has recurrent layers.*set speculation to prompt"
    ):
        draft_model(FoldForward(num_blocks=64))


def test_lookups_come_before_the_model() -> None:
    """I15, part: a model is asked for branches that no text has a draft for."""
    forward = Counted()
    engine = make_engine(Counted(), draft_model(forward), drafters="auto")
    teller = Teller(engine)
    teller.run(generate("r", text(9), 60))
    num = sum(forward.sizes)
    assert num > 20
    teller.run(generate("s", text(9), 60))
    assert sum(forward.sizes) - num < 0.3 * num
    assert teller.answers()["s", 0] == teller.answers()["r", 0]


def test_a_bias_of_a_token_that_only_the_answering_model_has_is_not_drafted_with() -> None:
    """I29, part: vocabularies of one family are padded to different sizes."""
    tiny = random_model("llama", 3)
    model = draft_model(tiny.forward(num_blocks=300, block_size=SIZE))
    size = tiny.config.vocab_size
    spec = mock_spec(vocab_size=size + 16, max_model_len=4096)
    engine = make_engine(MockForward(spec, num_blocks=400, block_size=SIZE), model)
    draft_by(engine, model)
    sampling = Sampling(0.8, seed=5, logit_bias=((3, 1.0), (size + 8, 1.0)))
    teller = Teller(engine)
    teller.run(generate("a", [1, 2, 3, 4, 5], 24, sampling=sampling))
    assert [len(answer) for answer in teller.answers().values()] == [24]
    assert engine.stats().speculation.num_drafted > 0
