"""Forks of capsules that are still computing, of their beginnings, and of equal suffixes."""

from collections.abc import Callable
from typing import Any

import pytest

from bench.doubles.forward import linear_tokens
from mallee.protocol.errors import CapsuleAbandoned, InvalidParameter, UnknownCapsule, from_wire
from mallee.protocol.ids import branch_seed
from mallee.protocol.messages import (
    Cancel,
    Delete,
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
from mallee.protocol.messages import pack_tokens as pack

HOT = Sampling(temperature=1.0, seed=11)
LONG = [(7 * i) % 60 for i in range(350)]


def expect(bench: Any, prompt: list[int], n: int, branch: int = 0) -> list[int]:
    seed = branch_seed(HOT.seed, branch)
    return linear_tokens(bench.forward.spec, prompt, n, sampling=HOT, seed=seed)


@pytest.mark.parametrize("at", [1, 3, 4, 5, 50, 52, 349])
@pytest.mark.parametrize("suffix", [[], [9], [9] * 7])
def test_a_fork_inside_a_capsule_continues_its_beginning(
    bench: Any, at: int, suffix: list[int]
) -> None:
    """S6: of a finished capsule; no more than one block is computed again."""
    bench.run(Prefill("p", pack(LONG)))
    before = bench.forward.num_tokens
    bench.run(Fork("f", "p.0", (pack(suffix),), Limits(5), HOT, at=at))
    assert bench.answers["f", 0].tokens == expect(bench, LONG[:at] + suffix, 5)
    assert bench.forward.num_tokens - before <= 4 + len(suffix) + 4
    last = bench.answers["f", 0].last
    assert last.cached_tokens + last.prefill_tokens == at + len(suffix)


@pytest.mark.parametrize("at", [1, 4, 50, 51, 52, 100, 349])
@pytest.mark.parametrize("suffix", [[], [9], [9] * 7])
def test_a_watermark_fork_starts_before_the_prefill_ends(
    bench: Any, at: int, suffix: list[int]
) -> None:
    """S6: its first token comes as soon as its tokens are there; the producer does not stall."""
    alone = type(bench)()
    alone.submit(Prefill("p", pack(LONG)))
    steps_alone = 0
    while ("p", 0) not in alone.answers:
        alone.step()
        steps_alone += 1
    bench.submit(Prefill("p", pack(LONG)))
    bench.step()
    bench.submit(Fork("f", "p.0", (pack(suffix),), Limits(6), HOT, at=at))
    steps, first = 1, 0
    while ("p", 0) not in bench.answers:
        bench.step()
        steps += 1
        if not first and bench.answers.get(("f", 0)):
            first = steps
    computed = -(-(at // 4 * 4) // 16)  # steps until what the branch continues was there
    if at < 300:
        assert first
        assert first <= max(computed + 2 + len(suffix) // 3, 4)
    # The branch took tokens from some steps: one more may be needed, but none was skipped.
    assert steps <= steps_alone + 2
    bench.run()
    assert bench.answers["f", 0].tokens == expect(bench, LONG[:at] + suffix, 6)
    assert bench.answers["p", 0].last.boundary == len(LONG)
    bench.run(Fork("g", "p.0", (b"",), Limits(3), HOT))
    assert bench.answers["g", 0].tokens == expect(bench, LONG, 3)


@pytest.mark.parametrize("way", ["cancelled", "deleted", "lost"])
def test_forks_fail_with_the_capsule_they_wait_for(bench: Any, way: str) -> None:
    """S6, F20, part: nobody waits for ever; who has begun goes on. Any gateway may delete it.

    A gateway that is lost takes along its own forks, which nobody hears of any more.
    """
    bench.submit(Prefill("p", pack(LONG)), Fork("mine", "p.0", (b"",), Limits(2), HOT))
    bench.submit(
        Fork("early", "p.0", (b"",), Limits(8), HOT, at=10),
        Fork("late", "p.0", (b"", pack([3])), Limits(8), HOT, at=300),
        Fork("whole", "p.0", (b"",), Limits(8), HOT),
        gateway="other",
    )
    for _ in range(4):
        bench.step()
    computed = bench.forward.num_tokens
    if way == "cancelled":
        bench.submit(Cancel("p"))
    elif way == "deleted":
        bench.submit(Delete("d", "p.0"), Delete("u", "p.1"), gateway="other")
    else:
        bench.engine.drop_gateway("g")
    bench.run()
    if way == "lost":
        assert "g" not in bench.gateways
    else:
        assert bench.answers["p", 0].last.finish == "cancelled"
    if way == "deleted":
        assert bench.replies["d"].status.computed == 16 + 14 + 15 + 15, "a branch took the rest"
        assert isinstance(from_wire(bench.replies["u"].error), UnknownCapsule)
    assert bench.answers["early", 0].tokens == expect(bench, LONG[:10], 8)
    for name, branch in (("late", 0), ("late", 1), ("whole", 0)):
        assert isinstance(bench.answers[name, branch].error, CapsuleAbandoned)
    assert bench.forward.num_tokens - computed <= 8
    assert bench.engine.stats().jobs == bench.engine.stats().capsules.kept == 0


def test_equal_suffixes_are_computed_once(bench: Any) -> None:
    """X2, part: n equal suffixes on one capsule cost one; each branch draws its own answer."""
    bench.run(Prefill("p", pack(LONG[:23])))
    before = bench.engine.stats().num_prefill_tokens
    suffixes = [[30] * 21, [31], [30] * 21, [30] * 21, [31], []]
    bench.run(Fork("f", "p.0", tuple(pack(s) for s in suffixes), Limits(5), HOT))
    for i, suffix in enumerate(suffixes):
        assert bench.answers["f", i].tokens == expect(bench, LONG[:23] + suffix, 5, i)
    assert bench.engine.stats().num_prefill_tokens - before == 22
    told = [bench.answers["f", i].last for i in range(6)]
    assert [u.prefill_tokens for u in told] == [21, 1, 0, 0, 0, 0]
    assert [u.cached_tokens for u in told] == [23, 23, 44, 44, 24, 23]


def test_equal_suffixes_of_different_forks_share_their_blocks(bench: Any) -> None:
    """X2, part, F29, part: found by hash, while they are computed and afterwards, and told as cached."""
    bench.run(Prefill("p", pack(LONG[:23])))
    before = bench.engine.stats().num_prefill_tokens
    suffix = [30 + i % 9 for i in range(41)]  # 23 + 41 = 16 full blocks, the last not shared
    bench.run(*(Fork(f"f{i}", "p.0", (pack(suffix),), Limits(3), HOT) for i in range(5)))
    assert bench.engine.stats().num_prefill_tokens - before == 41 + 4 * 4
    for i in range(5):
        answer = bench.answers[f"f{i}", 0]
        assert answer.tokens == expect(bench, LONG[:23] + suffix, 3)
        told = answer.last.cached_tokens, answer.last.prefill_tokens
        assert told == ((60, 4) if i else (23, 41))


def test_a_prompt_that_continues_one_in_flight_computes_the_rest(bench: Any) -> None:
    """X2, part: X under way, then X and more."""
    bench.submit(Generate("x", pack(LONG[:64]), Limits(2), HOT))
    bench.submit(Generate("y", pack(LONG[:96]), Limits(2), HOT))
    bench.run()
    assert bench.engine.stats().num_prefill_tokens == 96
    assert bench.answers["y", 0].tokens == expect(bench, LONG[:96], 2)


def test_a_priority_is_of_a_request_or_of_one_branch(make_bench: Callable[..., Any]) -> None:
    """D15: from the next step on, also while the prompt is still computed for all."""
    bench = make_bench(max_step_tokens=2, sched={"ageing_steps": 0})
    share = Share(priority=1.0)
    bench.submit(Generate("r", pack([1, 2, 3]), Limits(50), HOT, n=4, share=share))
    bench.submit(Prioritize("r", 5.0, 2))
    bench.submit(Generate("q", pack([4]), Limits(50), HOT, share=Share(priority=2.0)))
    for _ in range(12):
        bench.step()

    def moved() -> set[tuple[str, int]]:
        before = {key: len(answer.tokens) for key, answer in bench.answers.items()}
        bench.step()
        return {k for k, a in bench.answers.items() if len(a.tokens) > before.get(k, 0)}

    assert moved() == {("r", 2), ("q", 0)}
    bench.submit(Prioritize("r", 9.0))
    assert moved() == {("r", 0), ("r", 1)}
    bench.submit(Prioritize("nobody", 9.0), Prioritize("r", float("nan")))
    bench.step()
    (error,) = bench.untold
    assert isinstance(error, InvalidParameter)


def test_a_fork_is_never_hashed_by_a_text_that_its_node_had_before(
    make_bench: Callable[..., Any],
) -> None:
    """D19, D30: a capsule's node loses blocks to eviction, is found again and grows another text of the
    same length; what a fork of it finds in the cache belongs to the new text.
    """
    bench = make_bench(num_blocks=12, max_answer_capsules=0, sched={"watermark": 0.0})
    old, new, suffix = [1, 1, 1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 3, 3, 3, 3], [5] * 6
    bench.run(Prefill("old", pack(old)))
    bench.run(Fork("f", "old.0", (pack(suffix),), Limits(1)))
    bench.run(Release("old.0"))
    bench.run(Generate("evicts", pack([9] * 43), Limits(1)))
    bench.run(Prefill("new", pack(new)))
    bench.run(Generate("again", pack(old + suffix), Limits(1)))  # all that the old text hashed to
    bench.run(Fork("g", "new.0", (pack(suffix),), Limits(4), HOT))
    assert bench.answers["g", 0].tokens == expect(bench, new + suffix, 4)


@pytest.mark.parametrize("session", ["a", "b"])
def test_who_waits_for_a_prefix_lends_its_producer_its_claim(
    make_bench: Callable[..., Any], session: str
) -> None:
    """S6, S13, part, D15: gated on the last branch of a busy session, a request waits as long as alone."""

    def steps_to_first_token(prompt: list[int]) -> int:
        bench = make_bench(
            num_blocks=4096, max_rows=8, vocab_size=1 << 20, sched={"ageing_steps": 0}
        )
        last = Share(session="a", priority=-1.0)
        bench.submit(Generate("p", pack_tokens([*shared, 1]), Limits(4), share=last))
        bench.step()
        for i in range(20):
            tokens = pack_tokens([1000 + i] * 200)
            bench.submit(Generate(f"a{i}", tokens, Limits(4), share=Share(session="a")))
        mine = Share(session=session, priority=1.0)
        bench.submit(Generate("mine", pack_tokens([*prompt, 5, 6]), Limits(2), share=mine))
        for num in range(400):
            if ("mine", 0) in bench.answers:
                return num
            bench.step()
        raise AssertionError("never served")

    shared = list(range(400))
    alone = steps_to_first_token([9000 + i for i in range(400)])
    assert steps_to_first_token(shared) <= alone + 3
