"""Learned models in files, whole or shareable.

A file is `_MAGIC`, a checksum of what follows, and a compressed msgpack value: the layout and the model. The
layout is a digest of all fields that models have, so that a file of another layout is told apart
without a version to keep. Nothing in a file is code: records are of the classes below or refused.
"""

import os
import re
import zlib
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
import numpy as np
import xxhash

from mallee.protocol.errors import CodecError, ConfigError
from mallee.synth.session.shareable.model import PARTS, SharedModel, Summary, drawn, to_shareable

if TYPE_CHECKING:
    from mallee.synth.core.model import Model

__all__ = [
    "is_model", "load_model", "note_of", "privacy_note", "save_model", "to_shareable",
]  # fmt: skip

_MAGIC: Final = b"mallee-model\x00"
_DIGEST_BYTES: Final = 16
_ARRAY: Final = 1
_MOST_BYTES: Final = 4 << 30  # a model's when unpacked: more is a bomb
_PLAIN: Final = (type(None), bool, int, float, str)


def privacy_note(*, shareable: bool) -> str:
    """A note for people: the facts about the trace that a reader of the file can learn."""
    if shareable:
        return (
            "This file has no request of the trace: only means over 20 or more requests, sessions or gaps,"
            " correlations, chances, counts, and the lengths of texts that 20 or more sessions begin"
            " with. It still tells the traffic's size, rate over time, and typical lengths and waits."
        )
    return (
        "This file has each request's lengths, times and place in its session, and names of request"
        " classes; no text, no ids, no session names. To share it, save it as shareable."
    )


def save_model(model: "Model", path: Path | str, *, shareable: bool = False) -> None:
    """Writes `model` to `path`, all of it or nothing. With `shareable` what `to_shareable` keeps of it.

    The same model gives the same bytes. Raises ConfigError if the file can't be written, or the model
    can't be shared.
    """
    kept = to_shareable(model) if shareable else model
    what = kept.summary if isinstance(kept, SharedModel) else kept
    note = privacy_note(shareable=isinstance(kept, SharedModel))
    if type(what) not in _names():
        raise ConfigError(f"{type(model).__name__}: not a model that can be saved")
    body = zlib.compress(msgspec.msgpack.encode([_layout(), note, _plain(what)]), 6)
    _write(Path(path), _MAGIC + xxhash.xxh3_128_digest(body) + body)


def is_model(path: Path | str) -> bool:
    """Whether `path` begins as a file of `save_model` does; False for what can't be read."""
    with suppress(OSError), open(path, "rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC
    return False


def load_model(path: Path | str) -> "Model":
    """The model in `path`: generates the same requests as the one that was saved.

    Raises CodecError if that is no model, damaged, or of another layout; ConfigError if it can't be read.
    """
    layout, _, plain = _read(path)
    if layout != _layout():
        raise CodecError(
            f"{path}: layout {layout}, this version reads {_layout()}; learn the trace again"
        )
    try:
        made = _made(plain)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CodecError(f"{path}: not a model ({error}); save it again") from error
    if not hasattr(made, "generate") and not isinstance(made, Summary):
        raise CodecError(f"{path}: holds a {type(made).__name__}, no model; save it again")
    return drawn(made) if isinstance(made, Summary) else cast("Model", made)


def note_of(path: Path | str) -> str:
    """The `privacy_note` in a file. Raises as `load_model` does."""
    note: str = _read(path)[1]
    return note


def _read(path: Path | str) -> tuple[str, str, Any]:
    """(layout, note, model as plain values)."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give a file of a saved model") from error
    if not data.startswith(_MAGIC):
        raise CodecError(f"{path}: not a saved model; give a file written with --save-model")
    start = len(_MAGIC) + _DIGEST_BYTES
    body = data[start:]
    if xxhash.xxh3_128_digest(body) != data[len(_MAGIC) : start]:
        raise CodecError(f"{path}: damaged (its checksum is wrong); copy or save it again")
    try:
        raw = zlib.decompressobj().decompress(body, _MOST_BYTES)
        layout, note, plain = msgspec.msgpack.decode(raw, ext_hook=_array)
    except (zlib.error, TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise CodecError(
            f"{path}: not what a model is packed as ({error}); save it again"
        ) from error
    return layout, note, plain


def _write(path: Path, data: bytes) -> None:
    target = path.resolve()  # the file behind a link is what changes
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(data)  # a device or a pipe is written to, not replaced
            return
        try:
            part.write_bytes(data)
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror} (a model of {len(data)} bytes); give a folder that exists and"
            " has room"
        ) from error


@cache
def _classes() -> dict[str, type]:
    """The classes that a file may hold, by name."""
    from mallee.synth.baseline.arrivals import Bursts
    from mallee.synth.baseline.core import Core
    from mallee.synth.baseline.model import TreeModel
    from mallee.synth.baseline.stops import OwnText, Stops
    from mallee.synth.core.arrivals import Starts, Turnstile
    from mallee.synth.programs import forest as search_forest
    from mallee.synth.programs.model import SearchModel
    from mallee.synth.programs.prompts import Prompts
    from mallee.synth.session.forest import Forest
    from mallee.synth.session.model import SessionModel
    from mallee.synth.session.steps import Steps

    known: dict[str, type] = {
        each.__name__: each
        for each in (
            SessionModel, Steps, Forest, Starts, Turnstile, *PARTS,
            TreeModel, Core, Stops, OwnText, Bursts, SearchModel, search_forest.Nodes, Prompts,
        )
    }  # fmt: skip
    return known | {"SearchForest": search_forest.Forest}


@cache
def _names() -> dict[type, str]:
    return {each: name for name, each in _classes().items()}


@cache
def _layout() -> str:
    shapes = [
        [name, [(field.name, _bare(field.type)) for field in fields(each)]]
        for name, each in sorted(_classes().items())
    ]
    return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(shapes))


def _bare(kind: Any) -> str:
    """A type's name without modules, so that files outlive moves of code."""
    return re.sub(r"(\w+\.)+", "", str(kind))


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        head = msgspec.msgpack.encode([value.dtype.str, value.shape])
        size = len(head).to_bytes(2, "little")
        return msgspec.msgpack.Ext(_ARRAY, size + head + np.ascontiguousarray(value).tobytes())
    if is_dataclass(value):
        kept = [_plain(getattr(value, field.name)) for field in fields(value) if field.init]
        return {"is": _names()[type(value)], "has": kept}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if isinstance(value, np.generic):
        return value.item()
    assert type(value) in _PLAIN, type(value)
    return value


def _array(code: int, data: memoryview) -> Any:
    if code != _ARRAY:
        raise ValueError(f"unknown part {code}")
    start = 2 + int.from_bytes(data[:2], "little")
    dtype, shape = msgspec.msgpack.decode(data[2:start])
    return np.frombuffer(data, dtype, offset=start).reshape(shape).copy()


def _made(plain: Any) -> Any:
    """Raises ValueError, KeyError, TypeError for content that no model has."""
    if isinstance(plain, list):
        return tuple(_made(each) for each in plain)
    if isinstance(plain, dict):
        each = _classes()[plain["is"]]
        kept = [field for field in fields(each) if field.init]
        values = [_made(value) for value in plain["has"]]
        for field, value in zip(kept, values, strict=True):
            if not _suits(str(field.type), value):
                raise ValueError(f"{plain['is']}.{field.name} is a {type(value).__name__}")
        return each(**{field.name: value for field, value in zip(kept, values, strict=True)})
    return plain


def _suits(kind: str, value: Any) -> bool:
    """Whether a value may be of a field's type, by its text."""
    if value is None:
        return "None" in kind
    if isinstance(value, np.ndarray):
        return f"numpy.{value.dtype.name}" in kind
    if isinstance(value, float):
        return "float" in kind and "ndarray" not in kind
    return type(value).__name__ in kind or ("Literal" in kind and repr(value) in kind)
