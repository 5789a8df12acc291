"""Steps that the device has too little memory for: the newest branch ends, the others go on."""

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mallee.protocol.errors import DeviceMemoryExhausted, from_wire
from mallee.protocol.ids import branch_seed
from mallee.protocol.messages import Generate, Limits, Sampling
from mallee.protocol.messages import pack_tokens as pack
from mallee.testing.forward import linear_tokens
from mallee.worker.forward import Draw, ForwardBatch, Logits

SAMPLED = Sampling(temperature=1.0, seed=5)


def tighten(bench: Any, *, tokens: int, draws: int) -> None:
    """Have the forward of `bench` refuse larger steps, before or after it wrote some of their KV."""
    forward, sample = bench.forward.forward, bench.forward.sample

    def tight(batch: ForwardBatch) -> Sequence[Logits]:
        num = sum(len(row.tokens) for row in batch.rows)
        if num > tokens:
            forward(batch._replace(rows=batch.rows[:1]))  # a part of it was computed
            raise DeviceMemoryExhausted(f"Tried to allocate {num} GiB")
        return forward(batch)

    def tight_sample(given: Sequence[Draw]) -> list[int]:
        if len(given) > draws:
            raise DeviceMemoryExhausted("Tried to allocate")
        return sample(given)

    bench.forward.forward, bench.forward.sample = tight, tight_sample


def expect(bench: Any, prompt: list[int], n: int, branch: int = 0) -> list[int]:
    seed = branch_seed(SAMPLED.seed, branch)
    return linear_tokens(bench.forward.spec, prompt, n, sampling=SAMPLED, seed=seed)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=12),
    children=st.integers(1, 3),
    tokens=st.integers(1, 24),
    draws=st.integers(1, 8),
    num_blocks=st.integers(20, 60),  # room for the largest prompt with its children by itself
)
def test_every_answer_is_whole_and_right_or_ends_with_the_error(
    make_bench: Callable[..., Any],
    prompts: list[list[int]],
    children: int,
    tokens: int,
    draws: int,
    num_blocks: int,
) -> None:
    """I26, part: shared prefixes, siblings, preemption; all invariants hold after every step."""
    bench = make_bench(num_blocks=num_blocks, max_rows=8, max_step_tokens=24)
    tighten(bench, tokens=tokens, draws=draws)
    for i, prompt in enumerate(prompts):
        bench.submit(Generate(f"r{i}", pack(prompt), Limits(6), SAMPLED, children))
        if i % 3 == 0:
            bench.step()
    bench.run(max_steps=3000)
    assert bench.engine.stats().jobs == 0
    for i, prompt in enumerate(prompts):
        for branch in range(children):
            key = (f"r{i}", branch)
            answer = bench.answers[key if key in bench.answers else (f"r{i}", -1)]  # all at once
            whole = expect(bench, prompt, 6, branch)
            assert answer.tokens == whole[: len(answer.tokens)]
            if answer.last.error is None:
                assert answer.tokens == whole
            else:
                error = from_wire(answer.last.error)
                assert isinstance(error, DeviceMemoryExhausted)
                assert error.status == 503
                assert "lower scheduler.max_step_tokens" in str(error)
                assert error.client_message.endswith("with this request; send it again")
