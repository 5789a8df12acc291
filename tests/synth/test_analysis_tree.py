"""The prefix tree of a trace, what is reused of it, and LRU caches of every size, against oracles."""

from collections import Counter, OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.errors import CodecError
from mallee.synth.analysis.analysis import analyze
from mallee.synth.analysis.reuse import NO_TOUCHER, reuse_of
from mallee.synth.analysis.stack import miss_curve
from mallee.synth.core.prefix_tree import ROOT, PrefixTree, require_tree
from mallee.traces.trace import trace_of
from support.synth.drawn import SIZE, Line, drawn, paths_trace, tree_paths, workload

# No deadlines: kernels are compiled in the first call of a process.


@given(tree_paths())
def test_a_tree_holds_what_its_paths_say(paths: list[list[int]]) -> None:
    """K22, part: hash trace to tree, visits marked; against dictionaries."""
    tree = PrefixTree.of(paths_trace(paths))
    number = {name: i for i, name in enumerate(dict.fromkeys(b for p in paths for b in p))}
    parent = {b: (a or None) for p in paths for a, b in zip([0, *p], p, strict=False)}
    visits = Counter(b for path in paths for b in path)
    assert len(tree) == len(number)
    for name, i in number.items():
        above = parent[name]
        assert tree.parents[i] == (ROOT if above is None else number[above])
        assert tree.visits[i] == visits[name]
        assert tree.children[i] == sum(above == name for above in parent.values())
        assert tree.ends[i] == sum(path[-1:] == [name] for path in paths)
        assert tree.depths[i] == next(path.index(name) + 1 for path in paths if name in path)
    assert tree.roots.tolist() == np.flatnonzero(tree.parents == ROOT).tolist()
    assert tree.branch_nodes.tolist() == np.flatnonzero(tree.children > 1).tolist()
    inside = tree.parents != ROOT
    onward = np.bincount(tree.parents[inside], tree.visits[inside], len(tree))
    assert np.array_equal(onward + tree.ends, tree.visits)


@pytest.mark.parametrize(
    ("paths", "named"),
    [
        (
            [[1, 2], [3, 2]],
            ("block 1 comes after block 0 in request 0", "after block 2 in request 1"),
        ),
        ([[1, 2], [2]], ("block 1 comes after block 0", "after nothing in request 1")),
        (
            [[1, 2], [3], [3, 1]],
            ("block 0 comes after nothing in request 0", "block 2 in request 2"),
        ),
        ([[1, 2, 1]], ("block 0 comes after nothing", "after block 1 in request 0")),
        ([[1, 1]], ("block 0 comes after nothing", "after block 0 in request 0")),
    ],
)
def test_what_is_no_tree_is_refused_by_name(paths: list[list[int]], named: tuple[str, ...]) -> None:
    """K22: a non-tree input is rejected naming the block and both parents."""
    with pytest.raises(CodecError, match="not a prefix tree") as caught:
        PrefixTree.of(paths_trace(paths))
    for part in named:
        assert part in caught.value.message
    assert set(caught.value.fields) == {"block", "parents", "requests", "depths"}


@given(tree_paths())
def test_reuse_is_what_a_search_back_finds(paths: list[list[int]]) -> None:
    found = reuse_of(paths_trace(paths))
    for i, path in enumerate(paths):
        shared = [sum(a == b for a, b in zip(path, other, strict=False)) for other in paths[:i]]
        most = max(shared, default=0)
        assert found.hit_blocks[i] == most
        last = max((j for j in range(i) if shared[j] == most), default=NO_TOUCHER)
        assert found.touchers[i] == (last if most else NO_TOUCHER)


@given(tree_paths(), st.integers(0, 8))
def test_new_tokens_are_those_after_the_last_whole_block_that_was_seen(
    paths: list[list[int]], rest: int
) -> None:
    lines = [Line(p, float(i), len(p) * SIZE + rest % SIZE) for i, p in enumerate(paths)]
    if any(line.tokens == 0 for line in lines):
        lines = [Line(line.ids, line.at_s, (line.tokens or 0) + 1) for line in lines]
    found = analyze(drawn(lines))
    seen: set[int] = set()
    for i, line in enumerate(lines):
        hit = sum(block in seen for block in line.ids)
        assert found.hit_depth[i] == hit
        assert found.new_blocks[i] == len(line.ids) - hit
        assert found.new_tokens[i] == line.tokens - hit * SIZE  # type: ignore[operator]
        seen.update(line.ids)


def test_a_partial_last_block_that_hits_leaves_no_new_tokens() -> None:
    lines = [Line([1, 2], 0.0, 6), Line([1, 2], 1.0, 6)]
    assert analyze(drawn(lines, rule="auto")).new_tokens.tolist() == [6.0, 0.0]
    assert analyze(drawn(lines)).new_tokens.tolist() == [6.0, 2.0]  # the whole block alone


def lru_hits(paths: list[list[int]], size: int) -> int:
    """References that hit in a plain LRU cache, each prompt's first block first."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for block in (block for path in paths for block in path):
        if block in cache:
            hits += 1
            cache.move_to_end(block)
        elif size:
            cache[block] = None
            if len(cache) > size:
                cache.popitem(last=False)
    return hits


@given(tree_paths(40))
def test_the_curve_is_that_of_a_cache_at_every_size(paths: list[list[int]]) -> None:
    """X9, part: exact stack distances."""
    curve = miss_curve(paths_trace(paths))
    references = sum(map(len, paths))
    sizes = np.arange(curve.num_blocks + 2)
    hits = curve.hits_at(sizes) * references
    assert hits.round(6).tolist() == [float(lru_hits(paths, size)) for size in sizes.tolist()]
    assert curve.ideal * max(1, references) == pytest.approx(references - curve.num_blocks)


def engine_hits(paths: list[list[int]], size: int) -> int:
    """Leading blocks found, in a cache that is then touched from the prompt's last block to its first."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for path in paths:
        for block in path:
            if block not in cache:
                break
            hits += 1
        for block in reversed(path):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > size:
            cache.popitem(last=False)
    return hits


@given(tree_paths(40))
def test_the_curve_of_engines_is_that_of_a_cache_that_keeps_fronts(paths: list[list[int]]) -> None:
    """X9, part."""
    curve = miss_curve(paths_trace(paths), keeps_front=True)
    references = sum(map(len, paths))
    sizes = np.arange(curve.num_blocks + 2)
    hits = curve.hits_at(sizes) * references
    assert hits.round(6).tolist() == [float(engine_hits(paths, size)) for size in sizes.tolist()]


@pytest.mark.parametrize(("size", "id_tokens"), [(4, 4), (8, 4), (4, 8)])
def test_what_is_no_tree_is_refused_by_the_files_own_ids(size: int, id_tokens: int) -> None:
    """K22: also where a block is several ids, or an id several blocks."""
    each = max(1, size // id_tokens)  # ids of a block
    ids = {name: range(name, name + each) for name in (70, 80, 90)}
    paths = [[*ids[70], *ids[80]], [*ids[90], *ids[80]]]
    source = workload([Line(path, float(i)) for i, path in enumerate(paths)], id_tokens)
    trace = trace_of(source, block_size=size)
    with pytest.raises(CodecError) as caught:
        require_tree(source, trace)
    last = each - 1
    assert caught.value.fields["block"] == 80 + last
    assert caught.value.fields["parents"] == [70 + last, 90 + last]
    assert caught.value.fields["requests"] == [0, 1]
    assert f"hash id {80 + last} comes after hash id {70 + last} in request 0" in str(caught.value)
    tree = workload([Line(paths[0], 0.0), Line(ids[70], 1.0)], id_tokens)
    require_tree(tree, trace_of(tree, block_size=size))
