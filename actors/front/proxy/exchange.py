"""One request and its answer, between a client's connection and a backend's.

The request is whole when an exchange begins, so that it can be sent again: to another backend while nothing
of an answer has come, after a refused or broken connection or a 503. An answer's head is kept until there is
a piece of its body: a backend that dies while it computes the prompt has said nothing yet. From then on the
answer is the client's, and one that breaks and can't go on is cut so that the client sees it.

An exchange sees the answer's bytes (`on_body`), has the request (`request`) and can open another connection
(`_go_to`): an answer that breaks in its middle arrives at `_broke`. A stream may then go on at another
backend (`streams.py`).
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final, Protocol

from mallee.actors.front.http.backends import Backend, Backends
from mallee.actors.front.http.messages import (
    CHUNKED,
    CLOSE,
    END,
    KEEP,
    OF_REQUESTS,
    Line,
    end_to_end,
)
from mallee.actors.front.placement import Picked, Refusal
from mallee.actors.front.prompts import (
    AT_ONCE_NBYTES,
    OBJECTIVE_HEADERS,
    SESSION_HEADERS,
    Prompt,
    cached_tokens,
    drawn_tokens,
)
from mallee.actors.front.proxy.counts import End, ProxyCounts
from mallee.actors.front.proxy.streams import DATA, DONE, GAP, Room, Stream, continuation, is_stream
from mallee.gateway.access.visits import UNLIMITED
from mallee.protocol.errors import MalleeError, PoisonRequest
from mallee.protocol.ids import RequestId

log = logging.getLogger(__name__)
if TYPE_CHECKING:
    from mallee.actors.front.front import Front
    from mallee.actors.front.proxy.spans import ForwardSpans, ForwardTrace

TAIL_PIECES: Final = 4
TAIL_NBYTES: Final = 4096  # of an answer, with the usage in it
TOUCH_S: Final = 60.0  # between two signs of life of a long answer's booking
RACE_S: Final = 1.0  # a request that was sent longer ago than this has been read
RETRY_AFTER_S: Final = 1
# Backends that die with a request, the last before it said anything: the request may be the cause.
MOST_DEATHS: Final = 2
_OF_PROMPTS: Final = frozenset(name.encode() for name in (*SESSION_HEADERS, *OBJECTIVE_HEADERS))


class Request:
    """One request of a client, whole when its exchange begins."""

    def __init__(self) -> None:
        self.method = b""
        self.target = b""
        self.lines: list[Line] = []
        self.body = b""
        self.is_http10 = False
        self.keeps = False  # the client wants to go on with its connection
        self.visit = UNLIMITED

    def with_body(self, body: bytes) -> "Request":
        """The same with another body."""
        made = Request()
        made.method, made.target, made.body = self.method, self.target, body
        made.lines = [each for each in self.lines if each[0] != b"content-length"]
        return made

    def message(self) -> bytes:
        """The request as a backend gets it."""
        lines = end_to_end(self.lines, OF_REQUESTS)
        names = {name for name, _, _ in self.lines}
        if b"content-length" not in names and (self.body or b"transfer-encoding" in names):
            lines.append(b"content-length: %d\r\n" % len(self.body))
        if b"host" not in names:
            lines.append(b"host: backend\r\n")  # HTTP/1.0 has none
        first = b"".join((self.method, b" ", self.target, b" HTTP/1.1\r\n"))
        return b"".join((first, *lines, b"\r\n", self.body))


class Client(Protocol):
    """The connection that an exchange answers."""

    is_paused: bool
    write: Callable[[bytes], None]

    def refuse(self, refusal: Refusal) -> None:
        """Answer with an error of our own; the exchange is over."""
        ...

    def finished(self, *, keeps: bool) -> None:
        """The answer is whole."""
        ...

    def cut(self, *, is_framed: bool) -> None:
        """Close so that the client sees that the answer is not whole: by its framing, or else by a reset."""
        ...


class Relay(Protocol):
    """All that exchanges share."""

    front: "Front"
    backends: Backends
    counts: ProxyCounts
    retries: int
    silence_s: float
    now: float
    room: Room
    is_draining: bool
    spans: "ForwardSpans | None"


class Exchange:
    """One request under way. Ends with one call of the client's `refuse`, `finished` or `cut`, or with it."""

    def __init__(self, relay: Relay, client: Client, request: Request, name: RequestId) -> None:
        self._relay = relay
        self.client = client
        self.request = request
        self.id = name
        self.method = request.method
        self.status = 0
        self._message = b""
        self._prompt: Prompt | None = None
        self._address = self._reason = ""
        self._tried: list[str] = []
        self._num_died = 0  # backends that were lost with this request
        self._backend: Backend | None = None
        self._head = b""  # kept until there is a body
        self._has_begun = False  # the client has bytes of the answer
        self._is_waiting = True  # for those of this backend
        self._stream: Stream | None = None  # one that may go on elsewhere
        self._is_chunked = False
        self._is_framed = True  # the client knows where the answer ends
        self._keeps = request.keeps
        self._is_over = False
        self._stays_booked = False  # when it is over
        self._visit = ExitStack()
        self._trace: ForwardTrace | None = None
        self._num_pieces = 0  # of the answer, about a token each
        self._tail: deque[bytes] = deque(maxlen=TAIL_PIECES)
        self._heard_at = self._touched_at = relay.now

    def begin(self) -> None:
        """Read the prompt and go on: in a thread with a long one."""
        if self._relay.spans is not None:
            method = self.method.decode("latin-1")
            self._trace = self._relay.spans.begin(method, self._path, self.request.lines)
            if self._trace is not None:
                self.request.lines = self._trace.lines
        if self.request.body:
            try:
                self._visit.enter_context(self.request.visit)
            except MalleeError as error:
                self._deny(error)
                return
        self._message = self.request.message()
        headers = self._headers()
        front, body, began = self._relay.front, self.request.body, time.perf_counter()
        if len(body) > AT_ONCE_NBYTES:
            front.tasks.spawn(self._read(headers, began))
            return
        try:
            self._placed(front.read(headers, body), began)
        except Exception:  # event pump: one request's fault must not end the others
            self._fault()

    def _headers(self) -> dict[str, str]:
        """Those that tell of the prompt."""
        headers = {
            name.decode(): value.decode("latin-1")
            for name, value, _ in self.request.lines
            if name in _OF_PROMPTS
        }
        headers[":path"] = self._path
        return headers

    @property
    def _path(self) -> str:
        return self.request.target.decode("latin-1")

    async def _read(self, headers: dict[str, str], began: float) -> None:
        try:
            prompt = await self._relay.front.read_aside(headers, self.request.body)
            if not self._is_over:
                self._placed(prompt, began)
        except Exception:  # event pump: as above
            self._fault()

    def _fault(self) -> None:
        """A bug of ours."""
        log.exception("a request could not be placed")
        if not self._is_over:
            self._refuse(Refusal(500, "internal_error", "the router failed"))

    def _placed(self, prompt: Prompt, began: float) -> None:
        if self.request.body:
            try:
                self.request.visit.begin(prompt.num_branches, prompt.num_tokens)
            except MalleeError as error:
                self._deny(error)
                return
        else:
            prompt = prompt._replace(max_tokens=1)
        self._prompt = prompt
        outcome = self._place("")
        counts = self._relay.counts
        counts.decided(outcome, time.perf_counter() - began)

    def _deny(self, error: MalleeError) -> None:
        """Refuse a request that is beyond the limits of its key."""
        self._relay.counts.denied(error.status)
        self._refuse(Refusal.of(error))

    def _place(self, failure: str) -> str:
        """Choose a backend that was not tried, and go to it; returns the outcome.

        `failure`: of the one that was tried last.
        """
        front, prompt = self._relay.front, self._prompt
        assert prompt is not None
        among = front.pods.served.of(prompt.model)
        if self._tried:
            known = among or [view.worker for view in front.router.workers()]
            among = tuple(each for each in known if each not in self._tried)
        picked = front.placement.pick(self.id, prompt, among)
        if isinstance(picked, Refusal):
            if failure:
                message = f"{failure}, and no other backend is ready"
                picked = Refusal(502, "backend_failed", message, RETRY_AFTER_S)
            self._refuse(picked)
            return str(picked.status)
        if not self._tried:
            self._relay.counts.picked(len(prompt.hashes), picked.overlap_blocks)
        self._address, self._reason = picked.endpoints[0], picked.reason
        if self._trace is not None:
            self._trace.chosen(self._address, self._reason, picked.overlap_blocks)
        self._picked(prompt, picked)
        return "picked"

    def _picked(self, prompt: Prompt, picked: Picked) -> None:
        """Go on with a decision."""
        self._go_to(picked.endpoints[0])

    def _go_to(self, address: str) -> None:
        """Ask the backend at `address`, on a connection that is there or on a new one."""
        kept = self._relay.backends.take(address)
        if kept is not None:
            self._ask(kept)
        else:
            self._next("connect")
            self._relay.front.tasks.spawn(self._connect(address))

    def _next(self, part: str) -> None:
        """Another part of the course begins, for its spans."""
        if self._trace is not None:
            self._trace.next(part)

    async def _connect(self, address: str, *, was_lost: bool = False) -> None:
        """`was_lost`: a connection that was kept ended under the request."""
        backends = self._relay.backends
        try:
            backend = await backends.connect(address)
        except (OSError, TimeoutError) as error:
            if not self._is_over:
                self._failed(str(error) or "no connection in time", died=was_lost)
            return
        if self._is_over:
            backends.keep(backend)
        else:
            self._ask(backend)

    def _ask(self, backend: Backend) -> None:
        self._next("first byte")
        self._backend = backend
        self._is_waiting = True
        self._heard_at = self._relay.now
        if self.client.is_paused:
            backend.pause(True)
        backend.send(self, self._message)

    # From the backend

    def on_answer(self, status: int, phrase: bytes, lines: list[Line], framing: str) -> bool:
        if status == 503 and self._may_retry():
            self._backend = None
            self._failed("it answers 503")
            return False
        if self._has_begun:
            if is_stream(self.request.target, status, lines):
                assert self._stream is not None
                self._stream.fault = b""  # it was of the backend before
                return True
            self._backend = None
            self._failed(f"it answers {status}, and no stream")
            return False
        self.status = status
        is_old, is_open = self.request.is_http10, framing in ("chunked", "")
        self._is_chunked = is_open and not is_old
        self._is_framed = not (is_open and is_old)
        if (is_open and is_old) or self._relay.is_draining:
            self._keeps = False
        worker, reason = self._address.encode(), self._reason.encode()
        ours = b"x-mallee-worker: %b\r\nx-mallee-reason: %b\r\n" % (worker, reason)
        connection = (KEEP if is_old else b"") if self._keeps else CLOSE
        first = b"HTTP/1.1 %d %b\r\n" % (status, phrase)
        own = CHUNKED if self._is_chunked else b""
        self._head = b"".join((first, *end_to_end(lines), own, ours, connection, b"\r\n"))
        if is_open and is_stream(self.request.target, status, lines):
            self._stream = Stream(self._relay.room)
        return True

    def on_body(self, data: bytes, *, ends: bool) -> None:
        self._heard_at = self._relay.now
        if self._is_waiting and not data and not ends:
            return
        stream = self._stream
        if stream is not None:
            try:
                data = stream.take(data, ends=ends)
            except ValueError as error:
                if ends:
                    self._backend = None  # it is kept already
                self._cut(str(error))
                return
            if stream.fault and self._is_waiting and not data:
                self._failed_inside()
                return
        out = b""
        if self._is_waiting:
            if stream is not None and stream.splice is not None:
                self._relay.counts.continued(is_resampled=stream.splice.is_resampled)
            self._has_begun, self._is_waiting = True, False
            self._next("answer")
            self._relay.front.placement.first_token(self.id)
            out, self._head = self._head, b""
        if data:
            self._tail.append(data)
            self._num_pieces += data.count(DATA)
        if stream is not None and stream.fault:
            self.client.write(out + self._framed(data))
            self._failed_inside()
            return
        out += self._framed(data)
        if ends and self._is_chunked:
            out += END
        if out:
            self.client.write(out)
        if ends:
            self._finish()

    def _framed(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if data and self._is_chunked else data

    def _failed_inside(self) -> None:
        """The backend's engine failed, and its server lives to say so."""
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.abort()
        self._lost("its engine failed")

    def on_lost(self, reason: str) -> None:
        backend, self._backend = self._backend, None
        if backend is not None and not backend.is_fresh and self._may_be_unread:
            self._relay.front.tasks.spawn(self._connect(self._address, was_lost=True))
        else:
            self._lost(reason)

    def _lost(self, reason: str) -> None:
        if self._is_waiting:
            self._failed(reason, died=True)
        else:
            self._broke(reason)

    @property
    def _may_be_unread(self) -> bool:
        """Whether the backend may have ended a kept connection while the request was on its way."""
        return self._is_waiting and not self._head and self._relay.now < self._heard_at + RACE_S

    # From the client and the clock

    def pause(self, wanted: bool) -> None:
        """The client can't take more for now, or can again."""
        if self._backend is not None:
            self._backend.pause(wanted)

    def abandon(self) -> None:
        """The client is gone: so is the request, at the backend too."""
        if not self._is_over:
            self._end("client_gone")

    def sweep(self) -> None:
        """Look whether the backend has been silent for too long."""
        relay = self._relay
        if relay.now > self._heard_at + relay.silence_s and self._backend is not None:
            backend, self._backend = self._backend, None
            backend.abort()
            reason = f"{self._address} has sent nothing for {relay.silence_s:g} s"
            if self._has_begun:
                self._broke(reason)
            else:
                self._refuse(Refusal(504, "backend_silent", reason, RETRY_AFTER_S))
        elif relay.now > self._touched_at + TOUCH_S:
            self._touched_at = relay.now
            relay.front.router.touch(self.id)

    # Ends

    def _may_retry(self) -> bool:
        front, prompt = self._relay.front, self._prompt
        if prompt is None or len(self._tried) >= self._relay.retries:
            return False
        ready = {view.worker for view in front.router.workers()}
        served = front.pods.served.of(prompt.model)
        return bool(
            (ready if served is None else ready & {*served}) - {*self._tried, self._address}
        )

    def _failed(self, reason: str, *, died: bool = False) -> None:
        """Nothing of an answer, or of its rest, has come: try another backend.

        `died`: with this request on it. After the second one it is not sent to a third.
        """
        failure = f"backend {self._address}: {reason}"
        log.warning("%s", failure)
        if self._trace is not None:
            self._trace.failed("backend_failed", then="failover")
        self._relay.front.placement.free(self.id)
        self._head = b""
        self._num_died += died
        if len(self._tried) >= self._relay.retries:
            self._refuse(Refusal(502, "backend_failed", failure, RETRY_AFTER_S))
            return
        if died and self._num_died >= MOST_DEATHS:
            self._refuse(Refusal.of(PoisonRequest(self._num_died, failure)))
            return
        self._tried.append(self._address)
        if not self._has_begun:
            self._relay.counts.retried()
        self._place(failure)

    def _broke(self, reason: str) -> None:
        """The answer can't go on from this backend."""
        self._num_died += 1
        if self._trace is not None:
            self._trace.failed("backend_lost", then="failover")
        kept = None if self._stream is None else self._stream.lost()
        if kept is None or len(self._tried) >= self._relay.retries:
            self._cut(reason)
        else:
            self._relay.front.tasks.spawn(self._resume(reason, kept))

    async def _resume(self, reason: str, kept: bytes) -> None:
        """Have the rest from another backend, if that can be."""
        front, request, headers = self._relay.front, self.request, self._headers()
        try:
            found = await asyncio.to_thread(
                continuation, self._path, request.body, kept, front.encoded
            )
            if self._is_over:
                return
            if isinstance(found, str):
                if found:
                    self._cut(f"{reason}; {found}")
                else:
                    self._end_whole(has_done=kept.endswith(DONE + GAP))
                return
            self._prompt = await front.read_aside(headers, found.body)
            if self._is_over:
                return
        except Exception:  # event pump: as above
            log.exception("an answer could not go on")
            if not self._is_over:
                self._cut(reason)
            return
        assert self._stream is not None
        self._stream.splice = found.splice
        self._message = request.with_body(found.body).message()
        self._failed(reason)

    def _end_whole(self, *, has_done: bool) -> None:
        """Its backend was lost after its last token."""
        assert self._stream is not None
        self._stream.forget()
        self._is_waiting, self._stream = False, None
        self.on_body(b"" if has_done else b"data: %b\n\n" % DONE, ends=True)

    def _cut(self, reason: str) -> None:
        """The client must see that the answer is not whole."""
        log.warning("backend %s: an answer broke: %s", self._address, reason)
        if self._stream is not None and self._has_begun:
            self.client.write(self._framed(self._stream.fault))
        self._end("cut")
        self.client.cut(is_framed=self._is_framed)

    def _refuse(self, refusal: Refusal) -> None:
        if self._has_begun:
            self._cut(refusal.message)
            return
        self.status = refusal.status
        self._end("refused")
        self.client.refuse(refusal)

    def _finish(self) -> None:
        self._backend = None  # it is kept already
        cached = cached_tokens(self._last_nbytes)
        if cached is not None:
            self._relay.front.placement.observe_hit(self.id, cached)
        self._end("answered")
        self.client.finished(keeps=self._keeps)

    @property
    def _last_nbytes(self) -> bytes:
        return b"".join(self._tail)[-TAIL_NBYTES:]

    def _end(self, how: End) -> None:
        self._is_over = True
        self._relay.counts.ended(how)
        if self.request.visit is not UNLIMITED:
            self.request.visit.charge(drawn_tokens(self._last_nbytes) or self._num_pieces)
            self._visit.close()
        if self._trace is not None:
            self._trace.end(self.status, how)
        if self._stream is not None:
            self._stream.forget()
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.abort()
        if not self._stays_booked:
            self._relay.front.placement.free(self.id)
