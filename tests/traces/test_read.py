"""K26: any trace becomes the same workload: arrivals, shared text, dependencies, tool waits, forks."""

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.errors import CodecError, ConfigError
from mallee.traces.files.problems import Problems
from mallee.traces.read import read_workload
from mallee.traces.trace import trace_of
from mallee.traces.workload import Request, Runs, compact
from support.public_traces import KINDS, PUBLIC, needs_public
from support.trace_rows import chat, row, write

DATA = Path(__file__).parent / "data"

runs = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), max_size=6)


# Runs of ids


@given(runs, st.data())
def test_runs_are_the_list_of_their_ids(runs: list[tuple[int, int]], data: st.DataObject) -> None:
    ids = [i for first, count in runs for i in range(first, first + count)]
    length = data.draw(st.integers(0, len(ids)))
    found = Runs(runs, length)
    assert list(found) == ids[:length] == np.asarray(found).tolist()
    assert [found[i] for i in range(-length, length)] == [
        ids[:length][i] for i in range(-length, length)
    ]
    low, high = data.draw(st.integers(-9, 9)), data.draw(st.integers(-9, 9))
    assert found[low:high] == ids[:length][low:high]
    assert found == ids[:length]
    assert np.asarray(found, dtype=np.uint64).dtype == np.uint64


def test_runs_refuse_a_length_they_do_not_have() -> None:
    with pytest.raises(ValueError, match="runs of 3 ids don't make 4"):
        Runs([(7, 3)], 4)
    with pytest.raises(IndexError):
        Runs([(7, 3)])[3]


# Mooncake's rows


def test_mooncake_rows_keep_their_times_lengths_and_ids() -> None:
    workload = read_workload(DATA / "mooncake.jsonl")
    assert (workload.kind, workload.id_tokens, workload.name) == ("mooncake", 512, "mooncake.jsonl")
    assert list(workload) == [
        Request(0, 0.0, [0, 1, 2], 1500, 20),
        Request(1, 0.0, [0, 1], 1024, 1),
        Request(2, 2.5, [0, 1, 2, 3], 2000, 7),
    ]
    assert list(workload) == list(workload)


def test_ticks_of_three_seconds_are_spread_evenly(tmp_path: Path) -> None:
    lines = [row(3000 * tick) for tick in range(9) for _ in range(tick % 3 + 1)]
    path = write(tmp_path, *lines)
    workload = read_workload(path)
    assert "spread" in workload.note
    arrivals = [r.arrival_s for r in workload]
    assert arrivals[:7] == [0.0, 3.0, 4.5, 6.0, 7.0, 8.0, 9.0]
    assert arrivals == sorted(arrivals)
    kept = [r.arrival_s for r in read_workload(path, spread_ticks=False)]
    assert kept[:7] == [0.0, 3.0, 3.0, 6.0, 6.0, 6.0, 9.0]


def test_other_seeds_spread_ticks_at_random(tmp_path: Path) -> None:
    path = write(tmp_path, *(row(3000 * tick) for tick in range(9) for _ in range(4)))
    even, one, two = ([r.arrival_s for r in read_workload(path, seed=seed)] for seed in (0, 1, 2))
    assert one != even
    assert one != two
    assert one == [r.arrival_s for r in read_workload(path, seed=1)]
    assert one == sorted(one)
    assert [int(at // 3) for at in one] == [int(at // 3) for at in even]


@pytest.mark.parametrize("step", [1000, 2998, 3100])
def test_other_timestamps_are_left_alone(tmp_path: Path, step: int) -> None:
    path = write(tmp_path, *(row(step * tick) for tick in range(9) for _ in range(2)))
    assert [r.arrival_s for r in read_workload(path)][:4] == [0.0, 0.0, step / 1000, step / 1000]


@pytest.mark.parametrize("size", [16, 64, 128, 512])
@pytest.mark.parametrize("counts_partial", [True, False])
def test_what_an_id_stands_for_is_told_by_the_rows(
    tmp_path: Path, size: int, counts_partial: bool
) -> None:
    lengths = [40 * size + 3, 90 * size, 77 * size + size - 1]
    count = {n: -(-n // size) if counts_partial else n // size for n in lengths}
    path = write(tmp_path, *(row(i, n, tuple(range(count[n]))) for i, n in enumerate(lengths)))
    assert read_workload(path).id_tokens == size
    assert read_workload(path, id_tokens=16).id_tokens == 16


def test_a_row_with_too_many_ids_does_not_make_all_blocks_smaller(tmp_path: Path) -> None:
    """It is named, or left out and counted; an explicit size is taken as it is."""
    lengths = [2000, 3000, 1000, 5000]
    lines = [row(i, n, tuple(range(-(-n // 512)))) for i, n in enumerate(lengths)]
    lines[2] = row(2, 1000, tuple(range(8)))
    path = write(tmp_path, *lines)
    with pytest.raises(
        CodecError, match=r"line 3: 8 hash_ids .* 1000: .* 512 tokens, so at most 2"
    ):
        read_workload(path)
    problems = Problems()
    workload = read_workload(path, problems=problems)
    assert [request.input_tokens for request in workload] == [2000, 3000, 5000]
    assert (workload.id_tokens, len(problems)) == (512, 1)
    assert read_workload(path, id_tokens=128).id_tokens == 128


def test_every_answer_has_a_token(tmp_path: Path) -> None:
    """A request without one would only leave a capsule, which nobody forks and nobody releases."""
    for more in ({}, {"session_id": "s"}):
        (request,) = read_workload(write(tmp_path, row(output_length=0, **more)))
        assert request.output_tokens == 1
    recorded = (DATA / "sessions.jsonl").read_text().splitlines()[1].replace('"out":10', '"out":0')
    (request,) = read_workload(write(tmp_path, recorded))
    assert request.output_tokens == 1


HASHES = [(7, 1 << 52), (7, 1 << 63), (-5, (1 << 64) - 1), (7, 1 << 63)]


@pytest.mark.parametrize("kind", ["mooncake", "agentic", "bailian"])
def test_hashes_of_64_bits_become_numbers_from_0(tmp_path: Path, kind: str) -> None:
    more = {"session_id": "s"} if kind == "agentic" else {}
    lines = {
        "mooncake": [row(ids=ids) for ids in HASHES],
        "agentic": [row(ids=ids, **more) for ids in HASHES],
        "bailian": [chat(i, -1, 0.0, hash_ids=ids) for i, ids in enumerate(HASHES)],
    }[kind]
    workload = read_workload(write(tmp_path, *lines))
    assert workload.kind == kind
    for _ in range(2):
        assert [list(r.ids) for r in workload] == [[0, 1], [0, 2], [3, 4], [0, 2]]


def test_ids_above_those_that_forks_get_are_numbered_anew(tmp_path: Path) -> None:
    """K22, part: rows of a trace whose ids begin at 2**45, with a fork."""
    root = row(ids=(1 << 45, (1 << 45) + 1), request_id="a")
    path = write(tmp_path, root, row(tokens=1010, request_id="b", fork_of="a"))
    one, two = read_workload(path)
    assert (list(one.ids), two.parent) == ([0, 1], 0)
    assert trace_of(read_workload(path), block_size=16).has_forks


def test_hashes_behind_the_first_rows_stay_apart_from_other_ids(tmp_path: Path) -> None:
    path = write(tmp_path, *[row()] * 300, *(row(ids=ids) for ids in HASHES))
    found = [list(r.ids) for r in read_workload(path)][300:]
    names = dict(zip(itertools.chain(*HASHES), itertools.chain(*found), strict=True))
    assert [[names[i] for i in ids] for ids in HASHES] == found
    assert len(set(names.values())) == len(names) == 5
    assert names[7] == 7
    assert all(0 <= name < 1 << 53 for name in names.values())


# Rows with dependencies


def test_agentic_rows_come_after_those_they_wait_for() -> None:
    workload = read_workload(DATA / "agentic.jsonl")
    assert workload.kind == "agentic"
    root, right, left, join = workload
    assert [r.name for r in (root, right, left, join)] == ["root", "right", "left", "join"]
    assert (right.branches, right.cls, right.wait_for) == (3, "fan-out", (0,))
    assert (left.tool_wait_s, left.wait_for, left.arrival_s) == (0.25, (0,), 0.9)
    assert (join.wait_for, join.cls, join.session) == ((1, 2), "join", "s")
    assert join.arrival_s == 0.9  # recorded at 0.5, but it can't be there before `left`
    assert [r.number for r in workload] == [0, 1, 2, 3]


def test_turns_of_a_session_wait_for_each_other_where_rows_name_sessions_only() -> None:
    workload = read_workload(DATA / "turns.jsonl")
    assert workload.id_tokens == 64
    assert "turn before" in workload.note
    assert [(r.session, r.wait_for, r.cls) for r in workload] == [
        ("0", (), "turn"),
        ("1", (), "turn"),
        ("0", (0,), "turn"),
    ]


@given(st.lists(st.integers(0, 20), max_size=80))
def test_long_lists_of_ids_are_held_in_fewer_bytes_and_stay_the_same(steps: list[int]) -> None:
    ids = np.cumsum(np.where(np.array(steps, dtype=int) < 15, 1, steps)).tolist()
    assert list(compact(ids)) == ids


def test_a_limit_counts_only_the_forks_that_are_left(tmp_path: Path) -> None:
    forks = [row(i, 1010, request_id=f"f{i}", fork_of="a", wait_for=["a"]) for i in (1, 2)]
    path = write(tmp_path, row(request_id="a", output_length=0), *forks)
    for limit, children in ((3, 2), (2, 1), (1, 0)):
        first, *rest = read_workload(path, limit=limit)
        assert first.num_children == len(rest) == children
        assert first.output_tokens == (0 if children else 1)
        assert all((r.parent, r.input_tokens, r.ids) == (0, 10, ()) for r in rest)
    assert read_workload(path).has_forks


# Bailian's chats


def test_chats_wait_for_their_parents_in_one_session(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        chat(159, -1, 61.114, output_length=0),
        chat(160, 159, 62.5, type="search"),
        chat(7, 3, 63.0, type=""),  # chat 3 was before the file begins
        chat(161, 160, 64.114),
    )
    workload = read_workload(path)
    assert (workload.kind, workload.id_tokens) == ("bailian", 16)
    assert [(r.session, r.wait_for, r.cls, r.name) for r in workload] == [
        ("159", (), "text", "159"),
        ("159", (0,), "search", "160"),
        ("7", (), "turn", "7"),
        ("159", (1,), "text", "161"),
    ]
    first, *_, last = workload
    assert (list(first.ids), first.input_tokens, first.output_tokens) == ([1, 2, 3], 40, 1)
    assert last.arrival_s == pytest.approx(3.0)


# Recorded sessions


def test_sessions_become_a_fleet_with_dependencies() -> None:
    workload = read_workload(DATA / "sessions.jsonl", seed=1)
    assert (workload.kind, workload.id_tokens) == ("sessions", 64)
    own = {r.session: [] for r in workload}
    for request in workload:
        own[request.session].append(request)
    first, second, sub, sub_next, third, late = own["a"]
    assert [r.cls for r in own["a"]] == ["turn", "turn", "sub-agent", "sub-agent", "turn", "turn"]
    assert (second.wait_for, second.tool_wait_s) == ((first.number,), 6.0)
    assert (sub.wait_for, sub.tool_wait_s) == ((second.number,), 5.0)
    assert (sub_next.wait_for, sub_next.tool_wait_s) == ((sub.number,), 6.0)
    assert (third.wait_for, third.tool_wait_s) == ((second.number, sub_next.number), 29.0)
    assert (late.wait_for, late.tool_wait_s) == ((third.number,), 600.0)  # a night, cut
    assert late.arrival_s - third.arrival_s == 600.0
    assert (second.input_tokens, second.output_tokens) == (1300, 20)


def test_sessions_with_equal_tools_share_them_and_nothing_else() -> None:
    by_session = {r.session: r for r in read_workload(DATA / "sessions.jsonl") if not r.wait_for}
    a, b, c = (list(by_session[name].ids) for name in "abc")
    assert common(a, b) == 640 // 64
    assert common(a, c) == (640 + 128) // 64
    assert not set(a[12:]) & set(c[12:])


def test_ids_of_sessions_stay_chained() -> None:
    requests = list(read_workload(DATA / "sessions.jsonl"))
    assert_chained(requests)
    first, second, sub, sub_next, third, late = (r for r in requests if r.session == "a")
    assert common(first.ids, second.ids) == 14
    assert common(second.ids, third.ids) == 20
    assert common(sub.ids, sub_next.ids) == 7
    assert common(first.ids, late.ids) == 8
    assert not set(first.ids) & set(sub.ids)


def test_when_sessions_begin_follows_from_the_seed() -> None:
    def begins(seed: int, rate: float = 240.0) -> list[float]:
        path = DATA / "sessions.jsonl"
        fleet = read_workload(path, seed=seed, sessions_per_hour=rate)
        return [r.arrival_s for r in fleet if not r.wait_for]

    assert begins(1) == begins(1) != begins(2)
    assert begins(1, 480.0) == pytest.approx([at / 2 for at in begins(1)])


# Search trees


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


# Azure's tables


def test_azure_rows_have_no_text_in_common_and_times_with_and_without_zone(tmp_path: Path) -> None:
    workload = read_workload(DATA / "azure.csv")
    assert workload.kind == "azure"
    assert list(workload) == [Request(0, 0.0, [], 4808, 10), Request(1, 1.052, [], 3180, 8)]
    lines = ["2024-05-10 00:00:00.009930+00:00,10,3", "2024-05-10 00:00:01+00:00,10,0"]
    header = "TIMESTAMP,ContextTokens,GeneratedTokens"
    path = write(tmp_path, header, *lines, "2024-05-10T00:00:02Z,10,1")
    assert [(r.arrival_s, r.output_tokens) for r in read_workload(path)] == [
        (0.0, 3),
        (0.99007, 1),
        (1.99007, 1),
    ]


# Wrong files


def test_a_mark_of_utf_8_at_the_begin_is_no_text(tmp_path: Path) -> None:
    path = write(tmp_path, "\ufeff" + row(), row())
    assert len(list(read_workload(path))) == 2


def test_missing_empty_and_damaged_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_workload(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="no requests"):
        read_workload(write(tmp_path, "", ""))
    with pytest.raises(ConfigError, match="standard input can't be read"):
        read_workload("-")
    with pytest.raises(ConfigError, match=r"can't be read .File name too long"):
        read_workload("a" * 300)
    for other in (tmp_path, Path("/dev/null")):
        with pytest.raises(ConfigError, match="no plain file"):
            read_workload(other)
    for line, says in (('{"a": 1}', "line 1: fields a; known are"), ("a,b,c", "line 1: neither")):
        with pytest.raises(CodecError, match=says):
            read_workload(write(tmp_path, line))
    damaged = tmp_path / "damaged.gz"
    damaged.write_bytes(gzip.compress((DATA / "mooncake.jsonl").read_bytes())[:-12])
    with pytest.raises(CodecError, match="damaged"):
        list(read_workload(damaged))


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "x"},
        {"limit": 0},
        {"id_tokens": 0},
        {"id_tokens": 1 << 17},
        {"seed": -1},
        {"sessions_per_hour": 0.0},
        {"max_gap_s": -1.0},
    ],
)
def test_wrong_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        read_workload(DATA / "mooncake.jsonl", **wrong)


# The public traces


@pytest.mark.slow
@needs_public
@pytest.mark.parametrize("name", KINDS)
def test_public_traces_are_read_whole_and_in_order(name: str) -> None:
    workload = read_workload(PUBLIC / name)
    found = list(workload)
    assert (workload.kind, len(found)) == KINDS[name]
    assert [r.number for r in found] == list(range(len(found)))
    assert all(a.arrival_s <= b.arrival_s for a, b in itertools.pairwise(found))
    assert all(max((*r.wait_for, r.parent)) < r.number for r in found)
    assert_chained(found[:4000])


def test_a_delay_is_a_pause_after_the_row_before_with_and_without_a_timestamp(
    tmp_path: Path,
) -> None:
    """Reports F of others' systems: aiperf's `delay` was dropped, or its row refused."""
    lines = [
        row(0, session_id="s"),
        row(0, session_id="s", delay=500),
        row(0, session_id="s", delay=250).replace('"timestamp": 0, ', ""),
    ]
    first, second, third = read_workload(write(tmp_path, *lines))
    assert (second.wait_for, second.tool_wait_s) == ((first.number,), 0.5)
    assert (third.wait_for, third.tool_wait_s) == ((second.number,), 0.25)
    assert [r.arrival_s for r in (first, second, third)] == [0.0, 0.0, 0.25]


@pytest.mark.parametrize(
    ("session", "says"),
    [
        ({}, "no timestamp, and no session_id of a row before"),
        ({"session_id": "s"}, "no timestamp, and no row of session 's' before it"),
    ],
)
@pytest.mark.parametrize("kind", ["auto", "agentic"])
def test_a_row_that_comes_at_no_time_is_named(
    session: dict[str, str], says: str, kind: str, tmp_path: Path
) -> None:
    """But if no row has a time at all, they arrive by chance (`formats/test_others.py`)."""
    bad = row(0, **session).replace('"timestamp": 0, ', "")
    path = write(tmp_path, row(5, session_id="t"), bad)
    with pytest.raises(CodecError, match=f"line 2: {says}"):
        list(read_workload(path, kind=kind))


def common(a: Any, b: Any) -> int:
    """Leading ids that are equal."""
    pairs = list(zip(a, b, strict=False))
    return next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))


def assert_chained(requests: list[Request]) -> None:
    """No id has two different ids before it."""
    before: dict[int, int] = {}
    for request in requests:
        last = -1
        for i in request.ids:
            assert before.setdefault(i, last) == last, (request.number, i)
            last = i
