"""A POST that is sent again under its `Idempotency-Key` gets the answer of the first, and runs once.

The gateway that runs it says so in the store, before it begins: so one runs it, whichever the others come to.
While it runs, others join it there, or wait for its answer elsewhere; afterwards they get what was sent, byte
for byte. Of a gateway that is gone another runs it again. Refusals and failures, also those of streams that
have begun, are not kept: the request is sent again to be run.

The app's answer goes into a record, from which every client reads at its own speed. A request whose last
client has gone is cancelled, as one without a key is: at once if it has sent nothing, a stream after
GRACE_S, so that its client can come back to it.
"""

import asyncio
import logging
from collections.abc import Callable, MutableMapping
from typing import Any, Final, NamedTuple

import msgspec
import xxhash
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mallee.api.entry.middleware import KEY_HEADER, caller_of, header, read_body
from mallee.api.errors import CLIENT_GONE, AnswerNotKept, ClientGone, KeyReused
from mallee.api.sse import MAX_WRITE_S, Writer, unless_gone
from mallee.gateway.peers import Peers
from mallee.gateway.store.store import Store
from mallee.protocol.errors import InvalidParameter, Unavailable
from mallee.protocol.ids import Scope as Owner

_KEY: Final = KEY_HEADER.decode()
MAX_KEY: Final = 255  # characters
REPLAYED: Final = (b"idempotent-replayed", b"true")
GRACE_S: Final = 5.0  # in which the reader of a stream comes back
_SHARE: Final = 8  # of the memory for all records: one has at most an eighth
_MESSAGE_NBYTES: Final = 256  # of a message beside its body and headers
_KIND: Final = "answer"
_WAIT_S: Final = 2.5  # for which a question for the end of a run waits there
# The last event of a stream that ended by an error: Responses', Anthropic's, and all others'.
_FAILURES: Final = (b"event: response.failed", b"event: error", b'data: {"error"')
_FILES: Final = "/v1/capsules/import"  # its body is a file, of any length

_log = logging.getLogger(__name__)


class _Name(NamedTuple):
    """A key in its scope, of a caller who may see workers or not."""

    scope: Owner
    key: str


class _Kept(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a request, which `gateway` runs. Without a `status` it does so now."""

    request: bytes
    gateway: str
    status: int = 0
    headers: list[tuple[bytes, bytes]] = []
    body: bytes = b""
    path: str = ""


class _Route(NamedTuple):
    """Of an answer that was made elsewhere."""

    path: str


class _Record:
    """The answer of one run as far as it is written. Belongs to one event loop."""

    def __init__(self, request: bytes, scope: Scope, max_nbytes: int) -> None:
        self.request = request  # a digest of its path and body
        self.scope = scope
        self.nbytes = 0
        self.is_over = False
        self.renewal: asyncio.TimerHandle | None = None  # of its claim; None: it runs elsewhere
        self._is_complete = False  # the app may still be tidying up
        self.is_whole = True  # False: it is too large to be kept, and its beginning is gone
        self._max_nbytes = max_nbytes
        self._messages: list[Message] = []
        self._first = 0  # number of the first of them
        self._status = 0
        self._error: Exception | None = None
        self._positions: dict[object, int] = {}  # of readers: the number of their next message
        self._changed = asyncio.Event()  # replaced at each change
        self._is_left = asyncio.Event()  # by every reader
        self._grace: asyncio.TimerHandle | None = None

    @property
    def is_given_up(self) -> bool:
        """Whether its run is cancelled, though it may not be over: it has no answer for anybody."""
        return self._is_left.is_set()

    def kept(self, gateway: str) -> _Kept | None:
        """The answer as it can be given again; None: there is none to give."""
        is_right = self._is_complete and self.is_whole and self._error is None
        if not (is_right and 200 <= self._status < 300):
            return None
        head, *bodies = self._messages
        body = b"".join(each.get("body", b"") for each in bodies)
        if body.rstrip().rpartition(b"\n\n")[2].startswith(_FAILURES):
            return None
        return _Kept(
            request=self.request,
            gateway=gateway,
            status=self._status,
            headers=list(head["headers"]),
            body=body,
            path=getattr(self.scope.get("route"), "path", ""),
        )

    def replay(self, kept: _Kept) -> None:
        """Take an answer that was made before, or elsewhere."""
        self.scope["route"] = _Route(kept.path)
        headers = [*kept.headers, REPLAYED]
        head = {"type": "http.response.start", "status": kept.status, "headers": headers}
        self._messages += [head, {"type": "http.response.body", "body": kept.body}]
        self._tell()

    async def ended(self) -> None:
        """Return when it is over."""
        while not self.is_over:
            await self._changed.wait()

    async def put(self, message: Message) -> None:
        """Take what the app sends. Returns at once, unless a long answer has to wait for its readers."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
        self._messages.append(message)
        self._is_complete = _is_last(message)
        self.nbytes += _nbytes(message)
        self.is_whole = self.is_whole and self.nbytes <= self._max_nbytes
        self._tell()
        while not self.is_whole and self._drop() > self._max_nbytes and self._positions:
            await self._changed.wait()

    def end(self, error: Exception | None = None) -> None:
        self.is_over, self._error = True, error
        self._tell()

    async def left(self) -> Message:
        """Return when its client is gone: all of them."""
        await self._is_left.wait()
        return {"type": "http.disconnect"}

    def join(self, reader: object) -> None:
        self._positions[reader] = 0
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def stay(self) -> None:
        """Go on for a while if nobody reads it: one who has come back waits at another gateway."""
        if self._grace is not None:
            self._grace.cancel()
            self._grace = asyncio.get_running_loop().call_later(GRACE_S, self._is_left.set)

    def leave(self, reader: object) -> None:
        """One reads no more."""
        del self._positions[reader]
        self._tell()
        if self._positions or self.is_over or self._is_complete:
            return
        if self._status and self.is_whole:
            self._grace = asyncio.get_running_loop().call_later(GRACE_S, self._is_left.set)
        else:
            self._is_left.set()

    async def read(self, reader: object) -> list[Message]:
        """The messages that the reader has not read yet, once there are some; none at the end.

        Raises the error with which the app failed.
        """
        while True:
            position = self._positions[reader]
            found = self._messages[position - self._first :]
            if found:
                self._positions[reader] = position + len(found)
                self._tell()
                return found
            if self.is_over:
                if self._error is not None:
                    raise self._error
                return []
            await self._changed.wait()

    def _drop(self) -> int:
        """Forget what every reader has read; the bytes that are left."""
        done = min(self._positions.values(), default=self._first) - self._first
        gone = sum(map(_nbytes, self._messages[:done]))
        del self._messages[:done]
        self._first += done
        self.nbytes -= gone
        return self.nbytes

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class IdempotencyMiddleware:
    """ASGI middleware of the requests with a key, inside of the one that finds the caller.

    Answers are kept for `ttl_s`, and in `max_nbytes` of the store all together: the oldest go first.
    `owner(tenant, salt)` is the scope of a caller; `salt_header` names the header with the salt.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        store: Store,
        peers: Peers,
        owner: Callable[[str, str], Owner],
        ttl_s: float,
        max_nbytes: int,
        max_body_bytes: int,
        salt_header: str,
    ) -> None:
        self._app = app
        self._peers = peers
        self._owner = owner
        self._kept = store.bucket("answers", _Kept, version=1, ttl_s=ttl_s, max_nbytes=max_nbytes)
        self._ttl_s = ttl_s
        self._max_nbytes = max_nbytes // _SHARE
        self._max_body_bytes = max_body_bytes
        self._salt_header = salt_header
        self._records: dict[_Name, _Record] = {}  # those that run
        peers.share(_KIND, self._answer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises MalleeError, and what the app raises."""
        request = Request(scope, receive)
        name = self._name(request)
        try:
            body = await read_body(request, self._max_body_bytes)
        except ClientGone:
            await Response(status_code=CLIENT_GONE)(scope, receive, send)
            return
        digest = _digest(scope, body)
        record = self._records.get(name)
        if record is None or record.is_given_up:
            await self._run(name, digest, body, scope, receive, send)
            return
        if record.request != digest:
            raise KeyReused(_shown(name))
        if not record.is_whole:
            raise AnswerNotKept(_shown(name))
        await _Reader(record, is_first=False).follow(scope, receive, send)

    def _name(self, request: Request) -> _Name:
        """Raises InvalidParameter."""
        key = header(request.scope, _KEY) or ""
        if not (0 < len(key) <= MAX_KEY and key.isascii() and key.isprintable()):
            raise InvalidParameter(_KEY, key, f"give 1 to {MAX_KEY} printable characters")
        if request.url.path == _FILES:
            raise InvalidParameter(_KEY, key, "an import of a file takes no key: leave it out")
        caller = caller_of(request)
        owner = self._owner(caller.tenant, header(request.scope, self._salt_header) or "")
        return _Name(owner, f"{'o' if caller.is_operator else 'c'}{key}")

    async def _run(
        self, name: _Name, digest: bytes, body: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Run the app in this call, which lasts until the run ends, though its client may go before.

        Or have the answer of another run.
        """
        record = self._records[name] = _Record(digest, scope, self._max_nbytes)
        bodies: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def received() -> Message:
            return bodies.pop() if bodies else await record.left()

        reader = _Reader(record, is_first=True)
        reading = asyncio.ensure_future(reader.follow(scope, receive, send))
        try:
            kept = await unless_gone(record.left, self._claim(name, digest))
            if kept is None:
                self._renew_later(name, record)
                await self._app(scope, received, record.put)
            else:
                record.replay(kept)
        except asyncio.CancelledError:
            record.end(Unavailable("the request was given up; send it again"))
            reading.cancel()
            await asyncio.wait([reading])
            raise
        except Exception as error:
            record.end(error)
        else:
            record.end()
        finally:
            self._ended(name, record)
        await reading

    async def _claim(self, name: _Name, digest: bytes) -> _Kept | None:
        """The answer that is kept; None: this gateway is to run it, and has said so.

        Waits for a run elsewhere. Raises KeyReused, StoreAway, PeerSilent.
        """
        ours = _Kept(digest, self._peers.gateway)
        while True:
            entry = await self._kept.get(name.scope, name.key)
            if entry is not None and entry.value.request != digest:
                raise KeyReused(_shown(name))
            if entry is not None and entry.value.status:
                return entry.value
            if entry is not None and await self._runs_elsewhere(entry.value.gateway, name):
                continue
            at = 0 if entry is None else entry.revision
            if await self._kept.put(name.scope, name.key, ours, at=at) is not None:
                return None

    def _renew_later(self, name: _Name, record: _Record) -> None:
        """Have the claim of a run last as long as that does."""
        after_s, loop = self._ttl_s / 2, asyncio.get_running_loop()
        record.renewal = loop.call_later(after_s, self._renew, name, record)

    def _renew(self, name: _Name, record: _Record) -> None:
        if self._records.get(name) is record:
            self._kept.put_soon(*name, _Kept(record.request, self._peers.gateway))
            self._renew_later(name, record)

    async def _runs_elsewhere(self, gateway: str, name: _Name) -> bool:
        """Whether it ran at another gateway until now, or still does; waits for its end."""
        if gateway == self._peers.gateway:
            return False
        wait_s = 2 * _WAIT_S
        return bool(await self._peers.ask(gateway, _KIND, name.key, name.scope, wait_s=wait_s))

    async def _answer(self, key: str, owner: Owner, _: bytes) -> bytes | None:
        """Tell another gateway that a run of ours has ended, or goes on after a while."""
        record = self._records.get(_Name(owner, key))
        if record is not None:
            record.stay()
            try:
                async with asyncio.timeout(_WAIT_S):
                    await record.ended()
            except TimeoutError:
                return b"runs"
        is_told = await self._kept.settled(owner, key, 0.0)
        await self._kept.settled(owner, key, _WAIT_S)
        return b"ran" if record is not None or not is_told else None

    def _ended(self, name: _Name, record: _Record) -> None:
        if record.renewal is not None:
            record.renewal.cancel()
        if self._records.get(name) is not record:
            return  # it was given up, and the request came again
        del self._records[name]
        if record.renewal is None:
            return
        kept = record.kept(self._peers.gateway)
        if kept is None:
            self._kept.delete_soon(*name)
        else:
            self._kept.put_soon(*name, kept)


class _Reader:
    """One client of a record."""

    def __init__(self, record: _Record, *, is_first: bool) -> None:
        self._record = record
        self._is_first = is_first
        record.join(self)

    async def follow(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of the answer. Raises what the app raised."""
        try:
            await unless_gone(receive, self._send_all(scope, send))
        except TimeoutError:
            # The answer is not complete, so the server cuts the connection.
            _log.warning("a client took nothing of its answer for %g s", MAX_WRITE_S)
        except (ClientGone, OSError):
            return  # no reader is left
        finally:
            self._record.leave(self)

    async def _send_all(self, scope: MutableMapping[str, Any], send: Send) -> None:
        async with Writer(send) as writer:
            while messages := await self._record.read(self):
                for message in messages:
                    await writer.write(self._own(message, scope))
                    if _is_last(message):
                        return

    def _own(self, message: Message, scope: MutableMapping[str, Any]) -> Message:
        """The message for this client: what it did not begin is marked."""
        if self._is_first or message["type"] != "http.response.start":
            return message
        scope["route"] = self._record.scope.get("route")  # answers are counted by it
        headers = message["headers"]
        return message if REPLAYED in headers else {**message, "headers": [*headers, REPLAYED]}


def _shown(name: _Name) -> str:
    """The key as the client gave it."""
    return name.key[1:]


def _is_last(message: Message) -> bool:
    return message["type"] == "http.response.body" and not message.get("more_body", False)


def _nbytes(message: Message) -> int:
    headers = sum(len(name) + len(value) for name, value in message.get("headers", ()))
    return _MESSAGE_NBYTES + headers + len(message.get("body", b""))


def _digest(scope: Scope, body: bytes) -> bytes:
    head = scope["path"].encode() + b"\0" + scope["query_string"] + b"\0"
    return xxhash.xxh3_128_digest(head + body)
