"""K22, K24: what is written is what is read again, less what the documents say is lost."""

import gzip
import io
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.errors import CodecError, ConfigError
from mallee.traces.files import output
from mallee.traces.formats.agentic import class_of
from mallee.traces.read import read_workload
from mallee.traces.workload import NO_PARENT, Request, Runs, Workload
from mallee.traces.write import write_workload
from support.examples import examples
from support.made_workloads import sessions_workload

SIZE = 16


def workload(requests: Sequence[Request], id_tokens: int = SIZE) -> Workload:
    has_forks = any(request.parent != NO_PARENT for request in requests)
    return Workload("test", id_tokens, lambda: iter(requests), has_forks=has_forks)


@st.composite
def graphs(draw: st.DrawFn) -> list[Request]:
    """Requests of any shape: sessions, waits for any earlier ones, forks, branches, resets."""
    made: list[Request] = []
    at_us = 0
    for number in range(draw(st.integers(1, 8))):
        at_us += draw(st.integers(0, 3_000_000)) if made else 0
        tokens = draw(st.integers(1, 70))
        earlier = st.sets(st.integers(0, number - 1), max_size=3) if made else st.just(set())
        waits = tuple(sorted(draw(earlier)))
        parent = draw(st.sampled_from([NO_PARENT, *range(number)]))
        is_fork = parent != NO_PARENT
        ids = st.lists(st.integers(0, 99), max_size=-(-tokens // SIZE))
        branches = draw(st.sampled_from([1, 1, 3]))
        session = draw(st.sampled_from(["", "a", "b"]))
        num_waits = len({*waits, parent} - {NO_PARENT})
        derived = class_of(
            is_fork=is_fork, branches=branches, num_waits=num_waits, has_session=bool(session)
        )
        made.append(
            Request(
                number=number,
                arrival_s=at_us / 1e6,
                ids=() if is_fork else draw(ids),
                input_tokens=draw(st.integers(0, 40)) if is_fork else tokens,
                output_tokens=draw(st.integers(1, 40)),
                session=session,
                cls=draw(st.sampled_from([derived, "sub-agent"])),
                wait_for=tuple(other for other in waits if other != parent),
                tool_wait_s=draw(st.integers(0, 10_000_000)) / 1e6,
                branches=branches,
                parent=parent,
                name=f"call {number}",
                is_reset=draw(st.booleans()),
            )
        )
    children = [sum(r.parent == number for r in made) for number in range(len(made))]
    return [
        msgspec.structs.replace(
            r, num_children=n, output_tokens=draw(st.sampled_from([0, r.output_tokens])) if n else 1
        )
        for r, n in zip(made, children, strict=True)
    ]


@examples(150)
@given(graphs())
def test_agentic_rows_keep_everything(tmp_path: Path, requests: list[Request]) -> None:
    path = tmp_path / "rows.jsonl"
    written = write_workload(workload(requests), path, format="agentic")
    assert (written.requests, written.rows) == (len(requests), len(requests))
    assert written.nbytes == path.stat().st_size
    assert (
        written.summary()
        == f"{len(requests)} requests, {len(requests)} lines, {written.nbytes} bytes"
    )
    found = read_workload(path, kind="agentic", id_tokens=SIZE)
    assert found.has_forks == workload(requests).has_forks
    assert [exact(r) for r in found] == [exact(r) for r in requests]


def exact(request: Request) -> Request:
    """Times as whole microseconds; they are written so."""
    return msgspec.structs.replace(
        request,
        arrival_s=round(request.arrival_s * 1e6),
        tool_wait_s=round(request.tool_wait_s * 1e6),
        ids=list(request.ids),
    )


@given(graphs(), st.sampled_from(["mooncake", "agentic"]))
def test_written_prompts_share_what_the_workload_shares(
    tmp_path: Path, requests: list[Request], how: str
) -> None:
    """The full blocks of rows are named alike exactly where their tokens are the same.

    Rows of an open loop have the times and the lengths of answers, too.
    """
    if how == "mooncake":  # each branch is a row of its own there
        requests = [msgspec.structs.replace(r, branches=1) for r in requests]
    path = tmp_path / "rows.jsonl"
    write_workload(workload(requests), path, format=how)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    texts = all_texts(requests)
    assert [row["input_length"] for row in rows] == [
        max(len(text), how == "mooncake") for text in texts
    ]
    if how == "mooncake":
        assert [row["timestamp"] for row in rows] == [
            round(r.arrival_s * 1e6) / 1e3 for r in requests
        ]
        assert [row["output_length"] for row in rows] == [max(1, r.output_tokens) for r in requests]
    want = [blocks(r, text) for r, text in zip(requests, texts, strict=True)]
    found = [row.get("hash_ids", [])[: row["input_length"] // SIZE] for row in rows]
    assert numbered(found) == numbered(want)


def all_texts(requests: Sequence[Request]) -> list[list[Any]]:
    """Every token of each prompt, as something that only the same token equals."""
    texts: list[list[Any]] = []
    ends: list[list[Any]] = []
    for r in requests:
        own = [(r.number, "prompt", i) for i in range(r.input_tokens)]
        known = min(r.input_tokens, SIZE * len(r.ids))
        own[:known] = [("id", r.ids[i // SIZE]) for i in range(known)]  # type: ignore[misc]
        texts.append(own if r.parent == NO_PARENT else ends[r.parent] + own)
        ends.append(texts[-1] + [(r.number, "answer", i) for i in range(r.output_tokens)])
    return texts


def blocks(request: Request, text: list[Any]) -> list[Any]:
    full = [tuple(text[i : i + SIZE]) for i in range(0, len(text) - SIZE + 1, SIZE)]
    return full if request.parent != NO_PARENT else full[: len(request.ids)]


def numbered(paths: Sequence[Sequence[Any]]) -> list[list[int]]:
    """By first appearance."""
    names: dict[Any, int] = {}
    return [[names.setdefault(name, len(names)) for name in path] for path in paths]


def test_mooncake_rows_are_an_open_loop(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    requests = [
        Request(0, 0.0, Runs([(0, 2), (7, 1)]), 40, 5, "s", name="a", num_children=2),
        Request(1, 0.5, np.array([0, 1]), 33, 6, "s", wait_for=(0,), branches=2),
        Request(2, 1.25, (), 4, 7, parent=0, branches=2),  # type: ignore[arg-type]
        Request(3, 1.25, (), 0, 0, parent=0),
    ]
    written = write_workload(workload(requests), path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    fresh = 1 << 40
    assert [tuple(row.values()) for row in rows] == [
        (0.0, 40, 5, [0, 1, 7]),
        (500.0, 33, 6, [0, 1]),
        (500.0, 33, 6, [0, 1]),
        (1250.0, 49, 7, [0, 1, fresh]),
        (1250.0, 49, 7, [0, 1, fresh + 1]),
        (1250.0, 45, 1, [0, 1]),
    ]
    assert list(rows[0]) == ["timestamp", "input_length", "output_length", "hash_ids"]
    assert (written.rows, written.flattened, written.copies, written.lost_waits) == (6, 2, 2, 3)
    assert "2 forks as whole prompts" in written.summary()


@pytest.mark.parametrize(("size", "ids"), [(8, [0, 1, 2, 3, 20, 21]), (32, [2, 21]), (64, [21])])
def test_ids_of_another_size_name_the_same_text(tmp_path: Path, size: int, ids: list[int]) -> None:
    path = tmp_path / "rows.jsonl"
    write_workload(workload([Request(0, 0.0, [0, 1, 10], 45, 1)]), path, block_size=size)
    assert json.loads(path.read_text())["hash_ids"] == ids


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("how", ["mooncake", "agentic", "dag"])
def test_the_same_workload_is_the_same_bytes_packed_or_not(
    tmp_path: Path, suffix: str, how: str
) -> None:
    load = sessions_workload(60, seed=3)
    paths = [tmp_path / f"{name}.jsonl{suffix}" for name in "ab"]
    for path in paths:
        write_workload(load, path, format=how)
    packed, again = (path.read_bytes() for path in paths)
    assert packed == again
    write_workload(load, tmp_path / "plain", format=how)
    unpack = {"": bytes, ".gz": gzip.decompress, ".zst": unpack_zstd}[suffix]
    assert unpack(packed) == (tmp_path / "plain").read_bytes()
    assert len(list(read_workload(paths[0]))) == 60


def unpack_zstd(packed: bytes) -> bytes:
    return zstandard.ZstdDecompressor().stream_reader(io.BytesIO(packed)).read()


# Files that are there whole or not at all


def test_a_workload_that_breaks_off_leaves_the_old_file_alone(tmp_path: Path) -> None:
    def read() -> Iterator[Request]:
        yield from (Request(i, float(i), [0], 16, 1) for i in range(5000))
        raise CodecError("the source is damaged")

    target = tmp_path / "rows.jsonl.gz"
    target.write_text("old")
    with pytest.raises(CodecError, match="damaged"):
        write_workload(Workload("broken", SIZE, read), target)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl.gz"]
    assert target.read_text() == "old"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_device_is_written_as_it_comes_and_stays() -> None:
    with pytest.raises(ConfigError, match="No space left"):
        write_workload(sessions_workload(2000, seed=0), "/dev/full")
    write_workload(sessions_workload(9, seed=0), "/dev/null")
    assert not Path("/dev/null").is_file()


def test_the_file_behind_a_link_is_what_changes(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_workload(sessions_workload(9, seed=0), link)
    assert link.is_symlink()
    assert len(target.read_text().splitlines()) == 9


def test_a_minus_is_standard_output(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    write_workload(sessions_workload(9, seed=0), "-")
    assert len(capfdbinary.readouterr().out.splitlines()) == 9


@pytest.mark.parametrize(
    ("requests", "more", "says"),
    [
        ([], {}, "no requests to write"),
        ([Request(0, 0.0, (), 1, 1)], {"format": "csv"}, "format='csv': give one of mooncake"),
        ([Request(0, 0.0, (), 1, 1)], {"block_size": 24}, "block size 24: give a multiple"),
        ([Request(1, 0.0, (), 1, 1)], {}, "number 1 at 0.0 s"),
        ([Request(0, 1.0, (), 1, 1), Request(1, 0.0, (), 1, 1)], {}, "number 1 at 0.0 s after 1.0"),
        ([Request(0, 0.0, (), 1, 1, num_children=1)], {}, "say has_forks"),
        ([Request(0, 0.0, (), 1, 1), Request(1, 0.0, (), 1, 1, parent=0)], {}, "expects no more"),
        (
            [
                Request(0, 0.0, [1 << 41], 16, 1, num_children=1),
                Request(1, 0.0, (), 1, 1, parent=0),
            ],
            {},
            "number the blocks",
        ),
        ([Request(0, 0.0, [1 << 52], 16, 1)], {"block_size": 8}, "number the blocks"),
        (
            [Request(0, 0.0, (), 1, 1, name="1"), Request(1, 0.0, (), 1, 1)],
            {"format": "agentic"},
            "two requests are called '1'",
        ),
        (
            [Request(0, 0.0, (), 1, 1), Request(1, 0.0, (), 1, 1, name="0")],
            {"format": "agentic"},
            "two requests are called '0'",
        ),
    ],
)
def test_what_can_not_be_written_is_refused_without_a_file(
    tmp_path: Path, requests: list[Request], more: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        write_workload(workload(requests), tmp_path / "rows", **more)
    assert not list(tmp_path.iterdir())


def test_folders_and_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    load = sessions_workload(2, seed=0)
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    with pytest.raises(ConfigError, match="can't be written"):
        write_workload(load, tmp_path / "one")
    with pytest.raises(ConfigError, match="is a folder"):
        write_workload(load, tmp_path)
    with pytest.raises(ConfigError, match="No such file"):
        write_workload(load, tmp_path / "none" / "rows")


def test_names_of_thousands_of_digits_are_names(tmp_path: Path) -> None:
    requests = [Request(0, 0.0, (), 1, 1), Request(1, 0.0, (), 1, 1, name="9" * 5000)]
    write_workload(workload(requests), tmp_path / "rows", format="agentic")
    assert [r.name for r in read_workload(tmp_path / "rows")] == ["0", "9" * 5000]


def test_a_file_may_be_written_onto_what_it_is_read_from(tmp_path: Path) -> None:
    path = tmp_path / ("é" * 100)
    write_workload(sessions_workload(500, seed=0), path)
    before = [(r.ids, r.input_tokens) for r in read_workload(path)]
    path.chmod(0o600)
    write_workload(read_workload(path), path)
    assert [(r.ids, r.input_tokens) for r in read_workload(path)] == before
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_two_who_write_one_file_at_once_leave_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with output.whole_file(path) as one:
        one.write(b"one")
        with output.whole_file(path) as two:
            two.write(b"two, who ends first")
        assert path.read_bytes() == b"two, who ends first"
    assert path.read_bytes() == b"one"
    assert list(tmp_path.iterdir()) == [path]


def test_a_pipe_whose_reader_has_seen_enough_is_no_wrong_option(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        with pytest.raises(BrokenPipeError):
            write_workload(sessions_workload(2000, seed=0), f"/dev/fd/{writer}")
    finally:
        os.close(writer)
