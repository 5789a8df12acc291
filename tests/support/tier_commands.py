"""Commands and answers of tests about tiers, and what moves all that is there."""

from typing import Any

from bench.doubles.forward import linear_tokens
from mallee.protocol.messages import Fork, Generate, Holder, Limits, Prefill, Sampling, pack_tokens
from support.tiers import LateMover

SAMPLED = Sampling(temperature=1.0, seed=7)
NUM = 8
LIMITS = Limits(NUM, ignore_eos=True)


def text(n: int, first: int = 3) -> list[int]:
    return [first + i % 29 for i in range(n)]


def prefill(request: str, tokens: list[int], *holders: Holder, **more: Any) -> Prefill:
    return Prefill(request, pack_tokens(tokens), holders=holders, **more)


def generate(request: str, tokens: list[int], *holders: Holder, **more: Any) -> Generate:
    fields = {"limits": LIMITS, "sampling": SAMPLED, "holders": holders, **more}
    return Generate(request, pack_tokens(tokens), **fields)


def fork(request: str, capsule: str, n: int = 1, **more: Any) -> Fork:
    return Fork(request, capsule, (b"",) * n, LIMITS, SAMPLED, **more)


def want(bench: Any, prompt: list[int]) -> list[int]:
    """The answer of an engine that keeps everything."""
    return linear_tokens(bench.forward.spec, prompt, NUM, sampling=SAMPLED, seed=7)


def flood(bench: Any, *movers: LateMover) -> None:
    """Nothing that was cached stays on the device."""
    size = (bench.engine.stats().pool.total - 1) * bench.forward.block_size
    for token in (1, 2):
        tokens = pack_tokens([token] * size)
        bench.submit(Generate(f"flood{len(bench.answers)}", tokens, Limits(1), SAMPLED))
        move_all(bench, *movers)


def move_all(bench: Any, *movers: LateMover) -> None:
    """Run to idle, whatever has to move for it."""
    bench.run()
    while under_way := [mover for mover in movers if mover.num_under_way]:
        under_way[0].advance()
        bench.run()
