"""Capsules that are pinned and unpinned, and answers that are cut where their text was."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from mallee.protocol.errors import InvalidParameter, UnknownCapsule
from mallee.protocol.messages import (
    Cut,
    Fork,
    Generate,
    Inspect,
    Limits,
    Pin,
    Prefill,
    Release,
    Sampling,
    pack_tokens,
)
from support.capturing import course, resume

HOT = Sampling(1.0, seed=5)
PROMPT = [1, 2, 3]  # less than a block


def generate(name: str = "r", num: int = 20, **fields: Any) -> Generate:
    return Generate(name, pack_tokens(PROMPT), Limits(num), HOT, **fields)


def test_a_pin_outlives_what_pushes_other_answers_out(make_bench: Callable[..., Any]) -> None:
    """F8, part, F10, part: and an unpinned capsule goes first again."""
    bench = make_bench(max_answer_capsules=2)
    engine = bench.engine
    course(engine, generate("a"))
    found = course(engine, Pin("p", "a.0"), *(generate(f"x{i}") for i in range(3)))
    assert found.status("p").is_pinned
    assert course(engine, Inspect("i", "a.0")).status("i").is_pinned
    assert engine.stats().capsules[:2] == (1, 2)
    unpinned = course(engine, Pin("u", "a.0", is_pinned=False))
    assert not unpinned.status("u").is_pinned
    assert engine.stats().capsules[:2] == (0, 2)
    course(engine, generate("y"), generate("z"))
    gone = course(engine, Inspect("j", "a.0"), Pin("q", "a.0"))
    for name in "jq":
        assert isinstance(gone.error(name), UnknownCapsule)


def test_a_pin_has_its_own_time_to_live(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    course(bench.engine, generate("a"))
    assert course(bench.engine, Pin("p", "a.0", ttl_s=5.0)).status("p").ttl_s == 5.0
    bench.now += 2.0
    assert course(bench.engine, Inspect("i", "a.0")).status("i").ttl_s == 3.0  # looking is no use
    assert course(bench.engine, Pin("q", "a.0")).status("q").ttl_s is None
    bench.now += 100.0
    course(bench.engine, Pin("s", "a.0", ttl_s=5.0))
    bench.now += 6.0
    bench.run()
    assert isinstance(course(bench.engine, Inspect("j", "a.0")).error("j"), UnknownCapsule)


def test_a_worker_that_keeps_no_answers_unpins_none(make_bench: Callable[..., Any]) -> None:
    engine = make_bench(max_answer_capsules=0).engine
    course(engine, Prefill("p", pack_tokens(PROMPT)))
    error = course(engine, Pin("u", "p.0", is_pinned=False)).error("u")
    assert isinstance(error, InvalidParameter)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_a_cut_answer_leaves_the_text_that_was_seen(
    make_bench: Callable[..., Any], seed: int
) -> None:
    """F28, part, F20, part: cut while it runs, or after its end; at any token, with any residue."""
    rng = random.Random(seed)
    engine = make_bench().engine
    tokens = course(engine, generate("whole", 30)).tokens["whole", 0]
    for i in range(8):
        name, seen = f"r{i}", rng.randrange(0, 30)
        residue = [rng.randrange(64) for _ in range(rng.randrange(3))]
        at = len(PROMPT) + seen
        cut = Cut(name, 0, at, pack_tokens(residue) if residue else b"")
        delay = rng.randrange(seen + 1, 40)  # gateways are late: the engine is ahead
        course(engine, generate(name, 30), later={delay: [cut]})
        text = [*PROMPT, *tokens[:seen], *residue]
        status = course(engine, Inspect("i" + name, f"{name}.0")).status("i" + name)
        assert (status.boundary, status.is_pinned) == (len(text), False)
        suffix = pack_tokens([3, 4])
        forks = Fork("f" + name, f"{name}.0", (suffix, b""), Limits(6), HOT)
        cold = [
            Generate(f"c{j}{name}", pack_tokens(text + tail), Limits(6), HOT, first_branch=j)
            for j, tail in enumerate(([3, 4], []))
        ]
        found = course(engine, forks, *cold)
        for j in range(2):
            assert found.tokens["f" + name, j] == found.tokens[f"c{j}{name}", 0]
        if not residue:
            again = course(engine, resume("a" + name, f"{name}.0"))
            assert again.tokens["a" + name, 0] == tokens[seen:]


def test_a_cut_of_nothing_is_ignored(make_bench: Callable[..., Any]) -> None:
    """F28, part: of unknown requests, of capsules that are gone, of another gateway's branch."""
    engine = make_bench().engine
    course(engine, generate("a"))
    course(engine, Cut("nobody", 0, 3), Cut("a", 0, 999), Release("a.0"), Cut("a", 0, 10))
    assert isinstance(course(engine, Inspect("i", "a.0")).error("i"), UnknownCapsule)
    engine.submit(generate("b"), "g")
    engine.submit(Cut("b", 0, 10), "another gateway")
    assert len(course(engine).tokens["b", 0]) == 20
