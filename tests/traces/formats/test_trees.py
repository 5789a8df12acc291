"""Search trees are read as requests that fork each other."""

import json
from pathlib import Path

import pytest

from mallee.protocol.errors import CodecError
from mallee.traces.read import read_workload

DATA = Path(__file__).parents[1] / "data"


def write(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "trees.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    return path


def test_a_beam_search_forks_its_parents_level_by_level() -> None:
    workload = read_workload(DATA / "beam.jsonl")
    root, one, two, three, four, other, last = workload
    assert (root.output_tokens, root.parent, root.num_children, root.input_tokens) == (
        0,
        -1,
        2,
        2112,
    )
    assert (one.parent, one.wait_for, one.output_tokens, one.num_children) == (0, (), 7, 2)
    assert (three.parent, three.wait_for, three.input_tokens) == (1, (1, 2), 0)
    assert (four.session, four.cls, len(four.ids)) == ("tree 3", "node", 0)
    assert (two.num_children, other.number, last.parent) == (0, 5, 5)
    assert other.ids == root.ids == [0, 1, 2, 3]


def tree(*nodes: tuple[int, int, int], steps: tuple[int, ...] = (), task: int = 1) -> str:
    """Nodes as (id, parent, depth); `steps` of all but the root."""
    found: list[dict[str, int]] = [
        {"id": name, "parent": parent, "depth": depth} for name, parent, depth in nodes
    ]
    for node, step in zip(found[1:], steps, strict=False):
        node["step"] = step
    return json.dumps({"task": task, "nodes": found})


def test_nodes_may_be_listed_in_any_order_of_parents_before_children(tmp_path: Path) -> None:
    """K22, part: nobody waits for who comes later."""
    nodes = [(0, -1, 0), (1, 0, 1), (3, 1, 2), (2, 0, 1)]
    _, *levels = read_workload(write(tmp_path, tree(*nodes)))
    assert [(r.parent, r.wait_for) for r in levels] == [(0, ()), (0, ()), (1, (1, 2))]
    _, *visits = read_workload(write(tmp_path, tree(*nodes, steps=(0, 2, 1))))
    assert [(r.parent, r.wait_for) for r in visits] == [(0, ()), (0, (1,)), (1, (2,))]
    with pytest.raises(CodecError, match=r"line 1: some nodes have a step"):
        list(read_workload(write(tmp_path, tree(*nodes, steps=(0, 2)))))
    with pytest.raises(CodecError, match=r"line 1: node 3 .* has no place"):
        list(read_workload(write(tmp_path, tree(*nodes, steps=(1, 0, 2)))))


def test_a_root_that_nobody_forks_answers_and_a_task_may_be_searched_twice(tmp_path: Path) -> None:
    path = write(tmp_path, tree((0, -1, 0)), tree((0, -1, 0), (1, 0, 1)), tree((0, -1, 0), task=2))
    found = list(read_workload(path))
    assert [r.session for r in found] == ["tree 1", "tree 1 (2)", "tree 1 (2)", "tree 2"]
    assert [r.output_tokens > 0 for r in found] == [True, False, True, True]


def test_a_depth_first_search_visits_one_node_after_the_other() -> None:
    root, one, two, three = read_workload(DATA / "depth_first.jsonl")
    assert [r.parent for r in (root, one, two, three)] == [-1, 0, 1, 0]
    assert [r.wait_for for r in (one, two, three)] == [(), (1,), (2,)]
    assert root.session == "tree 0 prune"


def test_a_limit_inside_a_tree_counts_only_the_children_that_are_left() -> None:
    nodes = list(read_workload(DATA / "beam.jsonl", limit=4))
    assert [r.num_children for r in nodes] == [2, 1, 0, 0]
