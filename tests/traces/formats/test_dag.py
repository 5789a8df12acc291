"""K22, K25: conversations as text (aiperf's dag-jsonl): read as calls, and written from any workload."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.traces.filler import WORDS, words
from mallee.traces.formats.dag_write import TAIL_TOKENS
from mallee.traces.read import read_workload
from mallee.traces.workload import NO_PARENT, Request, Runs, Workload
from mallee.traces.write import write_workload
from mallee.traces.written import Written
from support.made_workloads import sessions_workload

SIZE = 4


def turn(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4, **more}


def write(tmp_path: Path, **sessions: list[dict[str, Any]]) -> Path:
    path = tmp_path / "x.dag.jsonl"
    lines = [json.dumps({"session_id": name, "turns": turns}) for name, turns in sessions.items()]
    path.write_text("\n".join(lines))
    return path


def calls(path: Path, **more: Any) -> dict[str, Request]:
    found = read_workload(path, id_tokens=SIZE, **more)
    assert found.kind == "dag"
    return {request.name: request for request in found}


# Reading


def test_turns_say_what_is_new_and_answers_stay(tmp_path: Path) -> None:
    path = write(tmp_path, a=[turn("a b c d e"), turn("f g, h", delay=500)])
    first, second = calls(path).values()
    assert (first.input_tokens, first.output_tokens, first.session, first.cls) == (
        5,
        4,
        "a",
        "turn",
    )
    assert (second.input_tokens, second.wait_for, second.tool_wait_s) == (5 + 4 + 4, (0,), 0.5)
    assert (list(first.ids), list(second.ids)) == ([0], [0, 1, 2])
    assert second.arrival_s == 0.5


def test_equal_text_from_the_first_word_on_has_equal_ids(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        a=[turn("a b c d e f g h i")],
        b=[turn("a b c d e f g x i")],
        c=[turn("x b c d e f g h")],
    )
    a, b, c = (list(request.ids) for request in calls(path).values())
    assert (a[0], len(a), len(b), len(c)) == (b[0], 2, 2, 2)
    assert len({*a, *b, *c}) == 5


def test_a_spawned_session_begins_with_nothing_and_is_waited_for(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        main=[turn("a", spawns=["one", {"children": ["two"], "join_at": 2}]), turn("b"), turn("c")],
        one=[turn("x"), turn("y")],
        two=[turn("z", delay=1000, spawns=["last"])],
        last=[turn("q")],
    )
    by_name = calls(path)
    number = {name: request.number for name, request in by_name.items()}
    waits = {name: request.wait_for for name, request in by_name.items()}
    assert waits["one:0"] == waits["two:0"] == (number["main:0"],)
    assert waits["main:1"] == tuple(sorted((number["main:0"], number["one:1"])))
    assert waits["main:2"] == tuple(sorted((number["main:1"], number["two:0"])))
    assert waits["last:0"] == (number["two:0"],)
    assert {request.session for request in by_name.values()} == {"main"}
    assert by_name["one:0"].cls == by_name["last:0"].cls == "sub-agent"
    assert by_name["two:0"].input_tokens == 1
    assert not read_workload(path).has_forks


def test_forks_go_on_from_the_answer_and_so_does_their_parent(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        main=[
            turn("a b c d e"),
            turn("f", forks=[{"child": "left", "background": True}]),
            turn("g"),
        ],
        left=[turn("x y"), turn("z", forks=["right"], extra={"n": 3})],
        right=[turn("")],
    )
    by_name = calls(path)
    number = {name: request.number for name, request in by_name.items()}
    assert read_workload(path).has_forks
    forked = by_name["main:1"]
    assert (forked.parent, forked.num_children, forked.input_tokens) == (NO_PARENT, 2, 10)
    for name, parent, own in [
        ("left:0", "main:1", 2),
        ("main:2", "main:1", 1),
        ("left:1", "left:0", 1),
        ("right:0", "left:1", 0),
    ]:
        fork = by_name[name]
        assert (fork.parent, fork.input_tokens, fork.ids) == (number[parent], own, ())
    assert (by_name["left:1"].branches, by_name["right:0"].cls) == (3, "fork")
    assert by_name["left:0"].wait_for == ()


def test_isolated_turns_bring_their_whole_prompt(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    both = {"session_id": "a", "turns": [turn("a b c d e"), turn("a b c d f g h i")]}
    path.write_text(json.dumps({**both, "context_mode": "message_array_with_responses"}))
    first, second = calls(path).values()
    assert (list(first.ids), list(second.ids), second.input_tokens) == ([0], [0, 1], 8)
    assert second.wait_for == (0,)


def test_sessions_before_the_session_wait_for_nobody(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    main = {"session_id": "main", "turns": [turn("a")], "pre_session_spawns": ["before"]}
    path.write_text(
        json.dumps(main) + "\n" + json.dumps({"session_id": "before", "turns": [turn("b")]})
    )
    assert [request.wait_for for request in calls(path).values()] == [(), ()]


def test_a_turn_without_max_tokens_or_plain_text_is_read_all_the_same(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a b"}, {"type": "text", "text": "c"}]
    silent = {"role": "assistant", "content": None}
    only = {"messages": [{"role": "user", "content": parts}, silent]}
    (request,) = calls(write(tmp_path, a=[only])).values()
    assert (request.input_tokens, request.output_tokens) == (3, 256)


def test_a_limit_counts_only_the_forks_that_are_left(tmp_path: Path) -> None:
    path = write(tmp_path, a=[turn("a", forks=["b", "c"])], b=[turn("b")], c=[turn("c")])
    assert calls(path)["a:0"].num_children == 2
    assert calls(path, limit=2)["a:0"].num_children == 1


# Writing


def written(tmp_path: Path, *requests: Request) -> tuple[Written, dict[str, Any]]:
    """Counts, and the file's turns by session."""
    has_forks = any(request.parent != NO_PARENT for request in requests)
    load = Workload("test", SIZE, lambda: iter(requests), has_forks=has_forks)
    counts = write_workload(load, tmp_path / "x.jsonl", format="dag")
    lines = map(json.loads, (tmp_path / "x.jsonl").read_text().splitlines())
    return counts, {line["session_id"]: line["turns"] for line in lines}


def said(turns: list[dict[str, Any]]) -> list[int]:
    """Words of each turn."""
    return [len(turn["messages"][0]["content"].split()) for turn in turns]


def test_a_session_that_grows_is_one_conversation(tmp_path: Path) -> None:
    counts, sessions = written(
        tmp_path,
        Request(0, 0.0, [0, 1], 10, 3, "s"),
        Request(1, 0.1, [0, 1, 2, 3, 4], 20, 5, "s", wait_for=(0,), tool_wait_s=0.25),
    )
    assert list(sessions) == ["s"]
    assert said(sessions["s"]) == [10, 7]
    assert [t["max_tokens"] for t in sessions["s"]] == [3, 5]
    assert [t.get("delay") for t in sessions["s"]] == [None, 250.0]
    assert counts == Written(requests=2, rows=1, nbytes=counts.nbytes, lost_times=1)


def test_what_an_answer_leaves_too_much_is_taken_off_the_next_turn(tmp_path: Path) -> None:
    counts, sessions = written(
        tmp_path,
        Request(0, 0.0, [0], 5, 30, "s"),  # 30 tokens of answer, of which 2 stay in the context
        Request(1, 0.1, [0, 1], 10, 1, "s", wait_for=(0,)),
        Request(2, 0.2, [*range(20)], 80, 1, "s", wait_for=(1,)),
    )
    assert said(sessions["s"]) == [5, 1, 80 - (5 + 30 + 1 + 1)]
    assert counts.extra_tokens == 36 - 10


def test_a_sub_agent_is_spawned_and_joined_by_who_waits_for_it(tmp_path: Path) -> None:
    counts, sessions = written(
        tmp_path,
        Request(0, 0.0, [0, 1], 8, 1, "s"),
        Request(1, 0.1, [9], 4, 1, "s", "sub-agent", wait_for=(0,)),
        Request(2, 0.2, [0, 1, 2], 12, 1, "s", wait_for=(0,)),
        Request(3, 0.3, [9, 10], 9, 1, "s", "sub-agent", wait_for=(1,)),
        Request(4, 0.4, [0, 1, 2, 3], 16, 1, "s", wait_for=(2, 3)),
    )
    assert {name: said(turns) for name, turns in sessions.items()} == {
        "s": [8, 3, 3],
        "s.1": [4, 4],
    }
    assert sessions["s"][0]["spawns"] == [{"children": ["s.1"], "join_at": 2}]
    assert (counts.lost_waits, counts.restarts, counts.added_waits) == (0, 0, 0)


def test_a_spawned_conversation_that_nobody_waits_for_is_joined_by_the_last_turn(
    tmp_path: Path,
) -> None:
    counts, sessions = written(
        tmp_path,
        Request(0, 0.0, [0, 1], 8, 1, "s"),
        Request(1, 0.1, [9], 4, 1, "s", wait_for=(0,)),
        Request(2, 0.2, [0, 1, 2], 12, 1, "s", wait_for=(0,)),
        Request(3, 0.3, [0, 1, 2, 3], 16, 1, "s", wait_for=(2,)),
    )
    assert sessions["s"][0]["spawns"] == [{"children": ["s.1"], "join_at": 2}]
    assert counts.added_waits == 1


@pytest.mark.parametrize("is_reset", [False, True])
def test_behind_a_compaction_a_conversation_begins_anew(tmp_path: Path, is_reset: bool) -> None:
    ids = (0, 1, 2) if is_reset else (0, 7)
    counts, sessions = written(
        tmp_path,
        Request(0, 0.0, [*range(100)], 400, 1, "s"),
        Request(1, 0.1, [*ids], 4 * len(ids), 1, "s", wait_for=(0,), is_reset=is_reset),
        Request(2, 0.2, [*ids, 50], 4 * len(ids) + 5, 1, "s", wait_for=(1,)),
    )
    assert {name: len(turns) for name, turns in sessions.items()} == {"s": 1, "s.1": 2}
    assert sessions["s"][0]["spawns"] == ["s.1"]
    assert counts.restarts == 1
    first, second = (turns[0]["messages"][0]["content"] for turns in sessions.values())
    shared = 4 * (3 if is_reset else 1)
    assert first.split()[:shared] == second.split()[:shared]


def test_a_small_cut_at_the_end_is_no_new_conversation(tmp_path: Path) -> None:
    kept = 200 - TAIL_TOKENS // SIZE
    for cut, num in ((kept, 1), (kept - 1, 2)):
        ids = [*range(cut), *range(900, 900 + 210 - cut)]
        _, sessions = written(
            tmp_path,
            Request(0, 0.0, Runs([(0, 200)]), 800, 1, "s"),
            Request(1, 0.1, ids, 840, 1, "s", wait_for=(0,)),
        )
        assert len(sessions) == num


def test_two_that_go_on_from_one_are_a_turn_and_a_fork(tmp_path: Path) -> None:
    long = tuple(range(100))
    counts, sessions = written(
        tmp_path,
        Request(0, 0.0, [*long], 400, 2, "s"),
        Request(1, 0.1, [*long, 200], 405, 2, "s", wait_for=(0,)),
        Request(2, 0.2, [*long, 300], 406, 2, "s", wait_for=(0,)),
        Request(3, 0.3, [*long, 300, 301], 412, 2, "s", wait_for=(2,)),
    )
    assert {name: said(turns) for name, turns in sessions.items()} == {"s": [400, 3], "s.2": [4, 4]}
    assert sessions["s"][0]["forks"] == [{"child": "s.2", "background": True}]
    assert counts.restarts == counts.lost_waits == 0


def test_a_tree_is_forks_and_only_children_go_on(tmp_path: Path) -> None:
    counts, sessions = written(
        tmp_path,
        Request(0, 0.0, [0, 1], 9, 0, "t", num_children=2),
        Request(1, 0.0, (), 0, 7, "t", parent=0, num_children=1),
        Request(2, 0.0, (), 3, 7, "t", parent=0, branches=2),
        Request(3, 0.0, (), 2, 7, "t", parent=1, wait_for=(1, 2)),
    )
    assert {name: said(turns) for name, turns in sessions.items()} == {
        "t": [9],
        "t.1": [1, 2],
        "t.2": [3],
        "t.2.2": [3],
    }
    assert sessions["t"][0]["forks"] == ["t.1", "t.2", "t.2.2"]
    assert (counts.copies, counts.lost_waits, counts.extra_tokens) == (1, 1, 1)


def test_branches_of_a_prompt_are_so_many_answers(tmp_path: Path) -> None:
    _, sessions = written(tmp_path, Request(0, 0.0, (), 9, 1, branches=4))
    assert sessions["r0"][0]["extra"] == {"n": 4}


def test_sessions_come_back_as_they_were(tmp_path: Path) -> None:
    load = sessions_workload(80, seed=5)
    last: dict[str, int] = {}
    chained: list[Request] = []
    for r in load:
        waits = (last[r.session],) if r.session in last else ()
        last[r.session] = r.number
        fields = (r.number, r.arrival_s, r.ids, r.input_tokens, 1, r.session, "turn", waits)
        chained.append(Request(*fields))
    path = tmp_path / "x.jsonl"
    counts = write_workload(Workload("w", 512, lambda: iter(chained)), path, format="dag")
    assert (counts.restarts, counts.lost_waits, counts.extra_tokens) == (0, 0, 0)
    again = list(read_workload(path, id_tokens=512))
    assert turns_of(again) == turns_of(chained)
    assert shared_beginnings(again) == shared_beginnings(chained)


def turns_of(requests: Sequence[Request]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for request in requests:
        found.setdefault(request.session, []).append(request.input_tokens)
    return found


def shared_beginnings(requests: Sequence[Request]) -> dict[tuple[str, str], int]:
    """Number of full blocks that the first prompts of sessions share."""
    firsts = {r.session: list(r.ids)[: r.input_tokens // 512] for r in requests if not r.wait_for}
    names = sorted(firsts)
    return {
        (a, b): next(
            (i for i, (x, y) in enumerate(zip(firsts[a], firsts[b], strict=False)) if x != y),
            min(len(firsts[a]), len(firsts[b])),
        )
        for a in names
        for b in names
        if a < b
    }


# Filler


@given(st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=5), st.integers(1, 40))
def test_filler_is_so_many_words_and_a_key_begins_alike_everywhere(
    keys: list[int], each: int
) -> None:
    text = words(np.array(keys, np.uint64), each, len(keys) * each).split()
    assert len(text) == len(keys) * each
    assert set(text) <= set(WORDS)
    alone = words(np.array(keys[-1:], np.uint64), each, each).split()
    assert text[-each:] == alone
    assert words(np.array(keys, np.uint64), each, 1) == text[0]


def test_filler_of_other_keys_is_other_text_and_stays_what_it_was() -> None:
    """Files of other versions share text with those of this one."""
    lines = {words(np.array([key], np.uint64), 16, 16) for key in range(5000)}
    assert len(lines) == 5000
    assert (
        words(np.array([0, 1], np.uint64), 4, 8) == "three among other same now almost far general"
    )
