"""X9, part: a learned model in a file is the model that was saved, or an error that says what is wrong."""

import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import cast

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.errors import CodecError, ConfigError
from mallee.synth import saved
from mallee.synth.core.model import Model
from mallee.synth.fit import fit
from mallee.synth.programs.named import PROGRAMS
from mallee.synth.saved import is_model, load_model, save_model
from mallee.synth.session.model import SessionModel
from mallee.traces.trace import trace_of
from mallee.traces.workload import Workload
from mallee.traces.write import write_workload
from support.examples import examples
from support.synth.sources import agents

searches = partial(PROGRAMS["bfs"].generate, requests=400, seed=1)
MAKERS = {"session": agents, "tree": agents, "search": searches}


def learned(name: str) -> Model:
    trace = trace_of(MAKERS[name]())
    return fit(trace, "tree" if name == "tree" else "session")


def rows(workload: Workload) -> Iterator[bytes]:
    return (msgspec.msgpack.encode(each) for each in map(plain, workload))


def plain(request: object) -> dict[str, object]:
    found = {name: getattr(request, name) for name in request.__struct_fields__}  # type: ignore[attr-defined]
    return found | {"ids": list(found["ids"])}


@pytest.fixture(scope="module")
def session() -> Model:
    return learned("session")


@pytest.fixture(scope="module")
def file(session: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "agents.model"
    save_model(session, path)
    return path


@pytest.mark.parametrize("name", MAKERS)
def test_a_loaded_model_generates_what_the_saved_one_does(name: str, tmp_path: Path) -> None:
    """X9, part: every kind of model, request by request."""
    model, path = learned(name), tmp_path / "kept.model"
    save_model(model, path)
    loaded = load_model(path)
    assert type(loaded) is type(model)
    save_model(loaded, tmp_path / "again.model")
    assert (tmp_path / "again.model").read_bytes() == path.read_bytes()
    for seed in (1, 2):
        one, other = (each.generate(requests=700, seed=seed) for each in (model, loaded))
        assert list(rows(one)) == list(rows(other))


def test_what_is_a_model(file: Path, tmp_path: Path) -> None:
    """Traces, packed ones too, folders and what isn't there are none; asking never raises."""
    trace = tmp_path / "trace.jsonl.gz"
    write_workload(agents(), trace, format="agentic")
    assert is_model(file)
    assert not any(map(is_model, (trace, tmp_path, tmp_path / "missing", tmp_path / "a" / "b")))


@examples(40)
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_changed_bit_is_noticed(file: Path, tmp_path: Path, where: float, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[int(where * len(data))] ^= 1 << bit
    damaged = tmp_path / "damaged.model"
    damaged.write_bytes(data)
    with pytest.raises(CodecError, match=r"damaged\.model"):
        load_model(damaged)


@pytest.mark.parametrize("kept", [0, 5, 13, 20, 200, -1])
def test_a_cut_file_is_noticed(file: Path, tmp_path: Path, kept: int) -> None:
    short = tmp_path / "short.model"
    short.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CodecError, match=r"short\.model"):
        load_model(short)


def packed(content: object) -> bytes:
    """A file with a right checksum and this content."""
    body = zlib.compress(msgspec.msgpack.encode(content))
    return saved._MAGIC + xxhash.xxh3_128_digest(body) + body


def fields_of(model: Model) -> dict[str, object]:
    """A model's fields as a file has them."""
    packed = msgspec.msgpack.encode(model, enc_hook=saved._plain)
    return cast("dict[str, object]", msgspec.msgpack.decode(packed))


tree = fields_of(learned("tree"))


@pytest.mark.parametrize(
    "model",
    [
        ["TreeModel", msgspec.Raw(500 * b"\x91" + b"\xc0")],
        ["TreeModel", msgspec.Raw(5000 * b"\x91" + b"\xc0")],
        ["TreeModel", None],
        ["NoModel", {}],
        [["SessionModel"], {}],
        ["SessionModel"],
        ["SessionModel", {"name": "x"}],
        ["SessionModel", tree | {"forest": None}],
        ["TreeModel", tree | {"block_size": "big"}],
        ["TreeModel", tree | {"output_tokens": ["<i8", [2], b"one"]}],
        ["TreeModel", tree | {"output_tokens": ["<f8", [1], bytes(8)]}],
        ["TreeModel", tree | {"output_tokens": [1, 2, 3]}],
        [1, 2, 3],
        [],
    ],
    ids=range(14),
)
def test_odd_content_with_a_right_checksum_is_refused(model: list[object], tmp_path: Path) -> None:
    odd = tmp_path / "odd.model"
    odd.write_bytes(packed([saved._layout(), *model]))
    with pytest.raises(CodecError, match=r"odd\.model"):
        load_model(odd)


def test_files_outlive_moves_of_code() -> None:
    shape = str(saved._shape(SessionModel))
    assert "gaps_s" in shape
    assert "mallee" not in shape


def test_another_layout_is_told_apart(
    session: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "old.model"
    with monkeypatch.context() as patch:
        patch.setattr(saved, "_layout", lambda: "0123456789abcdef")
        save_model(session, path)
    with pytest.raises(CodecError, match=r"old\.model: layout 0123456789abcdef.*learn the trace"):
        load_model(path)


def test_places_that_are_not_there(session: Model, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        save_model(session, tmp_path / "nowhere" / "a.model")
    with pytest.raises(ConfigError, match="missing"):
        load_model(tmp_path / "missing.model")
