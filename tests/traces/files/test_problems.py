"""K22: malformed lines are named with line and field, counted, and never silently dropped."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.errors import CodecError, ConfigError
from mallee.traces.files.problems import Problems, field_of
from mallee.traces.read import read_workload
from support.examples import examples
from support.trace_rows import chat, row, write

DATA = Path(__file__).parents[1] / "data"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"


def dag(name: str, *turns: dict[str, Any], **more: Any) -> str:
    said = [
        {"messages": [{"role": "user", "content": "a b c"}], "max_tokens": 2, **t} for t in turns
    ]
    return json.dumps({"session_id": name, "turns": said, **more})


def session(name: str = "a", /, **call: Any) -> str:
    calls = [{"k": "r", "t": 0, "in": 200, "out": 1, "h": [[0, 3]], **call}]
    return json.dumps({"id": name, "block_size": 64, "requests": calls})


TREE = '{"task": 1, "nodes": [{"id": 0, "parent": -1, "depth": 0}]}'

SLIPS = [
    # lines, line number, field, requests that are left
    ([row(), "{"], 2, "", 1),
    ([row(), "[]"], 2, "", 1),
    ([row(), '\x00{"timestamp": 1}'], 2, "", 1),
    ([row(), row(input_length=-1), row()], 2, "input_length", 2),
    ([row(), row(input_length=10**15)], 2, "input_length", 1),
    ([row(), row(output_length=-1), row()], 2, "output_length", 2),
    ([row(), row(output_length="x")], 2, "output_length", 1),
    ([row(), row(timestamp=None)], 2, "timestamp", 1),
    ([row(), row(timestamp=1).replace("1,", "1e400,", 1)], 2, "timestamp", 1),
    ([row(), row(timestamp=1e16)], 2, "timestamp", 1),
    ([row(), row(timestamp=-1e300)], 2, "timestamp", 1),
    ([row(), row(tool_wait_ms=1e16)], 2, "tool_wait_ms", 1),
    ([row(), row(branches=1 << 17)], 2, "branches", 1),
    ([row(), row(ids=(1, 1.5))], 2, "hash_ids[1]", 1),
    ([row(), '{"timestamp": 1, "input_length": 5}'], 2, "output_length", 1),
    ([row()] * 300 + [row(ids=(1, 2, 3))], 301, "hash_ids", 300),
    ([row(), row(ids=tuple(range(99)))], 2, "hash_ids", 1),
    ([row()] * 300 + [row(session_id="s")], 301, "", 300),
    ([row(request_id="a"), row(request_id="a")], 2, "request_id", 1),
    ([AZURE, "2023-11-16 18:17:03.9,1,1", "2023-11-16 18:17:04.9,1"], 3, "", 1),
    ([AZURE, "2023-11-16 18:17:03.9,1,1", "soon,1,1"], 3, "TIMESTAMP", 1),
    ([AZURE, "2023-11-16 18:17:03.9,1,1", "2023-11-16 18:17:04.9+00:00,1,1"], 3, "TIMESTAMP", 1),
    ([AZURE, "2023-11-16 18:17:03.9,1,1", "2023-11-16 18:17:04.9,1,x"], 3, "GeneratedTokens", 1),
    ([AZURE, "2023-11-16 18:17:03.9,1,1", f"2023-11-16 18:17:04.9,{10**15},1"], 3, "ContextTokens", 1),
    ([AZURE, "2023-11-16 18:17:03.9,1,1", "2023-11-16 18:17:04.9,1\r2,1"], 3, "", 1),
    ([AZURE, "2023-11-16 18:17:03.9,1,1", "2023-11-16 18:17:04.9,1," + "1" * 140_000], 3, "", 1),
    ([AZURE, "2023-11-16 18:17:03.9,-5,1", "2023-11-16 18:17:01.9,1,1"], 2, "ContextTokens", 1),
    ([TREE, '{"task": 1, "nodes": [{"id": 0, "parent": 3, "depth": 0}]}'], 2, "nodes", 1),
    ([TREE, '{"task": 1, "nodes": [{"id": -1, "parent": -1, "depth": 0}]}'], 2, "nodes", 1),
    ([session(), session("b", h=[[0, 9]])], 2, "h", 1),
    ([session(), session("b", h=[[1 << 63, 3]])], 2, "requests[0].h[0][0]", 1),
    ([session(), session("b", t=1e300)], 2, "requests[0].t", 1),
    ([session(), session("b").replace("64", "16")], 2, "block_size", 1),
    ([session(), session("b").replace("64", str(1 << 31))], 2, "block_size", 1),
    ([session(), session("b").replace('"in": 200, ', "")], 2, "requests[0].in", 1),
    ([session(), session()], 2, "id", 1),
    ([chat(1), chat(1)], 2, "chat_id", 1),
    ([chat(1), chat(2, hash_ids=[1, 2, 3, 4])], 2, "hash_ids", 1),
    ([chat(1), chat(2).replace('"output_length": 4, ', "")], 2, "output_length", 1),
    ([dag("a", {}), dag("a", {})], 2, "session_id", 1),
    ([dag("a", {}), dag("b")], 2, "turns", 1),
    ([dag("a", {}), dag("b", {"messages": []})], 2, "turns[0].messages", 1),
    ([dag("a", {}), dag("b", orchestrator=True, spawns=["a"])], 2, "orchestrator", 1),
    ([dag("a", {}), dag("b", {"delay": -1})], 2, "turns[0].delay", 1),
    ([dag("a", {}), dag("b", {"extra": {"n": 10**12}})], 2, "turns[0].extra", 1),
    ([dag("a", {}), dag("b", {"spawns": [{"children": ["a"], "join_at": 0}]})], 2, "turns[0].spawns", 1),
    ([dag("a", {}), dag("b", {"forks": ["c"]}), dag("c", {"forks": ["b"]})], 2, "turns", 1),
]  # fmt: skip

MENDED = [
    ([row(request_id="a"), row(request_id="b", wait_for=["x", "a"])], 2, "wait_for", [(), (0,)]),
    ([row(request_id="a"), row(request_id="b", fork_of="x")], 2, "fork_of", [(), ()]),
    (
        [row(request_id="a"), row(request_id="b", fork_of="a", tokens=999, ids=(0,))],
        2,
        "input_length",
        [(), ()],
    ),
    (
        [
            row(request_id="a", wait_for=["c"]),
            row(request_id="b", wait_for=["a", "d"]),
            row(request_id="c", wait_for=["b"]),
            row(request_id="d"),
        ],
        1,
        "wait_for",
        [(), (), (0, 1), (2,)],  # a, d, b, c
    ),
    ([dag("a", {"forks": ["x"]})], 1, "turns", [()]),
    ([dag("a", {"forks": ["b"]}), dag("b", {}), dag("c", {"spawns": ["b"]})], 3, "turns", [(), (), ()]),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "line", "field", "left"), SLIPS)
def test_a_malformed_line_is_left_out_and_counted(
    tmp_path: Path, lines: list[str], line: int, field: str, left: int
) -> None:
    path = write(tmp_path, *lines)
    problems = Problems()
    assert len(list(read_workload(path, problems=problems))) == left
    first = problems.kept[0]
    assert (first.line, first.field, first.is_skipped) == (line, field, True)
    assert f"line {line}: " in str(first)
    assert problems.num_skipped == len(problems) > 0
    with pytest.raises(CodecError) as raised:
        list(read_workload(path))
    assert (raised.value.fields["line"], field_of(raised.value)) == (line, field)


@pytest.mark.parametrize(("lines", "line", "field", "waits"), MENDED)
def test_a_dependency_that_can_not_be_is_dropped_and_counted(
    tmp_path: Path, lines: list[str], line: int, field: str, waits: list[tuple[int, ...]]
) -> None:
    path = write(tmp_path, *lines)
    problems = Problems()
    assert [r.wait_for for r in read_workload(path, problems=problems)] == waits
    assert (problems.num_skipped, problems.num_mended) == (0, 1)
    (only,) = problems.kept
    assert (only.line, only.field, only.is_skipped) == (line, field, False)
    with pytest.raises(CodecError, match=f"line {line}: "):
        list(read_workload(path))


def test_the_first_problems_are_kept_and_all_are_counted_anew_each_time(tmp_path: Path) -> None:
    path = write(tmp_path, row(), *["{"] * 30, row())
    problems = Problems(keep=3)
    workload = read_workload(path, problems=problems)
    for _ in range(2):
        assert len(list(workload)) == 2
        assert (len(problems), len(problems.kept)) == (30, 3)
        assert [problem.line for problem in problems.kept] == [2, 3, 4]
    assert problems.summary() == "30 malformed lines left out"
    problems.clear()
    assert (bool(problems), problems.summary()) == (False, "")
    with pytest.raises(ConfigError, match="keep=-1"):
        Problems(-1)


def test_malformed_lines_at_the_begin_do_not_hide_what_the_file_is(tmp_path: Path) -> None:
    problems = Problems()
    path = write(tmp_path, "{", row(ids=tuple(range(99))), row(), row(1))
    workload = read_workload(path, problems=problems)
    assert (workload.kind, workload.id_tokens, len(list(workload))) == ("mooncake", 512, 2)
    assert len(problems) == 2
    with pytest.raises(CodecError, match="line 1: neither"):
        read_workload(write(tmp_path, "{", "["), problems=problems)


def test_damage_before_the_first_line_is_told(tmp_path: Path) -> None:
    path = tmp_path / "trace.zst"
    path.write_bytes(zstandard.compress(row().encode())[:-4])
    with pytest.raises(ConfigError, match=r"no requests in it; .*zstd file was cut off"):
        read_workload(path, problems=Problems())


@pytest.mark.slow
def test_many_rows_that_wait_for_themselves_are_mended_in_one_pass(tmp_path: Path) -> None:
    num = 20_000
    path = write(tmp_path, *(row(request_id=f"r{i}", wait_for=[f"r{i}"]) for i in range(num)))
    problems = Problems()
    assert sum(1 for _ in read_workload(path, problems=problems)) == problems.num_mended == num


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_a_packed_file_that_was_cut_off_is_read_up_to_there(tmp_path: Path, pack: Any) -> None:
    lines = [row(i, ids=(i * i, 7 * i)) for i in range(5000)]
    path = tmp_path / "trace.jsonl.packed"
    packed = pack("\n".join(lines).encode())
    path.write_bytes(packed)
    assert len(list(read_workload(path))) == 5000
    path.write_bytes(packed[: len(packed) // 2])
    problems = Problems()
    left = len(list(read_workload(path, problems=problems)))
    assert 0 < left < 5000
    assert len(problems) in (1, 2)  # the last line may be half a line
    assert "damaged after line" in problems.kept[-1].message
    with pytest.raises(CodecError, match="damaged after line"):
        list(read_workload(path))


def test_zstd_frames_follow_one_another_and_garbage_behind_them_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.zst"
    frames = [zstandard.compress((row(i) + "\n").encode()) for i in range(3)]
    path.write_bytes(b"".join(frames))
    assert [r.arrival_s for r in read_workload(path)] == [0.0, 0.001, 0.002]
    path.write_bytes(frames[0] + b"garbage, not zstd")
    with pytest.raises(CodecError, match="damaged after line 1: zstd"):
        list(read_workload(path))


def test_zstd_without_the_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.zst"
    path.write_bytes(zstandard.compress(row().encode()))
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"pip install 'mallee\[synth\]'"):
        read_workload(path)


@examples(60)
@given(
    st.lists(st.binary(max_size=60) | st.sampled_from([row().encode(), row(tokens=3000).encode()]))
)
def test_any_bytes_are_requests_or_problems(tmp_path: Path, lines: list[bytes]) -> None:
    path = tmp_path / "any"
    path.write_bytes(row().encode() + b"\n" + b"\n".join(lines))
    problems = Problems()
    found = list(read_workload(path, kind="mooncake", problems=problems))
    num_lines = sum(1 for line in path.read_bytes().split(b"\n") if line and not line.isspace())
    assert len(found) + problems.num_skipped == num_lines
