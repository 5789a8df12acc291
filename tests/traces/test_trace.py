"""A workload as arrays: blocks of any size against texts written out, token by token."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.errors import ConfigError
from mallee.traces.trace import Rule, Trace, trace_of
from mallee.traces.workload import Request, Workload

BIG = 1 << 40
"""First id, in tests of large ids."""


@st.composite
def texts(draw: st.DrawFn, most: int = 12) -> list[tuple[int, ...]]:
    """Prompts of one random forest of tokens: some equal, some begin like others."""
    found: list[tuple[int, ...]] = []
    for i in range(draw(st.integers(1, most))):
        begin = draw(st.sampled_from(found)) if found and draw(st.booleans()) else ()
        kept = begin[: draw(st.integers(0, len(begin)))]
        own = [100 * i + 1 + j for j in range(draw(st.integers(0, 20)))]
        found.append((*kept, *own) or (0,))
    return found


def ids_of(
    prompts: Sequence[tuple[int, ...]], size: int, first: int, is_ceil: bool
) -> list[list[int]]:
    """Prefix-chained ids of blocks of `size` tokens."""
    names: dict[tuple[int, ...], int] = {}
    found = []
    for prompt in prompts:
        ends = range(size, len(prompt) + 1, size)
        if is_ceil and len(prompt) % size:
            ends = [*ends, len(prompt)]
        found.append([names.setdefault(prompt[:end], first + len(names)) for end in ends])
    return found


def workload(prompts: Sequence[tuple[int, ...]], ids: Sequence[list[int]], size: int) -> Workload:
    requests = [
        Request(i, float(i), own, len(prompt), 1)
        for i, (prompt, own) in enumerate(zip(prompts, ids, strict=True))
    ]
    return Workload("texts", size, lambda: iter(requests))


def names_of(prompt: tuple[int, ...], size: int, id_tokens: int, is_ceil: bool) -> list[object]:
    """Key of a block of `size` tokens: the text up to its end, as far as ids tell.

    An id that is longer than a block tells the text up to its own end.
    """
    known = len(prompt) if is_ceil else len(prompt) - len(prompt) % id_tokens
    ends = [*range(size, known + 1, size)]
    if is_ceil and known % size:
        ends.append(known)
    reach = max(size, id_tokens)
    return [(prompt[: min(known, -(-end // reach) * reach)], end) for end in ends]


def check_numbers(trace: Trace) -> None:
    """Numbers from 0 by first appearance, ascending along paths."""
    seen: set[int] = set()
    for i in range(len(trace)):
        path = trace.path(i).tolist()
        assert path == sorted(set(path))
        for block in path:
            assert block in seen or block == len(seen)
            seen.add(block)
    assert trace.num_blocks == len(seen)


@given(
    texts(),
    st.sampled_from([(4, 4), (4, 2), (4, 1), (2, 4), (2, 8), (1, 4), (8, 2), (3, 9)]),
    st.booleans(),
    st.sampled_from([0, 5, BIG]),
)
def test_blocks_are_equal_where_the_texts_up_to_their_ends_are(
    prompts: list[tuple[int, ...]], sizes: tuple[int, int], is_ceil: bool, first: int
) -> None:
    """K22, part."""
    id_tokens, size = sizes
    made = workload(prompts, ids_of(prompts, id_tokens, first, is_ceil), id_tokens)
    trace = trace_of(made, block_size=size, rule="ceil" if is_ceil else "floor")
    check_numbers(trace)
    numbers: dict[object, int] = {}
    for i, prompt in enumerate(prompts):
        names = names_of(prompt, size, id_tokens, is_ceil)
        assert trace.path(i).tolist() == [numbers.setdefault(n, len(numbers)) for n in names]
    assert trace.input_tokens.tolist() == [len(prompt) for prompt in prompts]


@given(texts(), st.sampled_from([2, 4, 8]), st.booleans())
def test_the_rule_is_told_by_prompts_that_end_inside_a_block_with_a_name(
    prompts: list[tuple[int, ...]], size: int, is_ceil: bool
) -> None:
    """K22, part."""
    made = workload(prompts, ids_of(prompts, 4, 0, is_ceil), 4)
    found = trace_of(made, block_size=size)
    told: Rule = "ceil" if is_ceil and any(len(prompt) % 4 for prompt in prompts) else "floor"
    assert found.rule == told
    same = trace_of(made, block_size=size, rule=told)
    assert np.array_equal(found.blocks, same.blocks)
    assert np.array_equal(found.starts, same.starts)


class Branch(NamedTuple):
    """A request of a drawn search: its parent, tokens that it adds, tokens of its answer."""

    parent: int
    own: int
    answer: int


@st.composite
def searches(draw: st.DrawFn) -> list[Branch]:
    found: list[Branch] = []
    for i in range(draw(st.integers(1, 14))):
        parent = draw(st.integers(-1, i - 1))
        found.append(Branch(parent, draw(st.integers(int(parent < 0), 9)), draw(st.integers(0, 9))))
    return found


@given(searches(), st.sampled_from([(4, 4), (4, 2), (2, 4), (4, 1)]))
def test_forks_have_the_blocks_of_the_text_they_go_on_from(
    search: list[Branch], sizes: tuple[int, int]
) -> None:
    """K22, part: prompt and answer of the parent, then text that nobody else has."""
    id_tokens, size = sizes
    children = [branch.parent for branch in search]
    roots = [tuple(range(100 * i, 100 * i + b.own)) for i, b in enumerate(search)]
    ids = ids_of(
        [r if b.parent < 0 else () for r, b in zip(roots, search, strict=True)], id_tokens, 0, True
    )
    requests = [
        Request(
            number=i,
            arrival_s=0.0,
            ids=ids[i] if branch.parent < 0 else (),
            input_tokens=branch.own,
            output_tokens=branch.answer,
            parent=branch.parent,
            num_children=children.count(i),
        )
        for i, branch in enumerate(search)
    ]
    made = Workload("search", id_tokens, lambda: iter(requests), has_forks=True)
    trace = trace_of(made, block_size=size, rule="floor")
    check_numbers(trace)
    prompts: list[tuple[tuple[int, int], ...]] = []  # tokens as (who brought it, place)
    ends: list[tuple[tuple[int, int], ...]] = []
    for i, branch in enumerate(search):
        before = ends[branch.parent] if branch.parent >= 0 else ()
        prompts.append((*before, *((i, j) for j in range(branch.own))))
        ends.append((*prompts[i], *((i, branch.own + j) for j in range(branch.answer))))
    assert trace.input_tokens.tolist() == [len(prompt) for prompt in prompts]
    for i, one in enumerate(prompts):
        assert len(trace.path(i)) == len(one) // size
        for j in range(i):
            same = 0
            for a, b in zip(one, prompts[j], strict=False):
                if a != b:
                    break
                same += 1
            shared = np.intersect1d(trace.path(i), trace.path(j))
            assert len(shared) == same // size
    assert trace.parent.tolist() == children


@pytest.mark.parametrize("size", [3, 6, 0, -4])
def test_sizes_that_do_not_divide_are_refused(size: int) -> None:
    made = workload([(1, 2, 3, 4)], [[0]], 4)
    with pytest.raises(ConfigError, match=f"block size {size}: give a multiple or a divisor of 4"):
        trace_of(made, block_size=size)
