"""Learned models in files.

A file is `_MAGIC`, a checksum of what follows, and a compressed msgpack value: the layout, the model's class
and its fields. The layout is a digest of all fields that models have, so that a file of another layout is
told apart without a version to keep. Nothing in a file is code: values are of the fields' types or refused.
"""

import zlib
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias, get_args

import msgspec
import numpy as np
import xxhash

from mallee.protocol.errors import CodecError, ConfigError
from mallee.synth.baseline.model import TreeModel
from mallee.synth.core.model import Model
from mallee.synth.programs.model import SearchModel
from mallee.synth.session.model import SessionModel
from mallee.traces.files.output import whole_file

_Kept: TypeAlias = SessionModel | TreeModel | SearchModel
_KEPT: Final[dict[str, type[_Kept]]] = {each.__name__: each for each in get_args(_Kept)}
_MAGIC: Final = b"mallee-model\x00"
_DIGEST_BYTES: Final = 16
_MOST_BYTES: Final = 4 << 30  # a model's when unpacked: more is a bomb
PRIVACY_NOTE: Final = (
    "This file has each request's lengths, times and place in its session, and names of request classes;"
    " no text, no ids, no session names."
)


def save_model(model: Model, path: Path | str) -> None:
    """Writes `model` to `path`, all of it or nothing; the same model gives the same bytes.

    Raises ConfigError if the file can't be written, or no such model can be saved.
    """
    name = type(model).__name__
    if name not in _KEPT:
        raise ConfigError(f"{name}: not a model that can be saved")
    packed = msgspec.msgpack.encode([_layout(), name, model], enc_hook=_plain)
    body = zlib.compress(packed, 6)
    with whole_file(path, packs=False) as file:
        file.write(_MAGIC + xxhash.xxh3_128_digest(body) + body)


def is_model(path: Path | str) -> bool:
    """Whether `path` begins as a file of `save_model` does; False for what can't be read."""
    with suppress(OSError), open(path, "rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC
    return False


def load_model(path: Path | str) -> Model:
    """The model in `path`: generates the same requests as the one that was saved.

    Raises CodecError if that is no model, damaged, or of another layout; ConfigError if it can't be read.
    """
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
        layout, name, content = msgspec.msgpack.decode(raw, type=tuple[str, str, msgspec.Raw])
        if layout != _layout():
            raise CodecError(
                f"{path}: layout {layout}, this version reads {_layout()}; learn the trace again"
            )
        return msgspec.msgpack.decode(content, type=_KEPT[name], dec_hook=_array)
    except (zlib.error, KeyError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise CodecError(f"{path}: not a model ({error}); save it again") from error


@cache
def _layout() -> str:
    """A digest of all fields and their types, without modules, so that files outlive moves of code."""
    return xxhash.xxh3_64_hexdigest(repr([_shape(each) for each in _KEPT.values()]).encode())


def _shape(kind: Any) -> Any:
    name = getattr(kind, "__name__", type(kind).__name__)
    if is_dataclass(kind):
        return name, [(field.name, _shape(field.type)) for field in fields(kind)]
    return name, [_shape(each) for each in get_args(kind)]


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} can't be saved")


def _array(kind: Any, value: Any) -> Any:
    """An array of a field's type. Raises ValueError for another one."""
    (dtype,) = get_args(get_args(kind)[1])
    found, shape, data = msgspec.convert(value, tuple[str, list[int], bytes])
    if np.dtype(found) != dtype:
        raise ValueError(f"{found} for an array of {np.dtype(dtype).str}")
    return np.frombuffer(data, dtype).reshape(shape).copy()
