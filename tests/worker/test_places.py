"""Places of a text where recurrent layers leave their state: which, for how long, and what they save."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from mallee.protocol import model
from mallee.protocol.ids import branch_seed
from mallee.protocol.messages import MAX_PLACES, Inspect, Limits
from mallee.worker.kv.sides.states import StateGroup
from support.fold_forward import FoldForward, fold_tokens
from support.tier_commands import NUM, SAMPLED, generate, prefill, text

VOCAB = 64
PREFIX = 3000
MakeBench = Callable[..., Any]


@pytest.fixture
def make(make_bench: Callable[..., Any]) -> MakeBench:
    """Engines over a model with states, in blocks of 16 tokens."""

    def made(num_blocks: int = 1000, **more: Any) -> Any:
        forward = FoldForward(num_blocks=num_blocks, block_size=16, vocab_size=VOCAB)
        return make_bench(forward=forward, **{"max_step_tokens": 2048, "max_rows": 8, **more})

    return made


def states(bench: Any) -> StateGroup:
    (side,) = bench.engine._tree.sides
    assert isinstance(side, StateGroup)
    return side


def cached(bench: Any, request: str, prompt: Sequence[int], num: int = NUM) -> int:
    """The tokens of `prompt` that `request` found; its answer is what it must be."""
    answer = bench.answers[request, 0]
    seed = branch_seed(SAMPLED.seed, 0)
    assert answer.tokens == fold_tokens(prompt, num, sampling=SAMPLED, seed=seed, vocab_size=VOCAB)
    found = answer.last.cached_tokens
    assert found + answer.last.prefill_tokens == len(prompt)
    return int(found)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("places", [(), (PREFIX,)])
def test_hits_do_not_depend_on_the_suffix(
    make: MakeBench, places: tuple[int, ...], at_once: bool
) -> None:
    """F12, part, of vllm#45238: all that follow go on where the prefix ends, if a client names that or waits.

    Else the second one finds where texts part, and leaves a state there.
    """
    bench = make()
    prompts = [[*text(PREFIX), *[i] * (1 + 200 * i // 63), *text(100)] for i in range(64)]
    for i, prompt in enumerate(prompts):
        bench.submit(generate(f"r{i}", prompt, places=places))
        if not at_once:
            bench.run()
    bench.run()
    found = [cached(bench, f"r{i}", prompt) for i, prompt in enumerate(prompts)]
    shared = PREFIX // 16 * 16
    assert found[0] == 0
    assert found[1] == shared if places or at_once else 0 < found[1] < shared
    assert found[2:] == [shared] * 62
    assert bench.engine.stats().num_prefill_tokens == sum(map(len, prompts)) - sum(found)


def test_what_a_long_prompt_leaves_on_its_way_pushes_no_other_place_out(
    make: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if that was used longer ago; a place that was gone on from is as good as a named one."""
    monkeypatch.setattr(model, "MIN_STATES", 12)
    bench = make(400, max_step_tokens=64, max_answer_capsules=0)
    bench.run(generate("a", [*text(200), 50, *text(400)], places=(1, 200, 500)))
    assert {*states(bench).num_by_reason()} >= {"named", "end", "cadence"}
    for i, left in enumerate((60, 61)):
        bench.run(generate(f"long{i}", [left, *text(3000)]))
    bench.run(generate("b", prompt := [*text(200), 51, *text(50)]))
    assert cached(bench, "b", prompt) == 192
    use = bench.engine.load().use.states
    assert use.by_reason == states(bench).num_by_reason()
    assert use.by_reason["named"] == 1, "of so few slots a prompt gets one"
    assert use.num_evicted > 30
    assert use.nbytes == 40
    bench.run(generate("c", prompt := [61, *text(3000)[:2999], 5, *text(40)]))
    reached = cached(bench, "c", prompt)
    bench.run(generate("long2", [62, *text(3000)]))
    bench.run(generate("d", prompt := [61, *text(3000)[:2999], 6, *text(40)]))
    assert cached(bench, "d", prompt) >= reached > 2900


def test_the_places_of_a_prompt(make: MakeBench) -> None:
    """Few named ones, the first; and none for one block more of known text."""
    side = states(make())
    assert side.places(48, 200, 64, ()) == {192: "end"}
    assert side.places(48, 200, 80, ()) == {80: "branching", 192: "end"}
    assert side.places(48, 193, 192, (60, 70, 100, 300)) == {
        64: "named",
        96: "named",
        192: "end",
    }
    many = side.places(16, 2000, 0, range(0, 2000, 50))
    found = [at for at, reason in many.items() if reason == "named"]
    assert found == [at // 16 * 16 for at in range(50, 2000, 50)][: side.pool.num_blocks // 8]
    assert side.places(192, 200, 192, (192,)) == {}


def test_a_capsule_says_where_prompts_may_go_on_and_counts_its_state(make: MakeBench) -> None:
    """F12, part: at the last end of a block, where there is a state as long as there is room."""
    bench = make()
    for num_tokens in (5, 15, 16, 17, 47, 48):
        name, prompt = f"p{num_tokens}", [num_tokens, *text(num_tokens - 1)]
        bench.run(prefill(name, prompt))
        bench.run(Inspect(f"i{num_tokens}", f"{name}.0"))
        status = bench.replies[f"i{num_tokens}"].status
        assert status.aligned == num_tokens // 16 * 16
        assert status.nbytes >= 40
        bench.run(generate(f"g{num_tokens}", longer := [*prompt, 1, 2]))
        assert cached(bench, f"g{num_tokens}", longer) == status.aligned


def test_the_next_turn_goes_on_where_the_answer_ended(make: MakeBench) -> None:
    """A branch that draws keeps one state behind it; events tell of it when the answer is over."""
    bench = make(max_answer_capsules=0)
    prompt, more = text(100), text(30, first=7)
    limits = Limits(70, ignore_eos=True)
    bench.submit(generate("a", prompt, limits=limits))
    while bench.engine.has_work:
        bench.step()
        assert states(bench).num_idle <= 2
    turn = [*prompt, *bench.answers["a", 0].tokens, *more]
    bench.run(generate("b", turn))
    assert cached(bench, "a", prompt, 70) == 0
    assert cached(bench, "b", turn) == 160, "of 169 that were computed"


def test_places_that_make_no_sense_are_refused_and_the_others_cost_nothing(
    make: MakeBench, make_bench: Callable[..., Any]
) -> None:
    bench = make()
    bench.run(generate("many", [1, 2], places=tuple(range(1, MAX_PLACES + 2))))
    assert "at most 16" in str(bench.answers["many", -1].error)
    bench.run(generate("none", [1, 2], places=(0,)))
    assert "1 or more" in str(bench.answers["none", -1].error)
    for each in (make(), make_bench(max_step_tokens=2048)):
        each.run(generate("a", text(200), places=(7, 150, 9000)))
        steps = each.engine.stats().num_steps
        assert steps == (2 + NUM if each.forward.spec.has_states else NUM)


def test_kept_capsules_leave_slots_to_run_in(make: MakeBench) -> None:
    """F13, part: each takes a slot, however short it is; one for which there is none is not kept."""
    bench = make(num_blocks=160)
    for i in range(20):
        bench.submit(generate(f"r{i}", text(9 + i), keep_s=60.0))
        bench.run()
        cached(bench, f"r{i}", text(9 + i))
    num_kept = bench.engine.stats().capsules.kept
    assert num_kept == int(0.9 * states(bench).pool.num_blocks)
