"""K25, part: a trace is taken apart into the lines of calls that agents made."""

from collections.abc import Sequence

import numpy as np

from mallee.synth.compare.views import picked
from mallee.synth.core.prefix_tree import PrefixTree
from mallee.synth.core.threads import Threads, public_blocks, threads_of
from mallee.synth.session.forest import NO_SEGMENT, fit_forest
from mallee.synth.session.steps import Steps, steps_of
from mallee.traces.trace import Trace, trace_of
from mallee.traces.workload import Request, Workload

SIZE = 10


def request(
    number: int,
    ids: Sequence[int],
    session: str = "",
    cls: str = "turn",
    waits: tuple[int, ...] = (),
    extra: int = 0,
) -> Request:
    tokens = max(1, SIZE * len(ids) + extra)
    return Request(number, float(number), tuple(ids), tokens, 5, session, cls, waits)


def traced(requests: Sequence[Request]) -> Trace:
    return trace_of(Workload("drawn by hand", SIZE, lambda: iter(requests)))


def stepped(trace: Trace) -> tuple[Threads, Steps]:
    threads = threads_of(trace)
    depth = np.zeros(len(trace), np.int32)
    depth[threads.heads] = fit_forest(trace, threads).first
    return threads, steps_of(trace, threads, depth)


def test_turns_without_names_follow_the_text() -> None:
    """K25, part: without session names, whoever has most of a text goes on with it."""
    trace = traced(
        [
            request(0, [1, 2]),
            request(1, [7, 8]),
            request(2, [1, 2, 3]),
            request(3, [7, 8, 9]),
            request(4, [1, 2, 4]),  # drops block 3
        ]
    )
    threads, steps = stepped(trace)
    assert threads.thread.tolist() == [0, 1, 0, 1, 0]
    assert threads.previous.tolist() == [-1, -1, 0, 1, 2]
    assert threads.shared.tolist() == [0, 0, 2, 2, 2]
    assert threads.source.tolist() == [-1, -1, 0, 1, 2]  # 2 touched block 2 last
    assert steps.dropped[2:].tolist() == [0, 0, 1]
    assert steps.fresh[2:].tolist() == [SIZE] * 3
    assert steps.gap_s.tolist() == [0, 0, 2, 2, 2]


def test_a_block_that_many_follow_names_nobody() -> None:
    """K25, part: a system prompt is public; those who share only that are strangers."""
    rows = [request(i, [0, 1, 10 + i]) for i in range(6)]
    trace = traced([*rows, request(6, [0, 1, 12, 50])])
    assert public_blocks(PrefixTree.of(trace))[:3].tolist() == [True, True, False]
    threads = threads_of(trace)
    assert threads.thread.tolist() == [0, 1, 2, 3, 4, 5, 2]
    forest = fit_forest(trace, threads)
    assert forest.blocks.tolist() == [2]
    assert forest.above.tolist() == [NO_SEGMENT]
    assert forest.depth.tolist() == [2] * 6


def test_equal_prompts_share_their_partial_block() -> None:
    trace = traced([request(0, [1, 2], extra=-3), request(1, [1, 2], extra=-3)])
    _, steps = stepped(trace)
    assert steps.dropped[1] == -1
    assert steps.added[1] == 0


def test_agents_that_take_turns_have_threads_of_their_own() -> None:
    """K25, part: in a named session without waits, another text is another agent."""
    trace = traced(
        [
            request(0, [1, 2, 3], "a"),
            request(1, [5, 6], "a"),
            request(2, [1, 2, 3, 4], "a"),
            request(3, [5, 6, 7], "a"),
        ]
    )
    threads = threads_of(trace)
    assert threads.thread.tolist() == [0, 1, 0, 1]
    assert threads.session.tolist() == [0, 0, 0, 0]
    assert threads.parent.tolist() == [-1, 0, -1, -1]
    assert not threads.is_fork.any()


def test_an_agent_continues_its_context_when_its_turn_comes_again() -> None:
    """K25, part: agents that wait for each other keep contexts of their own."""
    trace = traced(
        [
            request(0, [1, 2, 3], "a"),
            request(1, [5, 6], "a", waits=(0,)),
            request(2, [1, 2, 3, 4], "a", waits=(1,)),
            request(3, [7, 8], "a", waits=(2,)),
            request(4, [5, 6, 9], "a", waits=(3,)),
            request(5, [1, 2, 3, 4, 10], "a", waits=(4,)),
        ]
    )
    threads = threads_of(trace)
    assert threads.thread.tolist() == [0, 1, 0, 2, 1, 0]
    assert threads.parent.tolist() == [-1, 0, -1, 2, -1, -1]
    assert not threads.is_fork.any()


def test_siblings_with_equal_prompts_are_apart() -> None:
    """K25, part: what does not wait for a request, directly or not, is another agent."""
    trace = traced(
        [
            request(0, [1, 2, 3], "a"),
            request(1, [1, 2, 3, 4], "a", waits=(0,)),
            request(2, [1, 2, 3, 5], "a", waits=(0,)),
            request(3, [1, 2, 3, 4], "a", waits=(0,)),
            request(4, [8, 9], "a", "sub-agent", (1,)),
            request(5, [8, 9], "a", "sub-agent", (1,)),
        ]
    )
    threads = threads_of(trace)
    assert threads.thread.tolist() == [0, 0, 1, 2, 3, 4]
    assert threads.parent.tolist() == [-1, -1, 0, 0, 1, 1]
    assert threads.is_fork.tolist() == [False, False, True, True, False, False]


def test_spawned_and_forked_lines_and_their_join() -> None:
    """K25, part: who waits for whom tells spawns, forks and joins."""
    trace = traced(
        [
            request(0, [1, 2, 3, 4], "a"),
            request(1, [9], "a", "sub-agent", (0,)),  # spawned: a root of its own
            request(2, [1, 2, 3, 4, 5], "a", "branch", (0,)),  # forked: inherits the text
            request(3, [9, 10], "a", "sub-agent", (1,)),
            request(4, [1, 2, 3, 4, 6], "a", "turn", (0, 2, 3)),  # joins both
            request(5, [1, 2], "a", "turn", (4,)),  # a compaction: half is gone
        ]
    )
    threads, steps = stepped(trace)
    assert threads.thread.tolist() == [0, 1, 2, 1, 0, 0]
    assert threads.parent.tolist() == [-1, 0, 0, -1, -1, -1]
    assert threads.is_fork.tolist() == [False, False, True, False, False, False]
    assert steps.join.tolist() == [-1, 4, 4, -1, -1, -1]
    assert steps.is_held.tolist() == [True, True, True, True, False, False]
    assert steps.kept[5] == 2
    assert steps.dropped[5] == 3


def test_a_return_to_an_older_step_is_known_and_held() -> None:
    trace = traced(
        [
            request(0, [1, 2, 3]),
            request(1, [1, 2, 3, 4]),
            request(2, [1, 2, 3, 4, 5, 6]),
            request(3, [1, 2, 3, 4, 7]),
        ]
    )
    # every request touches its whole path, so the latest holder of block 4 is request 2
    threads, steps = stepped(trace)
    assert threads.source.tolist() == [-1, 0, 1, 2]
    assert steps.back.tolist() == [0, 1, 1, 1]
    assert steps.dropped.tolist()[3] == 2


def test_a_part_of_a_trace_keeps_the_names_of_the_whole() -> None:
    """K25, part: fewer requests than the whole has sessions."""
    whole = traced([request(i, [i], session=f"s{i}") for i in range(40)])
    part = picked(whole, np.arange(40) >= 37)
    assert part.session.tolist() == [37, 38, 39]
    assert threads_of(part).session.tolist() == [0, 1, 2]
