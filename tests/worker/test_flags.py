"""The engine's switches: none changes an answer, and those that contradict each other are refused."""

import itertools
import logging
import random
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest

from bench.doubles.forward import MockForward
from bench.doubles.random_model import random_model
from bench.mocker.policies import Fcfs
from mallee.mocker.passes import mock_spec
from mallee.protocol.errors import ConfigError
from mallee.protocol.messages import Command, Fork, Generate, Limits, Prefill, Sampling, pack_tokens
from mallee.worker.engine import Engine
from mallee.worker.forward import ForwardBatch
from mallee.worker.kv.node import BlockCopy
from mallee.worker.kv.watch import KVChecks
from mallee.worker.model.runner import TorchForward
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig
from mallee.worker.updates import switch_on
from support.driving import drive, engine_over

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTH = 128  # of the model's context
SLOTS = 8 * LENGTH
MODEL = random_model("llama", 5, max_position_embeddings=LENGTH)


@dataclass(frozen=True)
class Switch:
    """One feature: how to turn it off, in settings or in what computes."""

    engine: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)
    forward: dict[str, Any] = field(default_factory=dict)


SWITCHES: dict[str, Switch] = {
    "paged": Switch(forward={"block_size": LENGTH}),
    "prefix_cache": Switch(engine={"prefix_cache": False}),
    "tree_attention": Switch(forward={"shares_reads": False}),
    "overlap": Switch(engine={"overlap": False}),
    "chunked": Switch(scheduler={"chunked": False, "max_step_tokens": LENGTH}),
    "continuous": Switch(scheduler={"continuous": False}),
    "gang": Switch(scheduler={"gang": False}),
    "fair": Switch(scheduler={"order": Fcfs()}),
    "lru": Switch(engine={"eviction": "lineage"}),
    "answer_capsules": Switch(engine={"max_answer_capsules": 0}),
    "unchecked": Switch(engine={"kv_checks": KVChecks("guards")}),
}
"""Defaults of every engine, by switch; a switch that is off does the other thing."""


class Setup(NamedTuple):
    """The settings of an engine, and what computes for it."""

    config: EngineConfig
    block_size: int = 4
    shares_reads: bool = True

    @property
    def num_blocks(self) -> int:
        return SLOTS // self.block_size


def without(*names: str) -> Setup:
    """The default with these switches off, and nothing else."""
    scheduler: dict[str, Any] = {"max_step_tokens": 16}
    engine: dict[str, Any] = {}
    forward: dict[str, Any] = {}
    for name in names:
        engine |= SWITCHES[name].engine
        scheduler |= SWITCHES[name].scheduler
        forward |= SWITCHES[name].forward
    return Setup(EngineConfig(SchedulerConfig(**scheduler), **engine), **forward)


def mocked(setup: Setup) -> Engine:
    spec = mock_spec(vocab_size=32, max_model_len=LENGTH)
    forward = MockForward(spec, num_blocks=setup.num_blocks, block_size=setup.block_size)
    return engine_over(forward, config=setup.config)


def on_torch(setup: Setup) -> Engine:
    forward = MODEL.forward(
        num_blocks=setup.num_blocks,
        block_size=setup.block_size,
        shares_reads=setup.shares_reads,
    )
    return engine_over(forward, config=setup.config)


def play(engine: Engine) -> dict[tuple[str, int], list[int]]:
    """Prompts with a common start, a capsule, forks of it; tokens by branch."""
    rng = random.Random(9)
    limits, common = Limits(6, ignore_eos=True), [rng.randrange(3, 30) for _ in range(18)]
    commands: list[Command] = [Prefill("p", pack_tokens(common))]
    for i in range(4):
        own = [rng.randrange(3, 30) for _ in range(rng.randint(1, 20))]
        sampling = Sampling(temperature=float(i % 2), seed=i)
        text = pack_tokens(common + own if i < 3 else own)
        commands.append(Generate(f"g{i}", text, limits, sampling, n=1 + i % 3))
    suffixes = (b"", b"", pack_tokens([7]), pack_tokens([8, 9, 10]))
    forks = [
        Fork("f", "p.0", suffixes, limits, Sampling(temperature=1.0, seed=3)),
        Fork("h", "p.0", (b"",) * 5, limits, Sampling(temperature=1.0, seed=4)),
    ]
    tokens: dict[tuple[str, int], list[int]] = {}
    for batch in (commands, forks):
        for command in batch:
            engine.submit(command, "g")
        for key, (answer, last) in drive(engine).items():
            assert last.finish != "error", last
            tokens[key] = answer
    return tokens


@pytest.fixture(scope="module")
def mocked_answers() -> dict[tuple[str, int], list[int]]:
    return play(mocked(without()))


@pytest.fixture(scope="module")
def torch_answers() -> dict[tuple[str, int], list[int]]:
    return play(on_torch(without()))


@pytest.mark.parametrize("off", list(itertools.combinations(SWITCHES, 2)), ids="-".join)
def test_two_switches_off_give_the_same_answers_or_are_refused_at_once(
    off: tuple[str, str], mocked_answers: dict[tuple[str, int], list[int]]
) -> None:
    """I20: every pair of switches."""
    setup = without(*off)
    if set(off) != {"lru", "prefix_cache"}:
        assert play(mocked(setup)) == mocked_answers
    else:
        with pytest.raises(ConfigError, match=r"\w+=.* needs \w+=True: .*"):
            setup.config.validate()


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_changes_no_answer_of_a_real_model(
    name: str, torch_answers: dict[tuple[str, int], list[int]]
) -> None:
    """I20: on/off equivalence in float32."""
    assert play(on_torch(without(name))) == torch_answers


def test_everything_off_is_the_plain_old_engine(
    mocked_answers: dict[tuple[str, int], list[int]],
) -> None:
    """I20, I30, part: all flags off at once."""
    assert play(mocked(without(*(set(SWITCHES) - {"lru"})))) == mocked_answers


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        (
            EngineConfig(prefix_cache=False, eviction="lineage"),
            ("eviction='lineage'", "prefix_cache=True", "leave eviction='lru'"),
        ),
        (EngineConfig(max_kept_share=-0.1), ("max_kept_share=-0.1",)),
        (EngineConfig(max_answer_capsules=-1), ("max_answer_capsules=-1",)),
        (EngineConfig(eviction="fifo"), ("eviction='fifo'", "lru or lineage")),  # type: ignore[arg-type]
        (EngineConfig(SchedulerConfig(16, chunked=False)), ("max_step_tokens=16",)),
        (EngineConfig(SchedulerConfig(watermark=1.0)), ("watermark=1.0",)),
        (EngineConfig(SchedulerConfig(max_decodes=0)), ("max_decodes=0",)),
        (EngineConfig(SchedulerConfig(ageing_steps=-1)), ("ageing_steps=-1",)),
    ],
)
def test_a_refusal_names_both_switches_and_the_remedy(
    config: EngineConfig, flags: tuple[str, ...]
) -> None:
    """I20: rejected when the engine is made."""
    with pytest.raises(ConfigError) as caught:
        mocked(Setup(config))
    assert all(flag in str(caught.value) for flag in flags)


def test_paged_memory_holds_more_sequences_than_contiguous_memory_of_the_same_size() -> None:
    """I10: 24 short answers at once, where 8 sequences of full length have room."""
    running = {}
    for name in ("paged", "contiguous"):
        setup = without(*(["paged"] if name == "contiguous" else []))
        wide = replace(setup.config.scheduler, max_step_tokens=LENGTH)
        engine = mocked(setup._replace(config=replace(setup.config, scheduler=wide)))
        for i in range(24):
            text = pack_tokens([3 + i, 4, 5])
            engine.submit(Generate(f"r{i}", text, Limits(20, ignore_eos=True)), "g")
        for _ in range(12):
            engine.step()
        running[name] = engine.stats().sched.running
    assert running["paged"] == 24
    assert 1 <= running["contiguous"] <= 8


def test_a_fork_copies_a_part_of_a_block_in_paged_memory_and_everything_in_contiguous(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """D3: 18 tokens in blocks of 4 leave 2 slots to copy for each of 3 children."""
    copied: list[BlockCopy] = []
    compute = TorchForward.forward

    def forward(self: TorchForward, batch: ForwardBatch) -> Any:
        copied.extend(batch.copies)
        return compute(self, batch)

    monkeypatch.setattr(TorchForward, "forward", forward)
    for off, num_slots in (((), 3 * 2), (("paged",), 3 * 18)):
        copied.clear()
        engine = on_torch(without(*off))
        engine.submit(Prefill("p", pack_tokens(list(range(3, 21)))), "g")
        drive(engine)
        engine.submit(Fork("f", "p.0", (b"",) * 3, Limits(2, ignore_eos=True)), "g")
        drive(engine)
        assert sum(copy.num_slots for copy in copied) == num_slots


def test_the_debug_logs_tell_of_forks_and_steps_when_they_are_switched_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """D36, part: each log has its own switch; off, nothing is written."""
    for names, expected in (
        ((), set()),
        (("forks",), {"mallee.engine.forks"}),
        (("steps",), {"mallee.engine.steps"}),
    ):
        caplog.clear()
        switch_on(names)
        play(mocked(without()))
        assert {record.name for record in caplog.records} == expected
        assert all(record.levelno == logging.DEBUG for record in caplog.records)
        lines = [record.getMessage() for record in caplog.records]
        if "forks" in names:
            assert lines[0] == "f: 4 branches at token 18, 18 of it computed"
        if "steps" in names:
            assert lines[0].startswith("step 0: 0 decode, ")
    switch_on(())
