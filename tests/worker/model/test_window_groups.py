"""Gemma's sliding layers with blocks of their own, which they give up: answers are those of all KV kept."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from bench.doubles.random_model import random_model
from mallee.protocol.errors import ConfigError
from mallee.protocol.messages import Fork, Generate, Limits, Prefill, Sampling, pack_tokens
from mallee.worker.engine import Engine
from mallee.worker.kv.sides.windows import WindowGroup
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig
from support.driving import drive, engine_over
from support.whole_kv import answer_of_all_kv

pytestmark = pytest.mark.usefixtures("small_window_pools")

WINDOW = 10
MODEL = random_model("gemma3_text", 3, sliding_window=WINDOW)


def make_engine(
    *, num_blocks: int = 120, block_size: int = 4, chunk: int = 16, rows: int = 32, **config: Any
) -> Engine:
    forward = MODEL.forward(num_blocks=num_blocks, block_size=block_size)
    return engine_over(forward, config=EngineConfig(SchedulerConfig(chunk, rows), 32, **config))


def linear(text: list[int], num: int) -> list[int]:
    return answer_of_all_kv(MODEL, text, num, Sampling())


def window_of(engine: Engine) -> WindowGroup:
    (side,) = engine._tree.sides
    assert isinstance(side, WindowGroup)
    return side


def numbers(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(128) for _ in range(n)]


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_a_branch_keeps_its_window_and_no_more_however_long_it_gets(block_size: int) -> None:
    """I1: a prompt in chunks, then decoding far beyond the window, as the linear run."""
    text = numbers(random.Random(1), 90)
    engine = make_engine(num_blocks=800 // block_size, block_size=block_size)
    limits = Limits(150, ignore_eos=True)
    engine.submit(Generate("r", pack_tokens(text), limits), "g")
    window, tokens, most = window_of(engine), [], 0
    while engine.has_work:
        for frame in engine.step().frames.values():
            tokens += [token for update in frame.updates for token in update.tokens]
        engine.check()
        if len(tokens) > 1:
            most = max(most, window.in_use)
    assert tokens == linear(text, 150)
    assert most <= -(-WINDOW // block_size) + 2
    assert engine.stats().tree.cached_blocks + engine.load().active_blocks == -(-239 // block_size)


def test_answers_with_all_kv_kept_are_those_of_transformers() -> None:
    """D18, part, I1: far beyond the window. So are those below, which must be the same."""
    golden = json.loads(Path(__file__).with_name("golden_tiny.json").read_text())["gemma3_text"]
    model = random_model("gemma3_text", tie_word_embeddings=False)
    for row in golden["rows"][-5:]:
        assert answer_of_all_kv(model, row["prompt"], 32, Sampling()) == row["tokens"]


@pytest.mark.slow
def test_a_fork_at_any_depth_equals_a_linear_rerun() -> None:
    """I1: the window's blocks of most places are gone; what is missing is computed again."""
    engine = make_engine(num_blocks=100)
    rng = random.Random(3)
    text = numbers(rng, 101)
    engine.submit(Prefill("p", pack_tokens(text)), "g")
    drive(engine)
    fillers = [numbers(rng, 60) for _ in range(4)]
    for i, filler in enumerate(fillers):  # take what the window group can give up
        engine.submit(Generate(f"x{i}", pack_tokens(filler), Limits(3, ignore_eos=True)), "g")
    drive(engine)
    limits = Limits(13, ignore_eos=True)
    num_before = engine.stats().num_prefill_tokens
    for at in range(1, len(text) + 1, 5):
        engine.submit(Fork(f"f{at}", "p.0", (b"", pack_tokens([7])), limits, at=at), "g")
        answers = drive(engine)
        assert answers[f"f{at}", 0][0] == linear(text[:at], 13)
        assert answers[f"f{at}", 1][0] == linear([*text[:at], 7], 13)
    assert engine.stats().num_prefill_tokens > num_before + 100


def test_only_what_can_be_gone_on_from_is_a_hit() -> None:
    """A text that is held, but not the window before its end, is computed again."""
    engine = make_engine(num_blocks=200)
    rng = random.Random(4)
    text = numbers(rng, 80)
    limits = Limits(4, ignore_eos=True)
    engine.submit(Generate("a", pack_tokens(text), limits), "g")
    drive(engine)
    engine.submit(Generate("b", pack_tokens(text[:60]), limits), "g")
    first = drive(engine)["b", 0]
    assert first[0] == linear(text[:60], 4)
    assert first[1].cached_tokens == 56  # idle blocks are still there
    for i in range(6):
        engine.submit(Generate(f"x{i}", pack_tokens(numbers(rng, 90)), limits), "g")
    drive(engine)
    engine.submit(Generate("c", pack_tokens(text[:40]), limits), "g")
    later = drive(engine)["c", 0]
    assert later[0] == linear(text[:40], 4)
    assert later[1].cached_tokens == 0
    assert engine.stats().tree.num_evicted == 0  # the full layers had all of it


@pytest.mark.slow
def test_branches_that_give_way_come_back_the_same() -> None:
    """More branches than the window group has room for: some are preempted, all answer the same."""
    engine = make_engine(num_blocks=400, chunk=8)
    rng = random.Random(5)
    limits = Limits(40, ignore_eos=True)
    texts = [numbers(rng, rng.randrange(5, 30)) for _ in range(14)]
    for i, text in enumerate(texts):
        engine.submit(Generate(f"r{i}", pack_tokens(text), limits), "g")
    answers = drive(engine)
    for i, text in enumerate(texts):
        assert answers[f"r{i}", 0][0] == linear(text, 40)
    stats = engine.stats()
    assert stats.sched.num_preemptions
    assert not stats.tree.num_evicted  # for want of room in the window group alone


def test_a_step_that_the_window_group_could_not_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_step_tokens=512 needs"):
        make_engine(chunk=512, num_blocks=400)


def test_the_bytes_of_all_groups_are_those_that_are_allocated() -> None:
    forward = MODEL.forward(num_blocks=400)
    forward.check()
    full = MODEL.forward(num_blocks=400).spec.kv_bytes_per_token * 400 * 4
    assert forward.memory_stats().kv < full / 3
