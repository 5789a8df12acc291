"""Capsules of running branches, restored: the same branch goes on, from there or from an earlier token."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from bench.doubles.random_model import RandomModel, random_model
from bench.doubles.structures import MockStructures
from mallee.protocol.errors import CapsulesFull, InvalidParameter, UnknownBranch, UnknownCapsule
from mallee.protocol.messages import (
    Cancel,
    Capture,
    Fork,
    Generate,
    Grammar,
    Limits,
    Prefill,
    Release,
    Rewind,
    Sampling,
    pack_tokens,
)
from mallee.worker.engine import Engine
from mallee.worker.kv.sides.states import EVERY_BLOCKS
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig
from support import exact_capsules
from support.capturing import course, resume
from support.driving import engine_over
from support.exact_capsules import LIMITS, NUM, PROMPT
from support.lending import record_of

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = {kind: random_model(kind, 5) for kind in ("llama", "qwen3", "gemma3_text", "qwen3_5_text")}
PENALTIES = Sampling(0.8, seed=13, repetition_penalty=1.4, frequency_penalty=0.7)
WAYS = exact_capsules.WAYS | {"penalties": (PENALTIES, None)}


def make_engine(
    model: RandomModel, chunk: int = 16, *, num_blocks: int = 160, **config: Any
) -> Engine:
    return engine_over(
        model.forward(num_blocks=num_blocks, block_size=4),
        config=replace(EngineConfig(SchedulerConfig(chunk, 32), 32), **config),
        structures=MockStructures(128, (2,)),
    )


def generate(way: str, **fields: Any) -> Generate:
    sampling, grammar = WAYS[way]
    return Generate("r", pack_tokens(PROMPT), LIMITS, sampling, grammar=grammar, **fields)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *(("llama", way) for way in WAYS),
        *(("qwen3", "sampled"), ("gemma3_text", "sampled"), ("qwen3_5_text", "penalties")),
    ],
)
def test_a_run_its_restored_capsules_and_a_fork_draw_the_same_64_tokens(
    kind: str, way: str
) -> None:
    """F1, part, F3, part: from capsules at three boundaries, here and, built from bytes, in a fresh engine.

    F13's first gate: the fork of a prompt that was computed in chunks, or at once, equals the cold run.
    """
    model = KINDS[kind]
    whole = course(make_engine(model), generate(way))
    tokens = whole.tokens["r", 0]
    assert len(tokens) == NUM
    engine = make_engine(model)
    first = whole.steps["r", 0][0]
    cuts = (2, 19, NUM - 1)
    later = {first + cut - 1: [Capture(f"c{cut}", "r")] for cut in cuts}
    assert course(engine, generate(way), later=later).tokens == whole.tokens
    again = course(engine, *(resume(f"again{cut}", f"c{cut}.0") for cut in cuts))
    for cut in cuts:
        assert again.tokens[f"again{cut}", 0] == tokens[cut:]
        last = again.last[f"again{cut}", 0]
        assert (last.finish, last.boundary) == ("length", len(PROMPT) + NUM)
        assert last.prefill_tokens == 1  # the one that was drawn last, and not computed
        state = record_of(engine, f"c{cut}.0")
        assert state.boundary == len(PROMPT) + cut
        assert len(state.keys) // 8 == -(-state.num_computed // 4)
        fresh = make_engine(model)
        rebuilt = Prefill(
            "p", state.tokens, grammar=state.grammar, capsule="c.0", continuation=state.continuation
        )
        elsewhere = course(fresh, rebuilt), course(fresh, resume("again", "c.0"))
        assert elsewhere[1].tokens["again", 0] == tokens[cut:]
    sampling, grammar = WAYS[way]
    fork = Fork("f", "root.0", (b"",), LIMITS, sampling, grammar=grammar)
    at_once = make_engine(model, 512)
    for each in (engine, at_once):
        course(each, Prefill("root", pack_tokens(PROMPT)))
        assert course(each, fork).tokens["f", 0] == tokens


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_capture_changes_no_token_no_step_and_no_turn(kind: str) -> None:
    """F2: of the branch, of its siblings and of others; and it allocates and copies no block by itself.

    As long as there is room for what the capsules hold: of a recurrent model a state each.
    """
    others = [
        generate("sampled", n=3),
        msgspec.structs.replace(generate("greedy"), request="other"),
    ]
    whole = course(make_engine(KINDS[kind], num_blocks=400), *others)
    engine = make_engine(KINDS[kind], num_blocks=400)
    first = whole.steps["r", 1][0]
    later = {first + i: [Capture(f"c{i}", "r", i % 3)] for i in range(12)}
    taken = course(engine, *others, later=later)
    assert (taken.tokens, taken.steps) == (whole.tokens, whole.steps)
    for i in range(12):
        status = taken.status(f"c{i}")
        assert (status.boundary, status.drawn) == (len(PROMPT) + i + 1, i + 1)
    again = course(engine, *(resume(f"again{i}", f"c{i}.0") for i in range(12)))
    for i in range(12):
        assert again.tokens[f"again{i}", 0] == whole.tokens["r", i % 3][i + 1 :]
    engine = make_engine(KINDS[kind], num_blocks=400)
    for command in others:
        engine.submit(command, "g")
    for _ in range(first + 3):
        engine.step()
    before = engine.stats()
    engine.submit(Capture("c", "r", 1), "g")
    after = engine.stats()
    assert (after.pool, after.tree.num_copies) == (before.pool, before.tree.num_copies)


def test_a_capture_waits_until_its_branch_draws(make_bench: Callable[..., Any]) -> None:
    """F2, part: of a prompt in chunks, and of a branch that was preempted; or it is refused in the end."""
    engine = make_bench(max_step_tokens=4).engine
    prompt = Generate("r", pack_tokens([t % 64 for t in PROMPT]), Limits(9))
    found = course(engine, prompt, Capture("c", "r"), later={2: [Capture("d", "r")]})
    for name in ("c", "d"):
        assert found.status(name).boundary == len(PROMPT) + 1
    other = Generate("q", pack_tokens([t % 63 + 1 for t in PROMPT]), Limits(9))
    found = course(engine, other, Capture("e", "q"), later={1: [Cancel("q")]})
    assert isinstance(found.error("e"), UnknownBranch)


def test_captures_of_what_does_not_run_are_refused(make_bench: Callable[..., Any]) -> None:
    """F2, part: unknown, over, another gateway's, a prompt's, and beyond the share of capsules."""
    engine = make_bench(num_blocks=20, max_kept_share=0.2).engine
    course(engine, Generate("old", pack_tokens([1, 2, 3]), Limits(2)))
    running = Generate("r", pack_tokens(list(range(30))), Limits(9))
    found = course(
        engine,
        running,
        later={
            4: [Capture("a", "old"), Capture("b", "r", 1), Capture("c", "nobody")],
            5: [Capture("d", "r")],
        },
    )
    for name in "abc":
        assert isinstance(found.error(name), UnknownBranch)
    assert isinstance(found.error("d"), CapsulesFull)
    assert len(found.tokens["r", 0]) == 9
    engine.submit(Generate("s", pack_tokens([5]), Limits(3)), "g")
    engine.submit(Capture("e", "s"), "another gateway")
    assert engine.step().frames["another gateway"].replies[0].error is not None


# Earlier boundaries.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *(("llama", way) for way in ("constrained", "penalties")),
        *((kind, "sampled") for kind in ("gemma3_text", "qwen3_5_text")),
    ],
)
def test_a_branch_goes_on_from_any_earlier_token_of_its_answer(kind: str, way: str) -> None:
    """F5, part: by its own capsule, and by one of the earlier boundary; computing at most a block.

    Recurrent layers begin where a state was left, each 32 blocks at least.
    """
    model = KINDS[kind]
    most = 4 if kind != "qwen3_5_text" else 4 * EVERY_BLOCKS
    engine = make_engine(model)
    tokens = course(engine, generate(way)).tokens["r", 0]
    for back in (0, 1, 2, 3, 4, 5, 17, NUM):
        at = len(PROMPT) + NUM - back
        more = NUM if not back else 0
        if back:
            found = course(engine, resume(f"at{back}", "r.0", at=at, more=more))
            assert found.tokens[f"at{back}", 0] == tokens[NUM - back :]
            last = found.last[f"at{back}", 0]
            assert last.prefill_tokens <= most
        rewound = course(engine, Rewind(f"w{back}", "r.0", at))
        assert rewound.status(f"w{back}").boundary == at
        found = course(engine, resume(f"again{back}", f"w{back}.0", more=back or 5))
        if back:
            assert found.tokens[f"again{back}", 0] == tokens[NUM - back :]
            assert found.last[f"again{back}", 0].prefill_tokens <= most
    # the later capsule stays as it was
    assert course(engine, Rewind("end", "r.0", len(PROMPT) + NUM)).status("end").drawn == NUM


def test_what_can_not_go_on_as_its_branch_is_refused() -> None:
    """F13, part: a prompt's capsule, a boundary before the answer, more branches than one, nothing left.

    Nor is a text that is complete: its grammar allows nothing more.
    """
    engine = make_engine(KINDS["llama"])
    course(engine, generate("sampled"), Prefill("p", pack_tokens(PROMPT)))
    wrong = {
        "prompt": resume("prompt", "p.0"),
        "before": resume("before", "r.0", at=len(PROMPT) - 1),
        "end": resume("end", "r.0"),
        "two": msgspec.structs.replace(resume("two", "r.0", more=4), suffixes=(b"", b"")),
        "suffix": msgspec.structs.replace(resume("suffix", "r.0"), suffixes=(pack_tokens([4]),)),
    }
    for name, command in wrong.items():
        assert isinstance(course(engine, command).error(name), InvalidParameter)
    found = course(engine, Rewind("far", "r.0", 999), Rewind("none", "nothing.0", 1))
    assert isinstance(found.error("far"), InvalidParameter)
    assert isinstance(found.error("none"), UnknownCapsule)
    grammar = Grammar("choice", json.dumps([[10, 11, 12]]))
    course(engine, Generate("whole", pack_tokens(PROMPT), LIMITS, grammar=grammar))
    assert "complete" in str(course(engine, resume("again", "whole.0", more=4)).error("again"))
    found = course(engine, resume("at", "whole.0", at=len(PROMPT) + 1))
    assert found.tokens["at", 0] == [11, 12]


# F13's gates by name.


def run_cold(model: RandomModel, text: list[int]) -> list[int]:
    cold = Generate("r", pack_tokens(text), LIMITS, WAYS["sampled"][0])
    return course(make_engine(model, 512), cold).tokens["r", 0]


@pytest.mark.parametrize("kind", KINDS)
def test_gate_survives_dirty_buffers_and_forks_with_suffixes_equal_cold_runs(kind: str) -> None:
    """F13: of one capsule that was taken from a running branch; the forks are side by side in one batch.

    Every block that the capsule does not hold is used and written over in between.
    """
    model, sampling = KINDS[kind], WAYS["sampled"][0]
    engine = make_engine(model)
    taken = course(engine, generate("sampled"), later={8: [Capture("c", "r")]})
    course(engine, Release("r.0"))
    for i in range(12):
        dirt = pack_tokens([(i + k) % 128 for k in range(150)])
        course(engine, Generate(f"d{i}", dirt, Limits(1)))
    assert engine.stats().tree.num_evicted > 160
    drawn = taken.status("c").drawn
    again = course(engine, resume("again", "c.0"))
    assert again.tokens["again", 0] == taken.tokens["r", 0][drawn:]
    text = PROMPT + taken.tokens["r", 0][:drawn]
    suffixes = ([7], [9, 8, 7, 6, 5, 4])
    forks = [
        Fork(f"f{i}", "c.0", (pack_tokens(suffix),), LIMITS, sampling)
        for i, suffix in enumerate(suffixes)
    ]
    found = course(engine, *forks)
    for i, suffix in enumerate(suffixes):
        assert found.tokens[f"f{i}", 0] == run_cold(model, text + suffix)


def test_gate_unsupported_modes_raise_instead_of_a_partial_capsule() -> None:
    """F13: where the grammar can't be built again the capsule is refused, not taken without it."""
    engine = make_engine(KINDS["llama"])
    course(engine, generate("constrained"), later={6: [Capture("c", "r")]})
    state = record_of(engine, "c.0")
    plain = engine_over(
        KINDS["llama"].forward(num_blocks=160, block_size=4),
        config=EngineConfig(SchedulerConfig(16, 32), 32),
    )
    rebuilt = Prefill(
        "p", state.tokens, grammar=state.grammar, capsule="c.0", continuation=state.continuation
    )
    assert isinstance(course(plain, rebuilt).error("p"), InvalidParameter)
    assert isinstance(course(plain, resume("again", "c.0")).error("again"), UnknownCapsule)


def test_a_thousand_resets_to_a_pinned_root_are_exact_and_leak_nothing(
    make_bench: Callable[..., Any],
) -> None:
    """F18: the first steps' tokens each time, nothing computed of the root, no block lost."""
    engine = make_bench().engine
    sampling, limits = WAYS["sampled"][0], Limits(2, ignore_eos=True)
    course(engine, Prefill("root", pack_tokens([t % 64 for t in PROMPT])))
    first = course(engine, Fork("f", "root.0", (b"",), limits, sampling)).tokens["f", 0]
    before, free = engine.stats(), None
    for i in range(1000):
        engine.submit(Fork(f"f{i}", "root.0", (b"",), limits, sampling), "g")
        tokens: list[int] = []
        while engine.has_work:
            for frame in engine.step().frames.values():
                tokens += [token for update in frame.updates for token in update.tokens]
        assert tokens == first
        engine.submit(Release(f"f{i}.0"), "g")
        engine.step()
        held = engine.usage().live_blocks
        assert free in (None, held)
        free = held
    engine.check()
    assert engine.stats().num_prefill_tokens == before.num_prefill_tokens


def test_bytes_of_a_capsule_are_told_apart_by_whom_they_belong_to() -> None:
    """F17, part: unique blocks and state, and blocks shared with others; once the others go, it owns all."""
    engine = make_engine(KINDS["llama"])
    block = engine.kv_bytes(1)
    course(engine, Prefill("root", pack_tokens(PROMPT[:40])))
    fork = Fork("f", "root.0", (pack_tokens([5] * 7),), LIMITS)
    found = course(engine, fork, later={5: [Capture("c", "f")]})
    status = found.status("c")
    boundary = status.boundary
    own_blocks = -(-(boundary - 1) // 4) - 10
    assert status.shared_nbytes >= 10 * block
    course(engine, Release("f.0"))
    capsule = engine._capsules.get("c.0")
    assert engine.status(capsule).nbytes == own_blocks * block + 4
    assert engine.status(capsule).shared_nbytes == 10 * block
    root = engine.status(engine._capsules.get("root.0"))
    assert root.nbytes == 128 * 4
    course(engine, Release("root.0"))
    assert engine.status(capsule).nbytes == (10 + own_blocks) * block + 4
    assert engine.status(capsule).shared_nbytes == 0
