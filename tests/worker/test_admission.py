"""D16, I26: what is checked once and skipped for the very same object is still refused when it is wrong."""

from collections.abc import Callable
from typing import Any

import pytest

from mallee.protocol.errors import InvalidParameter
from mallee.protocol.events import CapsuleStored
from mallee.protocol.messages import Fork, Generate, Limits, Prefill, Sampling, Share, pack_tokens

LIMITS = Limits(3, ignore_eos=True)
PROMPT = pack_tokens([1, 2, 3, 4, 5])


def is_refused(bench: Any, request: str) -> bool:
    answer = bench.answers.get((request, -1))
    return answer is not None and isinstance(answer.error, InvalidParameter)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ({"sampling": Sampling(temperature=-1.0)}, {"sampling": Sampling()}),
        ({"sampling": Sampling(logit_bias=((1 << 30, 1.0),))}, {"sampling": Sampling()}),
        ({"share": Share(weight=-1.0)}, {"share": Share()}),
    ],
)
def test_what_is_wrong_is_refused_every_time(
    make_bench: Callable[..., Any], wrong: dict[str, Any], right: dict[str, Any]
) -> None:
    """The same wrong object twice, and after a right one; the right one every time it comes."""
    bench = make_bench()
    for i, options in enumerate([wrong, wrong, right, right, wrong, right]):
        bench.run(Generate(f"r{i}", PROMPT, LIMITS, **options))
        assert is_refused(bench, f"r{i}") == (options is wrong)


def test_where_answers_leave_nothing_prompts_still_do(make_bench: Callable[..., Any]) -> None:
    """With no room for answers' capsules none is made or announced; asked-for ones are, and fork."""
    bench = make_bench(max_answer_capsules=0)
    bench.run(Generate("g", PROMPT, LIMITS))
    assert not [event for event in bench.events if isinstance(event, CapsuleStored)]
    bench.run(Prefill("p", PROMPT))
    bench.run(Fork("f", "p.0", (b"", pack_tokens([7])), LIMITS))
    assert len(bench.answers["f", 0].tokens) == len(bench.answers["f", 1].tokens) == 3
    kept = [event.capsule for event in bench.events if isinstance(event, CapsuleStored)]
    assert kept == ["p.0"]
    bench.engine.check()


def test_draws_are_counted_in_strides_too(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(block_size=16)
    bench.submit(Generate("g", PROMPT, Limits(9, ignore_eos=True)))
    bench.step()
    bench.step()
    limit = bench.engine.multi_step_limit()
    assert limit == 7
    bench.engine.multi_step(limit)
    assert bench.engine.stats().num_output_tokens == 9
