"""Requests that want their KV retained: the reply, and what is found again."""

from typing import Any

from mallee.protocol.messages import (
    END_OF_TEXT,
    Generate,
    Limits,
    Retained,
    RetainSpan,
    Share,
    pack_tokens,
)

FIRST, SECOND, THIRD = list(range(1, 33)), list(range(33, 63)), [63] * 40


def generate(name: str, prompt: list[int], *spans: RetainSpan, tenant: str = "") -> Generate:
    share = Share(tenant=tenant)
    return Generate(name, pack_tokens(prompt), Limits(4), share=share, retain=spans)


def cached(bench: Any, name: str, prompt: list[int]) -> int:
    bench.run(generate(name, prompt))
    return int(bench.answers[name, 0].last.cached_tokens)


def test_a_retained_prompt_survives_what_came_later(make_bench: Any) -> None:
    """X17, part: what is retained is there."""
    for spans, found in (((), 4), ((RetainSpan(END_OF_TEXT, 50, 60.0),), 28)):
        bench = make_bench(num_blocks=20, max_answer_capsules=0)
        bench.run(generate("a", FIRST, *spans))
        bench.run(generate("b", SECOND))
        bench.run(generate("c", THIRD))
        assert cached(bench, "again", FIRST) == found


def test_the_reply_tells_what_was_retained(make_bench: Any) -> None:
    """Applied, clipped and refused are its bytes: all, a part, none."""
    bench = make_bench(num_blocks=40, max_answer_capsules=0)  # 20 of them may be retained
    size = bench.engine.kv_bytes(1)
    span = RetainSpan(END_OF_TEXT, 50, 60.0)
    spans = RetainSpan(32, 50, 60.0), RetainSpan(END_OF_TEXT, 0, 60.0)
    bench.run(generate("a", FIRST, *spans, tenant="ann"))
    bench.run(generate("b", SECOND, span, tenant="ann"))
    bench.run(generate("c", THIRD, span, tenant="ann"))
    bench.run(generate("d", FIRST))
    told = {name: bench.answers[name, 0].last.retained for name in "abcd"}
    assert told == {
        "a": Retained(8 * size, 8 * size),
        "b": Retained(8 * size, 2 * size),
        "c": Retained(10 * size, 0),
        "d": None,
    }
