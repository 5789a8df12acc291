"""The safetensors files of a checkpoint, open: tensors are known by the headers and read one at a time.

Doesn't know what tensors mean. Their bytes are read, not mapped: a file that can't be read any more is an
error with its name, where touching a mapped one would end the process. A file that is replaced by another
stays the one that was opened.
"""

import json
import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from mallee.protocol.errors import ModelNotFound, WeightsMismatch
from mallee.worker.model.config import digest_of
from mallee.worker.model.loading.stored import is_kv_scale

_OF_SIGHT: Final = ("vision_tower.", "multi_modal_projector.", "model.visual.")
_WINDOWS: Final = 64
_WINDOW_NBYTES: Final = 1024
_LENGTH_NBYTES: Final = 8  # of the header's length, before it
_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By safetensors' names. Others are refused."""


class Entry(NamedTuple):
    """A tensor in a file; `begin` is its place among all bytes of the file."""

    file: "WeightFile"
    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> torch.Tensor:
        """The tensor, in memory of its own. Raises WeightsMismatch if the file can't be read."""
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        raw = torch.empty(nbytes, dtype=torch.uint8)
        self.file.read_into(raw.numpy().data, self.begin)
        return raw.view(self.dtype).view(self.shape)


class WeightFile:
    """One file, which stays open as long as the object lives."""

    __slots__ = ("__weakref__", "_fd", "_first", "_header", "_size", "path")

    def __init__(self, path: Path) -> None:
        """Raises WeightsMismatch, with the file's name, if it is cut short or no such file."""
        self.path = path
        try:
            with safe_open(path, framework="pt"):  # checks the header, and that all bytes are there
                self._fd = os.open(path, os.O_RDONLY)
        except (SafetensorError, OSError) as e:
            raise self._unreadable(e) from e
        weakref.finalize(self, os.close, self._fd)
        self._size = os.fstat(self._fd).st_size
        length = bytearray(_LENGTH_NBYTES)
        self.read_into(memoryview(length), 0)
        header = bytearray(int.from_bytes(length, "little"))
        self.read_into(memoryview(header), _LENGTH_NBYTES)
        self._first = _LENGTH_NBYTES + len(header)
        self._header = bytes(header)

    def entries(self, is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, Entry]]:
        """Tensors by name. Raises WeightsMismatch for one of a type that torch doesn't have."""
        tensors: dict[str, Any] = json.loads(self._header)
        tensors.pop("__metadata__", None)
        for name, own in tensors.items():
            if not is_wanted(name):
                continue
            if own["dtype"] not in _DTYPES:
                text = f"{self.path}: {name} has the type {own['dtype']}, which torch doesn't have"
                raise WeightsMismatch(text, path=str(self.path))
            begin = self._first + own["data_offsets"][0]
            yield name, Entry(self, begin, tuple(own["shape"]), _DTYPES[own["dtype"]])

    def samples(self) -> Iterator[bytes]:
        """The file's size and header, windows of its content, and all scales of KV."""
        yield str(self._size).encode()
        yield self._header
        for i in range(_WINDOWS):
            begin = self._first + (self._size - self._first) * i // _WINDOWS
            window = bytearray(min(_WINDOW_NBYTES, self._size - begin))
            self.read_into(memoryview(window), begin)
            yield bytes(window)
        scales = dict(self.entries(is_kv_scale))
        for name in sorted(scales):  # a few bytes, which decide what every byte of KV means
            yield scales[name].read().flatten().view(torch.uint8).numpy().tobytes()

    def read_into(self, target: memoryview, begin: int) -> None:
        """Fill `target` with the bytes from `begin` on. Raises WeightsMismatch."""
        done = 0
        try:
            while done < len(target):
                num = os.preadv(self._fd, [target[done:]], begin + done)
                if not num:
                    raise OSError(f"it ends at byte {begin + done}")
                done += num
        except OSError as e:
            raise self._unreadable(e) from e

    def _unreadable(self, error: Exception) -> WeightsMismatch:
        text = f"{self.path} can't be read as safetensors ({error}); fetch it again"
        return WeightsMismatch(text, path=str(self.path))


class Checkpoint:
    """All files of a folder, and their tensors by name."""

    __slots__ = ("_files", "tensors")

    def __init__(self, folder: Path, prefix: str = "", ignored: tuple[str, ...] = ()) -> None:
        """Names lose `prefix`, but for its "model."; with one, the parts that see images are left out.

        So are tensors whose names begin with one of `ignored`. Raises ModelNotFound, WeightsMismatch.
        """
        model = "model." if prefix.startswith("model.") else ""
        left_out = (*ignored, *_OF_SIGHT) if prefix else ignored

        def is_wanted(stored: str) -> bool:
            return not stored.startswith(left_out)

        self._files = _opened(folder)
        self.tensors: dict[str, Entry] = {}
        for file in self._files:
            for stored, entry in file.entries(is_wanted):
                name = stored
                if prefix and stored.startswith(prefix):
                    name = model + stored.removeprefix(prefix)
                if name in self.tensors:
                    text = f"{file.path}: {name} is in another file too"
                    raise WeightsMismatch(text, path=str(file.path))
                self.tensors[name] = entry

    def read(self, name: str) -> torch.Tensor:
        """A tensor, in memory of its own. Raises WeightsMismatch if its file can't be read."""
        return self.tensors[name].read()

    def digest(self) -> str:
        """As `weights_digest`, of what the files hold now."""
        return _digest(self._files)


def weights_digest(folder: Path) -> str:
    """A cheap digest of the weights: each file's header, size, scales of KV, and 64 windows of 1 KiB.

    Not proof against an adversary: it tells checkpoints apart, it does not authenticate them.
    Raises ModelNotFound, WeightsMismatch.
    """
    return _digest(_opened(folder))


def _opened(folder: Path) -> list[WeightFile]:
    return [WeightFile(path) for path in weight_files(folder)]


def _digest(files: Iterable[WeightFile]) -> str:
    return digest_of([part for file in files for part in file.samples()])


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The checkpoint's safetensors files: the index's if there is one.

    Raises ModelNotFound, WeightsMismatch.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = [folder / name for name in _indexed(index)]
        missing = [f.name for f in files if not f.is_file()]
        if missing:
            raise ModelNotFound(f"{folder} lacks {', '.join(missing)}, named by {index.name}")
        return tuple(files)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelNotFound(f"{folder} holds no .safetensors file", path=str(folder))
    return tuple(files)


def _indexed(index: Path) -> list[str]:
    """The file names in the index. Raises WeightsMismatch if it doesn't name files beside it."""
    try:
        content = json.loads(index.read_text())
    except ValueError as e:
        raise WeightsMismatch(f"{index} is not JSON: {e}", path=str(index)) from e
    where = content.get("weight_map") if isinstance(content, dict) else None
    names = sorted({str(name) for name in where.values()}) if isinstance(where, dict) else []
    if not names or any(name != Path(name).name for name in names):
        raise WeightsMismatch(
            f"{index}: weight_map must name the file of each tensor, beside the index",
            path=str(index),
        )
    return names
