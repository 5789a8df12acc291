"""zstd, where the `synth` extra is installed."""

import io
from pathlib import Path
from types import ModuleType
from typing import Any

from mallee.protocol.errors import ConfigError


class PackedError(Exception):
    """The packed bytes are damaged."""


def zstandard() -> ModuleType:
    """The package. Raises ConfigError if it is not there."""
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError(
            "zstd files need the package zstandard; pip install 'mallee[synth]', or unpack the file"
        ) from error
    return zstandard


class ZstdReader(io.RawIOBase):
    """Content of a zstd file, frame after frame. Raises PackedError where it is damaged or cut off.

    The package's own stream reader takes a file that was cut off for one that ends there.
    """

    def __init__(self, path: Path) -> None:
        self._package = zstandard()
        self._file = path.open("rb")
        self._frame: Any = None  # being unpacked
        self._packed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not self._unpack():
                return 0
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _unpack(self) -> bool:
        """Whether there was more."""
        packed = self._packed or self._file.read(1 << 16)
        self._packed = b""
        if not packed:
            if self._frame is not None:
                raise PackedError("the zstd file was cut off")
            return False
        if self._frame is None:
            self._frame = self._package.ZstdDecompressor().decompressobj()
        try:
            self._ready = memoryview(self._frame.decompress(packed))
        except self._package.ZstdError as error:
            raise PackedError(f"zstd: {error}") from error
        if self._frame.eof:
            self._packed = self._frame.unused_data
            self._frame = None
        return True

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
