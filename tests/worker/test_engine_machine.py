"""Random trees of work on small pools: every branch equals a linear rerun, nothing leaks."""

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mallee.mocker.forward import linear_tokens
from mallee.protocol.ids import branch_seed
from mallee.protocol.messages import Cancel, Fork, Generate, Limits, Prefill, Release, Sampling
from mallee.protocol.messages import pack_tokens as pack


def play(make_bench: Any, seed: int, num_blocks: int, chunk: int) -> Any:
    """A random mix of commands between random numbers of steps; returns the bench, drained."""
    rng = random.Random(seed)
    bench = make_bench(num_blocks=num_blocks, max_step_tokens=chunk, max_rows=6, vocab_size=8)
    texts: dict[str, list[int]] = {}  # capsule -> its tokens
    plan: dict[tuple[str, int], tuple[list[int], Sampling, int]] = {}
    gone: set[str] = set()
    for turn in range(25):
        name = f"r{turn}"
        sampling = Sampling(temperature=rng.choice([0.0, 1.0]), seed=rng.randrange(1 << 64))
        tokens = [rng.randrange(3) for _ in range(rng.randint(1, 14))]
        kind = rng.choice(["generate", "generate", "prefill", "fork", "fork", "cancel", "release"])
        if kind == "generate":
            n = rng.choice([1, 1, 2, 3])
            bench.submit(Generate(name, pack(tokens), Limits(rng.randint(1, 9)), sampling, n))
            plan |= {(name, i): (tokens, sampling, branch_seed(sampling.seed, i)) for i in range(n)}
        elif kind == "prefill":
            bench.submit(Prefill(name, pack(tokens)))
            texts[f"{name}.0"] = tokens
        elif kind == "fork" and texts:
            capsule = rng.choice(sorted(texts))
            suffixes = [
                [rng.randrange(3) for _ in range(rng.randint(0, 5))]
                for _ in range(rng.randint(1, 4))
            ]
            bench.submit(Fork(name, capsule, tuple(pack(s) for s in suffixes), Limits(5), sampling))
            for i, suffix in enumerate(suffixes):
                key = branch_seed(sampling.seed, i)
                plan[name, i] = (texts[capsule] + suffix, sampling, key)
        elif kind == "cancel":
            bench.submit(Cancel(f"r{rng.randrange(25)}", rng.choice([None, 0, 1])))
        elif kind == "release" and texts:
            capsule = rng.choice(sorted(texts))
            if bench.answers.get((capsule[:-2], 0)):
                del texts[capsule]
                gone.add(capsule)
                bench.submit(Release(capsule))
        for _ in range(rng.randint(0, 4)):
            bench.step()
            for (request, branch), answer in bench.answers.items():
                left = answer.last.capsule if answer.last else None
                if left is not None and (request, branch) in plan and left not in gone:
                    texts[left] = plan[request, branch][0] + answer.tokens
    bench.run()
    return bench, plan


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from([12, 20, 64]), st.sampled_from([3, 16, 64]))
def test_every_branch_equals_a_linear_rerun(
    make_bench: Any, seed: int, num_blocks: int, chunk: int
) -> None:
    """D19, D30: random trees, greedy and sampled, with preemption, eviction, cancel and release."""
    bench, plan = play(make_bench, seed, num_blocks, chunk)
    for key, (prompt, sampling, branch) in plan.items():
        answer = bench.answers.get(key)
        if answer is None:
            continue  # refused or cancelled as a whole: reported under branch -1
        expected = linear_tokens(
            bench.forward.spec, prompt, len(answer.tokens), sampling=sampling, seed=branch
        )
        assert answer.tokens == expected, key
    assert bench.engine.stats().jobs == 0
    bench.engine.check()
