"""How busy an engine says it is."""

from typing import Any

from mallee.protocol.events import Load
from mallee.protocol.messages import Generate, Limits, pack_tokens


def ask(request: str, prompt: list[int], n: int = 1) -> Generate:
    return Generate(request, pack_tokens(prompt), Limits(8, ignore_eos=True), n=n)


def test_an_idle_engine_has_no_load_even_with_a_full_cache(bench: Any) -> None:
    """K6, part: cached blocks that can be evicted are not active."""
    assert bench.engine.load() == Load(0, 0, 0, 0)
    bench.run(ask("a", list(range(20))))
    while bench.engine._capsules.replace_oldest():
        pass
    assert bench.engine.load() == Load(0, 0, 0, 0)


def test_load_follows_a_request_from_waiting_to_its_end(bench: Any) -> None:
    """K6, part: prompt tokens left to compute fall step by step, then blocks and a row stay."""
    bench.submit(ask("a", list(range(40))))
    assert bench.engine.load() == Load(0, 1, 0, 40)
    bench.step()  # 16 tokens a step
    assert bench.engine.load() == Load(1, 0, 4, 24)
    bench.step()
    bench.step()
    load = bench.engine.load()
    assert (load.rows, load.waiting, load.prefill_tokens) == (1, 0, 0)
    assert load.active_blocks >= 10


def test_a_prefix_that_is_cached_or_being_computed_is_not_to_be_computed_again(bench: Any) -> None:
    """K6, part: cold siblings count their common prefix once."""
    prompt = list(range(40))
    bench.submit(ask("a", [*prompt, 50]))
    bench.step()
    bench.submit(ask("b", [*prompt, 51, 52]), ask("c", [60] * 10))
    assert bench.engine.load().prefill_tokens == (41 - 16) + 2 + 10


def test_a_long_queue_is_estimated_by_its_head(bench: Any) -> None:
    for i in range(1000):
        bench.submit(ask(f"r{i}", [i % 60] * 10))
    load = bench.engine.load()
    assert (load.waiting, load.prefill_tokens) == (1000, 10_000)
