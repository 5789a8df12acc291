"""Heads of HTTP/1.1 messages: which of their lines go on, and those of our own.

Source: RFC 9110 section 7.6.1 (lines for one hop), RFC 9112.
"""

from collections.abc import Iterable
from http import HTTPStatus
from typing import Final, NamedTuple, TypeAlias

from mallee.actors.front.placement import Refusal

# Lines about the connection, not about the message. Trailers are not passed on, so `te` and `trailer` aren't.
HOP_BY_HOP: Final = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer"),
        *(b"transfer-encoding", b"upgrade"),
    )
)
# Never of one hop, whatever Connection says: a body without its length would be read as the next message.
KEPT: Final = frozenset((b"content-length", b"host"))
OF_REQUESTS: Final = HOP_BY_HOP | {b"expect"}  # which is answered here
WORKER: Final = b"x-mallee-worker"
REASON: Final = b"x-mallee-reason"
CREDENTIALS: Final = frozenset((b"authorization", b"x-api-key"))
CHUNKED: Final = b"transfer-encoding: chunked\r\n"
CLOSE: Final = b"connection: close\r\n"
KEEP: Final = b"connection: keep-alive\r\n"
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
END: Final = b"0\r\n\r\n"


Line: TypeAlias = tuple[bytes, bytes, bytes]
"""One line of a head: its name in small letters, its value, and the whole as it came."""


def line(name: bytes, value: bytes) -> Line:
    return name.lower(), value, b"".join((name, b": ", value, b"\r\n"))


def value_of(lines: Iterable[Line], name: bytes) -> bytes:
    """The value of the first line with this name; empty without one."""
    return next((value for found, value, _ in lines if found == name), b"")


def end_to_end(lines: Iterable[Line], without: frozenset[bytes] = HOP_BY_HOP) -> list[bytes]:
    """The lines that go on: not those about the connection, nor those that it names."""
    for name, value, _ in lines:
        if name == b"connection" and value.lower() not in (b"keep-alive", b"close"):
            without |= {each.strip().lower() for each in value.split(b",")} - KEPT
    return [raw for name, _, raw in lines if name not in without]


class Page(NamedTuple):
    """An answer of our own."""

    status: int
    body: bytes
    kind: bytes = b"application/json"


def refusal_answer(refusal: Refusal, *, closes: bool, is_head: bool = False) -> bytes:
    """A refusal as an answer, whole."""
    seconds = refusal.retry_after_s
    more = b"" if seconds is None else b"retry-after: %d\r\n" % seconds
    page = Page(refusal.status, refusal.body)
    return plain_answer(page, closes=closes, is_head=is_head, more=more)


def plain_answer(page: Page, *, closes: bool, is_head: bool, more: bytes = b"") -> bytes:
    """An answer of our own, whole; `more` lines of its head. `is_head`: only the head is asked for."""
    phrase = HTTPStatus(page.status).phrase.encode()
    head = b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n%b%b\r\n" % (
        *(page.status, phrase, page.kind, len(page.body)),
        *(more, CLOSE if closes else b""),
    )
    return head if is_head else head + page.body
