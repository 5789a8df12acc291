"""K26, part: traces of other programs are read as these publish them."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mallee.protocol.errors import CodecError, ConfigError
from mallee.traces.files.problems import Problems
from mallee.traces.read import read_workload
from mallee.traces.workload import Request, Workload
from mallee.traces.write import write_workload
from support.trace_rows import row, write

BURSTGPT = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type",
    "5,,1.2,ChatGPT,472,18,490,API log",
    "45.5,c1,2,ChatGPT,1087,230,1317,Conversation log",
    "118,c1,9,GPT-4,1417,276,1693,Conversation log",
)


def facts(workload: Workload) -> list[tuple[float, int, int]]:
    return [(r.arrival_s, r.input_tokens, r.output_tokens) for r in workload]


# Tables


def test_burstgpt_has_seconds_and_sessions(tmp_path: Path) -> None:
    workload = read_workload(write(tmp_path, *BURSTGPT))
    assert (workload.kind, workload.note.split(";")[0]) == ("burstgpt", "times in s")
    assert facts(workload) == [(0.0, 472, 18), (40.5, 1087, 230), (113.0, 1417, 276)]
    assert [(r.session, r.wait_for) for r in workload] == [("", ()), ("c1", ()), ("c1", (1,))]


def test_burstgpt_without_sessions_is_an_open_loop(tmp_path: Path) -> None:
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    path = write(tmp_path, header, "5,ChatGPT,472,18,490,x", "45,GPT-4,0,0,0,x", "46,m,7,0,7,x")
    with pytest.raises(CodecError, match="line 3: Request tokens: '0': must be 1 to"):
        list(read_workload(path))
    problems = Problems()
    assert facts(read_workload(path, problems=problems)) == [(0.0, 472, 18), (41.0, 7, 1)]
    assert [(each.line, each.field) for each in problems.kept] == [(3, "Request tokens")]


@pytest.mark.parametrize(
    ("first", "second", "columns", "told"),
    [
        (1_700_000_000, 1_700_000_002, "timestamp=ts", "times in s"),
        (1_700_000_000_000, 1_700_000_002_000, "timestamp=ts", "times in ms"),
        ("1700000000000000000", "1700000002000000000", "timestamp=ts", "times in ns"),
        (0, 2_000_000, "timestamp_us=ts", "times in us"),
        ("2026-01-01T00:00:00Z", "2026-01-01T01:00:02+01:00", "timestamp=ts", "times by ISO 8601"),
    ],
)
def test_a_table_is_read_by_the_names_of_its_columns(
    tmp_path: Path, first: Any, second: Any, columns: str, told: str
) -> None:
    """Columns may be inside objects; the unit is named, or told by a time since 1970."""
    lines = [{"ts": at, "usage": {"in": 100, "out": "7"}} for at in (first, second)]
    path = write(tmp_path, *map(json.dumps, lines))
    workload = read_workload(path, kind=f"{columns},input=usage.in,output=usage.out")
    assert facts(workload) == [(0.0, 100, 7), (2.0, 100, 7)]
    assert (workload.kind, workload.note) == ("table", told)


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ("timestamp_h=ts,input=a,output=b", "a time is in s, ms, us, ns"),
        ("when=ts,input=a,output=b", "give timestamp, input, output, session, ids"),
        ("timestamp=ts,input=a", "say also which is output"),
        ("input=a,output=c", "no column c among ts, a, b"),
    ],
)
def test_wrong_columns_are_named(tmp_path: Path, columns: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        list(read_workload(write(tmp_path, "ts,a,b", "1,2,3"), kind=columns))


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        ("5,10,2", "line 2: ts: '5': of which unit. name it, as --columns timestamp_ms=COLUMN"),
        ("1700000000,ten,2", "line 2: a: .*'ten'"),
        ("1700000000,10.5,2", "line 2: a: '10.5': not a whole number"),
        ("1700000000,10", "line 2: 2 columns; give ts, a, b"),
        ("yesterday,10,2", "line 2: ts: .*'yesterday'"),
        ("1700000000,inf,2", "line 2: a: 'inf': not a whole number"),
    ],
)
def test_malformed_cells_are_named_by_line_and_column(
    tmp_path: Path, cells: str, says: str
) -> None:
    path = write(tmp_path, "ts,a,b", cells)
    with pytest.raises(CodecError, match=says):
        list(read_workload(path, kind="timestamp=ts,input=a,output=b"))


# Mooncake's oddities


def test_ids_may_be_strings_and_lengths_floats_and_times_by_iso(tmp_path: Path) -> None:
    lines = [
        row("2026-01-01T00:00:00Z", 1024.0, ("a", "b")),  # type: ignore[arg-type]
        row("2026-01-01T00:00:01.5Z", "1500", ("a", "b", "c")),  # type: ignore[arg-type]
    ]
    workload = read_workload(write(tmp_path, *lines))
    assert [(r.arrival_s, r.input_tokens, list(r.ids)) for r in workload] == [
        (0.0, 1024, [0, 1]),
        (1.5, 1500, [0, 1, 2]),
    ]
    assert (workload.kind, workload.note) == ("mooncake", "times by ISO 8601")


def test_rows_without_times_arrive_by_chance_and_say_so(tmp_path: Path) -> None:
    lines = ['{"input_length": 600, "output_length": 4, "hash_ids": [1, 2]}'] * 400
    path = write(tmp_path, *lines)
    workload = read_workload(path, sessions_per_hour=3600.0, seed=3)
    assert workload.note == "rows without times arrive by chance, 3600 an hour (seed 3)"
    times = [r.arrival_s for r in workload]
    assert times == sorted(times) == [r.arrival_s for r in workload]
    assert 340 < times[-1] < 460
    with pytest.raises(CodecError, match="line 2: timestamp: None: no time, but rows before have"):
        list(read_workload(write(tmp_path, row("1.5"), lines[0])))  # type: ignore[arg-type]


def test_times_of_two_kinds_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, row("2026-01-01T00:00:00Z"), row("2026-01-01T00:00:01"))  # type: ignore[arg-type]
    with pytest.raises(CodecError, match=r"line 2: timestamp: .*another kind of time"):
        list(read_workload(path))


# vLLM


def test_results_of_vllm_bench_are_rows_by_start(tmp_path: Path) -> None:
    result = {
        "request_throughput": 1.5,
        "input_lens": [10, 20, 30],
        "output_lens": [1, 2, 0],
        "start_times": [12.5, 12.0, 13.0],
        "errors": ["", "", "Connection refused"],
    }
    path = write(tmp_path, json.dumps(result, indent=2))
    problems = Problems()
    workload = read_workload(path, problems=problems)
    assert workload.kind == "vllm"
    assert facts(workload) == [(0.0, 20, 2), (0.5, 10, 1)]
    assert "request 2 failed: Connection refused" in str(problems.kept[0])
    short = write(tmp_path, json.dumps({"request_throughput": 1.5}))
    with pytest.raises(CodecError, match="--save-detailed"):
        read_workload(short)


# Chats


def test_conversations_of_sharegpt_wait_for_their_answers(tmp_path: Path) -> None:
    """An array; a bad entry is named by its own line."""
    said = [
        ("system", "be kind"),
        ("human", "hello there you"),
        ("gpt", "hi, you"),
        ("human", "and"),
        ("gpt", "so"),
    ]
    good = {"id": "a_0", "conversations": [{"from": by, "value": text} for by, text in said]}
    bad = {"id": "b_0", "conversations": [{"from": "gpt", "value": "hi"}]}
    path = write(tmp_path, "[", json.dumps(good) + ",", json.dumps(bad), "]")
    with pytest.raises(CodecError, match="line 3: no answer"):
        list(read_workload(path))
    first, second = read_workload(path, problems=Problems())
    assert (first.input_tokens, first.output_tokens, second.input_tokens) == (5, 3, 9)
    assert (second.wait_for, second.session) == ((0,), "a_0")


def body(*texts: str, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": t} for t in texts], **more}


def test_requests_of_openai_are_bodies_batches_and_logs(tmp_path: Path) -> None:
    words = " ".join(f"w{i}" for i in range(200))
    batch = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions"}
    lines = [
        body(words, max_tokens=9),
        {**batch, "body": body(words, "more")},
        {"body": {"model": "m", "prompt": words}},
        {
            "request": body(words),
            "response": {"body": {"usage": {"prompt_tokens": 200, "completion_tokens": 3}}},
        },
        {"messages": body(words)["messages"] + [{"role": "assistant", "content": "a b"}]},
    ]
    workload = read_workload(write(tmp_path, *map(json.dumps, lines)))
    found = list(workload)
    assert (workload.kind, workload.id_tokens) == ("openai", 64)
    assert [r.input_tokens for r in found] == [200, 201, 200, 200, 200]
    assert [r.output_tokens for r in found] == [9, 256, 256, 3, 2]
    assert all(list(r.ids) == [0, 1, 2] for r in found)


def test_logs_with_times_and_usage_have_these(tmp_path: Path) -> None:
    """A block has as many words as its tokens had in the first request: text is shared to its end."""
    words = " ".join(f"w{i}" for i in range(200))
    lines = [
        {"request": body(words), "response": {"created": 1_700_000_000 + at, "usage": usage}}
        for at, usage in (
            (2, {"prompt_tokens": 400, "completion_tokens": 3}),
            (0, {"input_tokens": 410, "output_tokens": 4}),
        )
    ]
    path = write(tmp_path, *map(json.dumps, lines))
    with pytest.raises(CodecError, match=r"line 2: timestamp .* sort the rows"):
        list(read_workload(path))
    workload = read_workload(path, sorts=True)
    assert facts(workload) == [(0.0, 410, 4), (2.0, 400, 3)]
    assert [list(r.ids) for r in workload] == [[0, 1, 2, 3, 4, 5]] * 2


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"request": {"messages": []}}, "neither messages, prompt, input nor usage"),
        (body("x", messages=[{"content": "x"}]), "role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "'image_url'; only text can be read",
        ),
    ],
)
def test_requests_without_text_are_named(tmp_path: Path, line: dict[str, Any], says: str) -> None:
    with pytest.raises(CodecError, match=says):
        list(read_workload(write(tmp_path, json.dumps(line))))


# Weka


def test_sessions_of_weka_have_calls_and_sub_agents(tmp_path: Path) -> None:
    call = {"type": "n", "model": "m", "in": 200, "out": 5, "hash_ids": [1, 2, 3], "api_time": 2.0}
    agent = {"type": "subagent", "t": 10.0, "agent_id": "a", "subagent_type": "Explore"}
    session = {
        **{"id": "s", "models": ["m"], "block_size": 64, "hash_id_scope": "local"},
        "requests": [
            {**call, "t": 0.0},
            {**agent, "requests": [{**call, "t": 10.5, "type": "s", "ttft": 1.0, "hash_ids": [9]}]},
            {**call, "t": 20.0, "in": 300, "hash_ids": [1, 2, 3, 4]},
        ],
    }
    workload = read_workload(write(tmp_path, json.dumps(session, indent=1)))
    found = list(workload)
    assert (workload.kind, workload.id_tokens) == ("weka", 64)
    assert [(r.arrival_s, r.cls, r.wait_for) for r in found] == [
        (0.0, "turn", ()),
        (10.5, "sub-agent", (0,)),
        (20.0, "turn", (0, 1)),
    ]
    assert list(found[2].ids)[:3] == list(found[0].ids)
    session["requests"] = [{"t": 1}]
    with pytest.raises(CodecError, match="line 1: no calls of Weka's form: KeyError"):
        list(read_workload(write(tmp_path, json.dumps(session))))


# Order


@pytest.mark.parametrize("has_problems", [False, True])
def test_rows_out_of_order_stop_the_reading_and_say_how_to_sort(
    tmp_path: Path, has_problems: bool
) -> None:
    """Leaving them out would leave 388 of 400 out."""
    path = write(tmp_path, *(row(at) for at in (5, 3, 4)))
    with pytest.raises(CodecError, match=r"line 2: timestamp 3.0 is before .* trace convert` does"):
        list(read_workload(path, problems=Problems() if has_problems else None))
    assert [r.arrival_s for r in read_workload(path, sorts=True)] == [0.0, 0.001, 0.002]


def test_a_limit_reads_no_more_rows_than_it_needs(tmp_path: Path) -> None:
    """Damage behind them is not seen; rows further on are read for those that wait for them."""
    lines = [row(i, session_id="s", request_id=str(i)) for i in range(300)]
    path = write(tmp_path, *lines, "damage")
    assert [r.name for r in read_workload(path, limit=3)] == ["0", "1", "2"]
    with pytest.raises(CodecError, match="line 301"):
        list(read_workload(path))
    ahead = write(tmp_path, row(0, request_id="a", wait_for=["b"]), row(1), row(2, request_id="b"))
    assert [r.name for r in read_workload(ahead, limit=2)] == ["", "b"]


# There and back

LENGTHS = st.integers(1, 5000)


@st.composite
def workloads(draw: st.DrawFn) -> list[Request]:
    """Sessions, each a growing text of its own, whose turns wait for the turn before."""
    found: list[Request] = []
    for session in range(draw(st.integers(1, 4))):
        at_s, blocks, last = draw(st.integers(0, 9)), 0, -1
        for _ in range(draw(st.integers(1, 4))):
            blocks += draw(st.integers(1, 5))
            tool_s = 0.5 if last >= 0 else 0.0
            ids = tuple(range(1000 * session, 1000 * session + blocks))
            found.append(
                Request(
                    len(found), float(at_s), ids, 64 * blocks, draw(st.integers(1, 99)),
                    f"s{session}", "turn", () if last < 0 else (last,), tool_s,
                )
            )  # fmt: skip
            last, at_s = len(found) - 1, at_s + 2 + draw(st.integers(0, 9))
    order = sorted(found, key=lambda r: (r.arrival_s, r.number))
    place = {r.number: number for number, r in enumerate(order)}
    first_s = order[0].arrival_s
    return [
        Request(
            number, r.arrival_s - first_s, r.ids, r.input_tokens, r.output_tokens, r.session, r.cls,
            tuple(place[o] for o in r.wait_for), r.tool_wait_s,
        )
        for number, r in enumerate(order)
    ]  # fmt: skip


@settings(max_examples=30)
@given(workloads())
def test_sessions_written_for_weka_come_back(
    tmp_path_factory: pytest.TempPathFactory, requests: list[Request]
) -> None:
    """Each session's lengths, own ids, gaps, waits and tool times are those that were written."""
    folder = tmp_path_factory.mktemp("weka") / "sessions"
    written = write_workload(Workload("w", 64, lambda: iter(requests)), folder, format="weka")
    files = sorted(folder.iterdir())
    assert (written.requests, written.rows) == (len(requests), len(files))
    for file in files:
        back = list(read_workload(file))
        name = json.loads(file.read_text())["id"]
        own = [r for r in requests if r.session == name]
        begin = [r.number for r in own]
        assert [(r.input_tokens, r.output_tokens, len(r.ids)) for r in back] == [
            (r.input_tokens, r.output_tokens, len(r.ids)) for r in own
        ]
        assert [r.arrival_s for r in back] == pytest.approx(
            [r.arrival_s - own[0].arrival_s for r in own]
        )
        assert [r.wait_for for r in back] == [
            tuple(begin.index(o) for o in r.wait_for) for r in own
        ]
        assert [r.tool_wait_s for r in back] == pytest.approx([r.tool_wait_s for r in own])


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 10**6), LENGTHS, LENGTHS), min_size=1, max_size=20))
def test_a_table_written_as_mooncakes_rows_comes_back_by_time(
    tmp_path_factory: pytest.TempPathFactory, cells: list[tuple[int, int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("table")
    path = write(folder, "ts,in,out", *(",".join(map(str, each)) for each in cells))
    table = read_workload(path, kind="timestamp_ms=ts,input=in,output=out", sorts=True)
    write_workload(table, folder / "rows.jsonl")
    back = read_workload(folder / "rows.jsonl", spread_ticks=False)
    first = min(cells)[0]
    assert [(round(1000 * at), a, b) for at, a, b in facts(back)] == [
        (at - first, a, b) for at, a, b in sorted(cells, key=lambda each: each[0])
    ]
