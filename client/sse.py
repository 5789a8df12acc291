"""Server-sent events, bytes in and data out; no I/O."""

from typing import Final

DONE: Final = "[DONE]"
"""The data of the last event of a stream that is whole."""


class SseParser:
    """Parses chunks of any size into the data of complete events.

    Lines end with LF, CRLF or CR; comments and other fields than `data` are passed over; the data
    lines of one event are joined with newlines. (WHATWG HTML, 9.2.6.)
    """

    __slots__ = ("_after_cr", "_buffer", "_data")

    def __init__(self) -> None:
        self._buffer = b""
        self._data: list[str] = []
        self._after_cr = False

    def feed(self, chunk: bytes) -> list[str]:
        """The data of the events that `chunk` completes, in order."""
        if not chunk:
            return []
        rest = chunk[1:] if self._after_cr and chunk.startswith(b"\n") else chunk  # a cut CRLF
        self._after_cr = chunk.endswith(b"\r")
        text = (self._buffer + rest).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._buffer = text.split(b"\n")
        return [event for line in lines if (event := self._line(line)) is not None]

    def _line(self, line: bytes) -> str | None:
        if not line:
            data, self._data = self._data, []
            return "\n".join(data) if data else None
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" ").decode("utf-8", "replace"))
        return None
