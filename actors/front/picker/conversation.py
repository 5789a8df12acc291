"""The conversation about one HTTP request, as a state machine without gRPC, clocks or routing.

Envoy sends headers, body and trailers of the request, then of the response; each is answered, in the order
headers, body, trailers. The place of the pick depends on how Envoy sends the request's body:

    FULL_DUPLEX_STREAMED   at the body's end: nothing is answered before, then everything is
    BUFFERED               at the body, which is one message; headers are answered at once
    NONE, STREAMED         at the headers, without the prompt

A request without a body is picked for at its headers. The machine asks for a pick by a `Wanted`, and is told
the outcome by `picked` or `refused`; meanwhile no message may be given to it. Of responses it reports the
first piece of the body and, for the count of cached tokens, the last bytes.
"""

from typing import Final, NamedTuple, TypeAlias

from mallee.actors.front.picker.messages import (
    Body,
    BodyMode,
    Destination,
    Headers,
    Incoming,
    Modes,
    Passed,
    Piece,
    Reply,
    Side,
    Trailers,
)
from mallee.actors.front.placement import Refusal
from mallee.protocol.errors import CodecError

PIECE_NBYTES: Final = 62 << 10  # Envoy recommends at most 64 KiB
TAIL_NBYTES: Final = 4096  # of a response, with the usage in it
_DUPLEX: Final = Modes(BodyMode.FULL_DUPLEX_STREAMED, BodyMode.FULL_DUPLEX_STREAMED)


class Wanted(NamedTuple):
    """A pick, by headers and body of a request; `subset` None: of all endpoints."""

    headers: dict[str, str]
    body: bytes
    subset: tuple[str, ...] | None


class Served(NamedTuple):
    """The answer began: by this endpoint, if Envoy says so, and with this status."""

    endpoint: str | None
    status: int


class FirstPiece(NamedTuple):
    """The first piece of an answer's body is there."""


class Finished(NamedTuple):
    """The answer is whole; `tail` are its last bytes."""

    tail: bytes


Step: TypeAlias = Reply | Wanted | Served | FirstPiece | Finished


class Conversation:
    """One HTTP request. Each call returns what to do, in order; a `Wanted` is always the last."""

    def __init__(self, *, max_body_nbytes: int) -> None:
        self._max_nbytes = max_body_nbytes
        self._modes: Modes | None = None
        self._headers: dict[str, str] | None = None
        self._subset: tuple[str, ...] | None = None
        self._pieces: list[bytes] = []
        self._nbytes = 0
        self._ended_by: Headers | Body | Trailers | None = (
            None  # the request's end, while it is picked for
        )
        self._is_picking = False
        self._is_answered = False  # the pick is known to Envoy
        self._is_refused = False
        self._has_piece = False
        self._tail = b""

    @property
    def is_answered(self) -> bool:
        """Whether the request has its destination, or was refused."""
        return self._is_answered

    def on_message(self, message: Incoming) -> list[Step]:
        """Take in Envoy's next message. Raises CodecError if it can't come now."""
        assert not self._is_picking, "a message during a pick"
        if self._is_refused:
            return []  # sent before the refusal arrived
        if self._modes is None:
            self._modes = message.modes or _DUPLEX
        if message.subset is not None:
            self._subset = message.subset
        part = message.part
        steps = (
            self._on_request(part) if part.side == "request" else self._on_response(part, message)
        )
        if message.is_observed:
            return [step for step in steps if not isinstance(step, Passed | Piece | Refusal)]
        return steps

    def picked(self, destination: Destination) -> list[Step]:
        """The replies that wait for the pick."""
        part = self._picked_for()
        assert self._modes is not None
        steps: list[Step] = []
        if isinstance(part, Body) and self._modes.request is not BodyMode.FULL_DUPLEX_STREAMED:
            steps.append(Passed("body", "request", destination))
        else:
            steps.append(Passed("headers", "request", destination))
            steps += self._body(ends=isinstance(part, Body))
            if isinstance(part, Trailers):
                steps.append(Passed("trailers", "request"))
        self._pieces.clear()
        return steps

    def refused(self, refusal: Refusal) -> list[Step]:
        """The reply to a request that goes nowhere."""
        self._picked_for()
        self._is_refused = True
        self._pieces.clear()
        return [refusal]

    def _picked_for(self) -> Headers | Body | Trailers:
        assert self._is_picking, "no pick was wanted"
        assert self._ended_by is not None
        self._is_picking = False
        self._is_answered = True
        return self._ended_by

    def _on_request(self, part: Headers | Body | Trailers) -> list[Step]:
        assert self._modes is not None
        mode = self._modes.request
        if isinstance(part, Headers):
            self._headers = part.headers
            if part.ends or mode in (BodyMode.NONE, BodyMode.STREAMED):
                return self._pick(part)
            return [] if mode is BodyMode.FULL_DUPLEX_STREAMED else [Passed("headers", "request")]
        if self._headers is None:
            raise CodecError("a request's body or trailers came before its headers")
        if self._is_answered:
            if mode is BodyMode.FULL_DUPLEX_STREAMED:
                return []  # Envoy may send the end of a large body twice (envoyproxy/envoy#46237)
            return [Passed("body" if isinstance(part, Body) else "trailers", "request")]
        if isinstance(part, Body):
            self._pieces.append(part.data)
            self._nbytes += len(part.data)
            if self._nbytes > self._max_nbytes:
                return self._too_large(part)
            if not part.ends and mode is BodyMode.FULL_DUPLEX_STREAMED:
                return []
        return self._pick(part)

    def _pick(self, part: Headers | Body | Trailers) -> list[Step]:
        assert self._headers is not None
        self._is_picking, self._ended_by = True, part
        return [Wanted(self._headers, b"".join(self._pieces), self._subset)]

    def _too_large(self, part: Body) -> list[Step]:
        self._is_picking, self._ended_by = True, part
        limit = self._max_nbytes >> 20
        message = f"the request's body is larger than {limit} MiB, the picker's max_body_mb"
        return self.refused(Refusal(413, "request_too_large", message))

    def _body(self, *, ends: bool) -> list[Step]:
        """The request's body, piece by piece; nothing for a request without one."""
        body = b"".join(self._pieces)
        if not body and not ends:
            return []
        starts = range(0, max(1, len(body)), PIECE_NBYTES)
        pieces = [body[start : start + PIECE_NBYTES] for start in starts]
        last = len(pieces) - 1
        return [Piece("request", piece, ends and i == last) for i, piece in enumerate(pieces)]

    def _on_response(self, part: Headers | Body | Trailers, message: Incoming) -> list[Step]:
        assert self._modes is not None
        side: Side = "response"
        match part:
            case Headers(_, headers, ends):
                served = Served(message.served, _status(headers))
                return [served, Passed("headers", side), *self._end(ends)]
            case Body(_, data, ends):
                self._tail = (self._tail + data)[-TAIL_NBYTES:]
                first = [] if self._has_piece or not data else [FirstPiece()]
                self._has_piece = self._has_piece or bool(data)
                is_duplex = self._modes.response is BodyMode.FULL_DUPLEX_STREAMED
                reply = Piece(side, data, ends) if is_duplex else Passed("body", side)
                return [*first, reply, *self._end(ends)]
            case Trailers():
                return [Passed("trailers", side), *self._end(True)]

    def _end(self, ends: bool) -> list[Finished]:
        return [Finished(self._tail)] if ends else []


def _status(headers: dict[str, str]) -> int:
    status = headers.get(":status", "")
    return int(status) if status.isascii() and status.isdigit() else 0
