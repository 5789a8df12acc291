"""Random trees of work on small pools: every branch equals a linear rerun, nothing leaks."""

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mallee.protocol.ids import branch_seed
from mallee.protocol.messages import (
    Cancel,
    Fork,
    Generate,
    Limits,
    Prefill,
    Prioritize,
    Release,
    Sampling,
    Share,
)
from mallee.protocol.messages import pack_tokens as pack
from mallee.testing.forward import linear_tokens


def play(make_bench: Any, seed: int, num_blocks: int, chunk: int) -> Any:
    """A random mix of commands between random numbers of steps; returns the bench, drained."""
    rng = random.Random(seed)
    policy = rng.choice(["fair", "fair", "fcfs", "prefill_first", "decode_round_robin"])
    victims = rng.choice(["least_due", "youngest", "oldest_decode"])
    ageing, gang = rng.choice([0, 5, 256]), rng.random() < 0.5
    bench = make_bench(
        num_blocks=num_blocks,
        max_step_tokens=chunk,
        max_rows=6,
        vocab_size=8,
        sched={"policy": policy, "victims": victims, "ageing_steps": ageing, "gang": gang},
    )
    texts: dict[str, list[int]] = {}  # capsule -> its tokens
    plan: dict[tuple[str, int], tuple[list[int], Sampling, int]] = {}
    gone: set[str] = set()
    for turn in range(25):
        name = f"r{turn}"
        sampling = Sampling(temperature=rng.choice([0.0, 1.0]), seed=rng.randrange(1 << 64))
        tokens = [rng.randrange(3) for _ in range(rng.randint(1, 14))]
        share = Share(rng.choice("abc"), rng.choice([0.5, 1.0, 4.0]), rng.randint(0, 2))
        kinds = [
            "generate",
            "generate",
            "prefill",
            "fork",
            "fork",
            "cancel",
            "release",
            "prioritize",
        ]
        kind = rng.choice(kinds)
        if kind == "generate":
            n = rng.choice([1, 1, 2, 3])
            limits = Limits(rng.randint(1, 9))
            bench.submit(Generate(name, pack(tokens), limits, sampling, n, share=share))
            plan |= {(name, i): (tokens, sampling, branch_seed(sampling.seed, i)) for i in range(n)}
        elif kind == "prefill":
            bench.submit(Prefill(name, pack(tokens), share=share))
            texts[f"{name}.0"] = tokens
        elif kind == "fork" and texts:
            capsule = rng.choice(sorted(texts))
            suffixes = [
                [rng.randrange(3) for _ in range(rng.randint(0, 5))]
                for _ in range(rng.randint(1, 4))
            ]
            at = rng.choice([None, rng.randint(1, len(texts[capsule]))])
            packed = tuple(pack(s) for s in suffixes)
            bench.submit(Fork(name, capsule, packed, Limits(5), sampling, share=share, at=at))
            for i, suffix in enumerate(suffixes):
                key = branch_seed(sampling.seed, i)
                plan[name, i] = (texts[capsule][:at] + suffix, sampling, key)
        elif kind == "cancel":
            bench.submit(Cancel(f"r{rng.randrange(25)}", rng.choice([None, 0, 1])))
        elif kind == "prioritize":
            request, branch = f"r{rng.randrange(25)}", rng.choice([None, 0, 1])
            bench.submit(Prioritize(request, float(rng.randint(-3, 3)), branch))
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
    """D19, D30, I18, S6: random trees, greedy and sampled, with preemption, eviction, cancel, release,
    priorities, sessions, forks of what is still computing; under every policy.
    """
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
