"""KV transfers over sockets: bytes, refusals, bounds, ends. X6, part."""

import asyncio
import random
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import uvloop

from mallee.actors.kv_transfer import messages as m
from mallee.actors.kv_transfer.client import KvClient
from mallee.actors.kv_transfer.messages import KvTimes
from mallee.actors.kv_transfer.server import KvServer
from mallee.protocol.codec import encode
from mallee.protocol.errors import (
    CodecError,
    ConfigError,
    CorruptLoan,
    IncompatibleCapsule,
    MalleeError,
    StorageError,
    Unavailable,
    UnknownCapsule,
    WorkerLost,
)
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import Cancel, Frame
from mallee.protocol.parcels import Report
from mallee.runtime.transport import stream as stream_module
from mallee.runtime.transport.greeting import KV, DialerGreeting, ListenerGreeting, Secret
from mallee.runtime.transport.link import Transport
from mallee.runtime.transport.listener import Listener
from mallee.runtime.transport.server import CommandServer, Sink
from mallee.runtime.transport.stream import Stream
from mallee.runtime.transport.tls import client_tls, server_tls
from mallee.runtime.transport.wire import GREETING, HEAD, REFUSED, read_refusal
from mallee.worker.transfer.values import Loan
from support.certificates import certificate
from support.kv_blocks import (
    CAPSULE,
    NBYTES,
    RECORD,
    At,
    Between,
    MadeLender,
    as_it_is,
    ask,
    block,
    nothing_left,
)

pytestmark = pytest.mark.real_time  # its threads block

SECRET = Secret(b"the secret of this app")
# For what has to end with an error: a busy machine may take longer for what succeeds.
SHORT = KvTimes(0.3, 0.3, 0.3, 0.3, 0.3)


uvloop.new_event_loop().close()  # the first one opens files that stay


class Place:
    """A server in a loop of its own, and a client."""

    def __init__(
        self, folder: Path, *, tls: Any = None, client_tls: Any = None, tcp: bool = False,
        nbytes: int = NBYTES, times: KvTimes | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.lender = MadeLender(nbytes)
        self.loop = uvloop.new_event_loop()  # as in Ray's workers
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.server = KvServer(self.lender, SECRET, times=times, **options)
        commands = CommandServer(Echo(), SECRET)
        self.listener = Listener(self.server, commands, node="n0", tls=tls)
        self.path = folder / "kv.sock"
        listen = self.listener.listen_tcp("127.0.0.1") if tcp else None
        self.run(listen or self.listener.listen_unix(str(self.path)))
        self.address = str(self.listener.address)
        self.client = KvClient("w1", SECRET, node="n0", tls=client_tls, times=times)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Do it in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(10)

    def lend(self, keys: Sequence[int], capsule: str = "", address: str | None = None) -> Loan:
        return self.client.lend(ask(self.address if address is None else address, keys, capsule))

    def close(self) -> None:
        self.client.close()
        for _ in range(2):
            self.run(self.listener.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5)
        self.loop.close()


@contextmanager
def place(folder: Path, **options: Any) -> Iterator[Place]:
    with nothing_left():
        made = Place(folder, **options)
        try:
            yield made
            assert made.listener.tasks.failure is None
        finally:
            made.close()
        assert not made.lender.open
        assert not made.server.sessions
        assert made.server.counts.use.num_open == made.client.counts.use.num_open == 0
        assert not made.path.exists()


def soon(is_so: Callable[[], bool], limit_s: float = 5.0) -> None:
    end = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end, "it did not come so far"
        time.sleep(0.002)


def read(loan: Loan, places: Sequence[int]) -> list[np.ndarray[Any, Any]]:
    rows = np.zeros((len(places), loan.block_nbytes), np.uint8)
    loan.read(places, rows)
    return list(rows)


def check(loan: Loan, keys: Sequence[int]) -> None:
    """Read all of `loan`, whose blocks are those of `keys`, in two ways."""
    assert (loan.num_blocks, loan.block_nbytes) == (len(keys), NBYTES)
    odd = range(1, len(keys), 2)
    for place, row in zip(odd, read(loan, odd), strict=True):
        assert (row == block(keys[place])).all()
    for i in range(0, len(keys), 7):
        part = range(len(keys))[i : i + 7]
        for place, row in zip(part, read(loan, part), strict=True):
            assert (row == block(keys[place])).all()


def test_blocks_cross_whole(tmp_path: Path) -> None:
    with place(tmp_path) as p:
        keys = list(range(100, 300, 2))
        for _ in range(3):
            loan = p.lend([*keys, 2000])
            assert loan.record == b""
            check(loan, keys)
            loan.close()
            loan.close()
        held = p.lend((), CAPSULE)
        assert held.record == RECORD
        check(held, range(10))
        with pytest.raises(IncompatibleCapsule, match="block_nbytes was '1000' and is '3' here"):
            held.read([0], np.zeros((1, 3), np.uint8))
        held.close()
        empty = p.lend([2000])
        assert empty.num_blocks == 0
        empty.read((), ())
        empty.close()
        soon(lambda: not p.server.sessions)
        received, sent = p.client.counts.use, p.server.counts.use
        for use in (received, sent):
            assert (use.num_granted, use.num_failed, use.num_refused) == (5, 0, 0)
        assert received.nbytes == sent.nbytes == (3 * 150 + 15) * NBYTES
        assert received.seconds > 0 < sent.seconds
    with place(tmp_path, nbytes=m.CHUNK_NBYTES + 1) as p:  # in pieces
        loan = p.lend(range(3))
        rows = read(loan, range(3))
        assert all((row == block(i, len(row))).all() for i, row in enumerate(rows))
        loan.close()


@pytest.mark.parametrize(
    ("server", "client", "is_served"),
    [
        (None, None, True), ("ours", "ours", True),
        ("ours", "others", False), ("ours", None, False), (None, "ours", False),
    ],
)  # fmt: skip
def test_blocks_cross_tcp_with_and_without_tls(
    tmp_path: Path, server: str | None, client: str | None, is_served: bool
) -> None:
    """And a client with another certificate, or without one, gets nothing."""
    files = {name: certificate(tmp_path, name) for name in ("ours", "others")}
    with place(
        tmp_path,
        tcp=True,
        tls=server and server_tls(files[server]),
        client_tls=client and client_tls(files[client]),
        times=None if is_served else SHORT,
    ) as p:
        if is_served:
            loan = p.lend(range(200))
            check(loan, range(200))
            loan.close()
            soon(lambda: not p.server.sessions)
            assert p.server.counts.use.num_failed == p.client.counts.use.num_failed == 0
        else:
            with pytest.raises((WorkerLost, CodecError)):
                p.lend(range(200))


def test_a_refusal_has_the_servers_error(tmp_path: Path) -> None:
    with place(tmp_path) as p:
        with pytest.raises(UnknownCapsule, match="'gone' is not held"):
            p.lend((), "gone")
        with pytest.raises(IncompatibleCapsule, match="model was 'a model' and is 'another'"):
            p.client.lend(ask(p.address, range(3), identity="another"))
        with pytest.raises(ConfigError, match="own node alone"):
            p.lend([1], address=p.address.replace("n0", "n7"))
        check_one(p)
        for use in (p.server.counts.use, p.client.counts.use):
            assert (use.num_refused, use.num_granted, use.num_failed) == (2, 1, 0)


def test_an_error_while_blocks_are_read_ends_the_transfer_and_tells_why(tmp_path: Path) -> None:
    def fail() -> None:
        raise StorageError("the disk is gone")

    with place(tmp_path) as p:
        loan = p.lend(range(3))
        p.lender.before_read = fail
        with pytest.raises(StorageError, match="the disk is gone"):
            read(loan, [0])
        soon(lambda: not p.lender.open)
        with pytest.raises(WorkerLost, match="the KV transfer is over"):
            read(loan, [1])
        loan.close()


@contextmanager
def scripted(folder: Path, said: list[Any]) -> Iterator[str]:
    """A server that accepts one connection, and answers its question with messages, or a bare head."""
    path = folder / "false.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def run() -> None:
        with suppress(OSError):
            sock, _ = listener.accept()
            stream = Stream(sock, 5.0)
            with suppress(OSError):
                assert sock.recv(1) == KV.first
                greeting = ListenerGreeting(SECRET, KV)
                stream.send(GREETING, greeting.challenge())
                _, welcome = greeting.take(stream.receive(5.0, 1000)[1])
                stream.send(GREETING, welcome)
                stream.receive(5.0, 10_000)  # the question
                say(stream, said)
                stream.receive_head(5.0)
            stream.close()

    thread = threading.Thread(target=run)
    thread.start()
    yield f"node=n0;unix:{path}"
    thread.join(5)
    assert not thread.is_alive()
    listener.close()
    path.unlink()


def say(stream: Stream, said: list[Any]) -> None:
    for each in said:
        if isinstance(each, bytes):
            stream._sock.sendall(each)
        elif each == ("ask",):
            stream.send(m.ASK, msgspec.msgpack.encode(ask("", range(4))))
            assert stream.receive(5.0, 1000)[0] == m.GRANTED
        else:
            stream.send(*each)


def granted(record: bytes, num_blocks: int, nbytes: int) -> bytes:
    checksum = m.checksum(record, max(0, num_blocks))
    return msgspec.msgpack.encode((record, num_blocks, nbytes, checksum))


def blocks(num: int, size: int) -> tuple[int, bytes, bytes]:
    return m.BLOCKS, bytes(8 * num), bytes(size)


FOUR = m.GRANTED, granted(b"", 4, NBYTES)
DUE = "4 blocks of 1000 bytes are due"


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ([(m.GRANTED, granted(b"", 1 << 19, NBYTES))], "<= 262144"),
        ([(m.GRANTED, granted(b"", -1, NBYTES))], ">= 0"),
        ([(m.GRANTED, granted(b"", 4, 1 << 30))], "<= 67108864"),
        ([(m.GRANTED, granted(b"", 4, 0))], "without bytes"),
        ([(m.GRANTED, granted(b"", 5, NBYTES))], "5 blocks were granted, and 4 asked for"),
        ([(m.GRANTED, b"\xff")], "not a grant"),
        ([(m.GRANTED, msgspec.msgpack.encode((b"r", 1, 1, 1)))], "not what was sent"),
        ([(m.READ, b"")], "kind 18 and 0 bytes where blocks are due"),
        ([(REFUSED, b"\xff")], "not a refusal"),
        ([FOUR, blocks(5, 5 * NBYTES)], DUE),
        ([FOUR, blocks(0, 0)], DUE),
        ([FOUR, blocks(1, NBYTES - 1)], DUE),
        ([FOUR, (m.GRANTED, b"")], DUE),
        ([FOUR, blocks(1, NBYTES)], "block 0 that worker w0 lent is not"),
        ([HEAD.pack(m.MAX_RECORD_NBYTES + 5000, m.GRANTED)], "at most"),
    ],
)
def test_a_server_that_says_what_it_may_not_is_a_named_error(
    tmp_path: Path, said: list[Any], error: str
) -> None:
    with nothing_left(), scripted(tmp_path, said) as address:
        client = KvClient("w1", SECRET, node="n0")
        with pytest.raises((CodecError, CorruptLoan), match=error):
            read(client.lend(ask(address, range(4))), range(4))
        client.close()
        assert client.counts.use.num_failed == 1


def by_hand(p: Place) -> Stream:
    """A connection to the server whose greeting was right."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(p.path))
    sock.sendall(KV.first)
    stream = Stream(sock, 5.0)
    greeting = DialerGreeting(SECRET, "by hand", KV)
    answer = greeting.take(stream.receive(5.0, 1000)[1])
    assert answer is not None
    stream.send(GREETING, answer)
    assert greeting.take(stream.receive(5.0, 1000)[1]) is None
    return stream


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ([(m.READ, b"")], "kind 18 where a question is due"),
        ([(m.ASK, b"\xff")], "not a question for blocks"),
        ([(m.ASK, msgspec.msgpack.encode((("w0", 1, "", 0), (-1,), "")))], ">= 0"),
        ([("ask",), (m.ASK, b"")], "kind 16 within a transfer"),
        ([("ask",), (m.READ, b"123")], "3 bytes of places of 4"),
        ([("ask",), (m.READ, m.pack_places([1, 1]))], "don't rise"),
        ([("ask",), (m.READ, m.pack_places([3, 2]))], "don't rise"),
        ([("ask",), (m.READ, m.pack_places([4]))], "not among the 4 granted"),
        ([HEAD.pack(m.MAX_ASK_NBYTES + 1, m.ASK)], "at most"),
    ],
)
def test_a_client_that_says_what_it_may_not_is_told_so_and_closed(
    tmp_path: Path, said: list[Any], error: str
) -> None:
    with place(tmp_path) as p:
        stream = by_hand(p)
        say(stream, said)
        kind, raw = stream.receive(5.0, 10_000)
        refusal = read_refusal(raw)
        assert kind == REFUSED
        assert isinstance(refusal, CodecError)
        assert error in str(refusal)
        with pytest.raises(ConnectionError):
            stream.receive_head(5.0)
        stream.close()
        soon(lambda: not p.server.sessions)


def attempt(p: Place, address: str) -> str | None:
    """Read ten blocks; None if they are right, else the type of the error."""
    try:
        loan = p.lend((), CAPSULE, address)
    except MalleeError as error:
        return type(error).__name__
    try:
        assert loan.record == RECORD
        for i in (0, 5):
            for place_, row in enumerate(read(loan, range(i, i + 5)), start=i):
                assert (row == block(place_)).all()
    except MalleeError as error:
        return type(error).__name__
    finally:
        loan.close()
    return None


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("is_down", [False, True])
def test_a_byte_that_flips_and_a_cut_anywhere_is_an_error_with_a_name(
    tmp_path: Path, is_cut: bool, is_down: bool
) -> None:
    """At random places of the talk, in both directions: no wrong byte of a block is ever taken."""
    rng = random.Random(7)
    total = 10_400 if is_down else 330
    found = set()
    with place(tmp_path, times=SHORT) as p:
        for i, offset in enumerate(rng.randrange(total) for _ in range(25)):
            at = At(offset, is_cut=is_cut)
            ways: tuple[Any, Any] = (as_it_is, at) if is_down else (at, as_it_is)
            between = Between(tmp_path / f"b{i}.sock", str(p.path), *ways)
            outcome = attempt(p, between.address)
            between.close()
            assert outcome is not None or not at.is_done or not is_down
            found.add(outcome)
            soon(lambda: not p.lender.open)
        soon(lambda: attempt(p, p.address) is None)
    assert not found - {
        *("WorkerLost", "CorruptLoan", "CodecError", "ConfigError", "UnknownCapsule"),
        *("IncompatibleCapsule", "InternalError", None),
    }
    assert "CorruptLoan" in found or is_cut or not is_down


@pytest.mark.parametrize("is_down", [False, True])
def test_an_end_that_falls_silent_is_not_waited_for(tmp_path: Path, is_down: bool) -> None:
    """At some places of the talk: both ends are free after the times that they give each other."""

    def silence(at: At, data: bytes) -> bytes:
        at(data)
        return b"" if at.is_done else data

    with place(tmp_path, times=SHORT) as p:
        for i, offset in enumerate((3, 60, 200, 5000)):
            quiet = partial(silence, At(offset, is_cut=False))
            ways: tuple[Any, Any] = (as_it_is, quiet) if is_down else (quiet, as_it_is)
            between = Between(tmp_path / f"b{i}.sock", str(p.path), *ways)
            if is_down or offset < 300:
                assert attempt(p, between.address) == "WorkerLost"
            soon(lambda: not (p.lender.open or p.server.sessions))
            between.close()


def test_a_client_that_does_not_read_fills_no_memory_and_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "SLOW_NBYTES_S", 1 << 30)
    times = KvTimes(message_s=0.3, unread_s=0.3)
    with place(tmp_path, nbytes=1 << 20, times=times) as p:
        reads = 0

        def note() -> None:
            nonlocal reads
            reads += 1

        p.lender.before_read = note
        loan = p.lend(range(300))
        loan._stream.send(m.READ, m.pack_places(range(300)))  # type: ignore[attr-defined]
        soon(lambda: not (p.lender.open or p.server.sessions))
        assert reads < 20
        loan.close()
        loan = p.lend(range(5))  # of which nothing is asked for
        soon(lambda: not p.lender.open)
        with pytest.raises(WorkerLost, match="broke"):
            read(loan, [0])
        loan.close()


class Echo:
    """A host that answers each batch with a frame."""

    def open(self, gateway: str, sink: Sink) -> "Echo":
        self.sink = sink
        return self

    def submit(self, raw: bytes) -> None:
        self.sink.send(encode([Report("w0", 1, Frame(7, ()))]))

    def resume(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("is_safe", [False, True])
def test_commands_and_kv_share_a_port(tmp_path: Path, is_safe: bool) -> None:
    """With TLS too, of which the two have one each; a link goes on beside a transfer."""
    files = certificate(tmp_path, "ours")
    safe = client_tls(files) if is_safe else None

    async def ask_host(address: str) -> tuple[Frame, list[str]]:
        frames, lost = asyncio.Queue[Frame](), list[str]()
        transport = Transport("g0", SECRET, tls=safe)
        link = transport.link(
            WorkerId("w0"), Incarnation(1), address, frames.put_nowait, lost.append
        )
        link.send(Cancel("a"))
        async with asyncio.timeout(5):
            frame = await frames.get()
        await link.close()
        return frame, lost

    tls = server_tls(files) if is_safe else None
    with place(tmp_path, tcp=True, tls=tls, client_tls=safe) as p:
        loan = p.lend(range(3))
        assert p.run(ask_host(p.address)) == (Frame(7, ()), [])
        check(loan, range(3))
        loan.close()


def check_one(p: Place) -> None:
    loan = p.lend([5])
    check(loan, [5])
    loan.close()


def test_beyond_a_bound_transfers_are_refused(tmp_path: Path) -> None:
    with place(tmp_path, max_connections=2) as p:
        held = [p.lend([1]), p.lend([2])]
        with pytest.raises(Unavailable, match="2 KV transfers are open"):
            p.lend([3])
        for loan in held:
            loan.close()
        soon(lambda: not p.server.sessions)
        check_one(p)


def test_a_transfer_may_be_closed_while_another_thread_reads(tmp_path: Path) -> None:
    with place(tmp_path) as p, ThreadPoolExecutor(1) as pool:
        gate = threading.Event()
        p.lender.before_read = lambda: gate.wait(5) and None
        loan = p.lend(range(3))
        reading = pool.submit(read, loan, range(3))
        soon(loan._turn.locked)  # type: ignore[attr-defined]
        loan.close()
        with pytest.raises(WorkerLost):
            reading.result(5)
        assert p.client.counts.use.num_open == 0
        gate.set()
        check_one(p)


def test_threads_that_read_one_transfer_take_turns(tmp_path: Path) -> None:
    with place(tmp_path) as p, ThreadPoolExecutor(4) as pool:
        loan = p.lend(range(200))
        rows = pool.map(lambda i: read(loan, [i])[0], range(200))
        assert all((row == block(i)).all() for i, row in enumerate(rows))
        loan.close()
        assert p.client.counts.use.nbytes == 200 * NBYTES


def test_a_question_under_way_ends_when_the_client_closes(tmp_path: Path) -> None:
    with place(tmp_path) as p, ThreadPoolExecutor(1) as pool:
        asked, gate = threading.Event(), threading.Event()
        p.lender.before_loan = lambda: asked.set() or (gate.wait(5) and None)
        asking = pool.submit(p.lend, [1])
        assert asked.wait(5)
        p.client.close()
        with pytest.raises(WorkerLost):
            asking.result(1)
        gate.set()


def test_both_ends_close_in_the_midst_of_transfers(tmp_path: Path) -> None:
    for client_closes in (False, True):
        with place(tmp_path) as p:
            loan = p.lend(range(3))
            p.client.close() if client_closes else p.run(p.listener.close())
            soon(lambda: not p.lender.open)
            with pytest.raises(WorkerLost):
                read(loan, range(3))
            loan.close()
            with pytest.raises(Unavailable):
                p.lend([1])


def test_a_thread_that_fails_by_a_bug_is_a_failure_of_its_listener(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    with nothing_left():
        p = Place(tmp_path)
        p.lender.before_loan = fail
        with pytest.raises(WorkerLost):
            p.lend([1])
        soon(lambda: isinstance(p.listener.tasks.failure, RuntimeError))
        p.close()


def test_blocks_that_were_sent_ahead_in_vain_are_passed_over(tmp_path: Path) -> None:
    """Whole chunks in a row are sent ahead; reading elsewhere, or no more, is as right as ever."""
    with place(tmp_path) as p:
        for parts in (
            [range(i, min(i + 16, 100)) for i in range(0, 100, 16)],
            [range(16), range(40, 56), range(56, 72), range(3, 5), range(72, 88), [1, 9]],
            [range(84, 100), range(84, 100)],
            [range(16)],
        ):
            loan = p.lend(range(200, 300))
            for part in parts:
                for at, row in zip(part, read(loan, part), strict=True):
                    assert (row == block(200 + at)).all()
            loan.close()
        soon(lambda: not p.lender.open)
        check_one(p)
