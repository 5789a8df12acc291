"""The load that an engine reports."""

from collections.abc import Callable
from typing import Any

from mallee.protocol.messages import Fork, Generate, Grammar, Limits, Prefill, Release, pack_tokens


def ask(request: str, prompt: list[int], n: int = 1) -> Generate:
    return Generate(request, pack_tokens(prompt), Limits(8, ignore_eos=True), n=n)


def figures(bench: Any) -> tuple[int, int, int, int]:
    load = bench.engine.load()
    return load.rows, load.waiting, load.active_blocks, load.prefill_tokens


def test_an_idle_engine_has_no_load_even_with_a_full_cache(bench: Any) -> None:
    """K6, part: cached blocks that can be evicted are not active."""
    assert figures(bench) == (0, 0, 0, 0)
    bench.run(ask("a", list(range(20))))
    while bench.engine._capsules.stats().replaceable:
        bench.engine._capsules.replace_oldest()
    assert figures(bench) == (0, 0, 0, 0)


def test_load_follows_a_request_from_waiting_to_its_end(bench: Any) -> None:
    """K6, part: prompt tokens left to compute fall step by step, then blocks and a row stay."""
    bench.submit(ask("a", list(range(40))))
    assert figures(bench) == (0, 1, 0, 40)
    bench.step()  # 16 tokens a step
    assert figures(bench) == (1, 0, 4, 24)
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


def test_load_says_how_the_memory_is_used(bench: Any) -> None:
    """D36, D37, part: a capsule of 10 blocks and 2 slots, three plain forks, and two under a grammar."""
    engine = bench.engine
    bench.run(Prefill("p", pack_tokens(list(range(42)))))
    assert engine.load().use.references == 11
    bench.submit(Fork("f", "p.0", (b"",) * 3, Limits(8, ignore_eos=True)))
    for _ in range(3):
        bench.step()
    use = engine.load().use
    assert (use.total_blocks, use.live_blocks, use.shared_blocks) == (256, 11 + 3, 11)
    assert (use.readers, use.kept_capsules, use.num_copied_blocks) == (4, 1, 3)
    assert (use.num_evicted_blocks, use.num_preemptions, use.num_faults) == (0, 0, 0)
    assert use.references == 11 + 3 * 11
    assert (use.used_blocks, use.num_forks, use.num_prefill_tokens) == (11 + 3, 3, 42)
    assert [(each.capsules, each.blocks) for each in use.kept_by_tier] == [(1, 11), (0, 0), (0, 0)]
    assert use.constraint_states == 0
    grammar = Grammar("choice", "[[5, 6, 7, 8], [5, 6, 9, 8]]")
    bench.submit(Fork("c", "p.0", (b"",) * 2, Limits(8), grammar=grammar))
    bench.step()
    bench.step()
    stats = engine.stats()
    assert (stats.memory.readers, stats.memory.references) == (1 + 3 + 2, 6 * 11 + 3)
    assert stats.memory.pages_per_reader == 11.5, "three have begun their twelfth block"
    assert stats.tree.num_copies == 5, "the last block, on write"
    assert 1 <= stats.constraint_states <= 2, "branches that drew the same share a state"
    assert engine.load().use.constraint_states == stats.constraint_states
    bench.run()
    assert engine.stats().constraint_states == 0
    engine.submit(Release("p.0"), "g")
    while engine._capsules.stats().replaceable:
        engine._capsules.replace_oldest()
    use = engine.load().use
    assert (use.live_blocks, use.readers) == (0, 0)
    assert use.cached_blocks == 10 + 3 * 2 + 2


def test_the_longest_text_that_is_offered_can_be_forked_anywhere(
    make_bench: Callable[..., Any],
) -> None:
    """S3, part, S9: the context that clients see is one that a pool of this size can serve."""
    bench = make_bench(num_blocks=8, block_size=4)
    longest = bench.engine.spec.max_model_len
    assert longest == 7 * 4
    for prompt_len in range(1, longest):
        limits = Limits(longest - prompt_len, ignore_eos=True)
        prompt = pack_tokens([5] * prompt_len)
        bench.run(Generate(f"r{prompt_len}", prompt, limits, n=2))
        for branch in range(2):
            assert len(bench.answers[f"r{prompt_len}", branch].tokens) == limits.max_tokens
    roomy = make_bench(num_blocks=64, block_size=4, max_model_len=100)
    assert roomy.engine.spec.max_model_len == 100
