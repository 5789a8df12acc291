"""KV that is lent over sockets: bytes, refusals, bounds, ends. X6, part."""

import asyncio
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from mallee.actors.lending import borrower as borrower_module
from mallee.actors.lending import messages as m
from mallee.actors.lending import stream as stream_module
from mallee.actors.lending.borrower import Borrower
from mallee.actors.lending.server import LendingBounds, LendingServer
from mallee.actors.lending.stream import LendingTimes, Stream
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
from mallee.runtime.transport.greeting import (
    LENDING,
    LINK,
    DialerGreeting,
    ListenerGreeting,
    Roles,
    Secret,
)
from mallee.runtime.transport.tls import client_tls, server_tls
from mallee.worker.transfer.peers import Loan
from support.certificates import certificate
from support.lent_blocks import (
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
SHORT = LendingTimes(0.3, 0.3, 0.3, 0.3, 0.3, 0.3)


class Place:
    """A lender that listens, and a borrower."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.lender = MadeLender(options.pop("nbytes", NBYTES))
        self.server = LendingServer(self.lender, SECRET, node="n0", **options)
        self.server.listen_unix(str(path))
        self.path = path
        self.borrower = Borrower("w1", SECRET, node="n0", times=options.get("times"))

    @property
    def address(self) -> str:
        return str(self.server.address)

    def lend(self, keys: Sequence[int], capsule: str = "", address: str | None = None) -> Loan:
        return self.borrower.lend(ask(self.address if address is None else address, keys, capsule))


@contextmanager
def place(folder: Path, **options: Any) -> Iterator[Place]:
    with nothing_left():
        made = Place(folder / "l.sock", **options)
        try:
            yield made
            assert made.server.failure is None
        finally:
            made.borrower.close()
            made.server.close()
            made.server.close()
        assert not made.lender.open
        assert made.server.num_connections == 0
        assert made.server.counts.use.num_open == made.borrower.counts.use.num_open == 0
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


def test_blocks_cross_whole_and_connections_are_used_again(tmp_path: Path) -> None:
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
        assert p.server.num_connections == 1
        borrowed, lent = p.borrower.counts.use, p.server.counts.use
        assert (borrowed.num_granted, borrowed.num_failed, borrowed.num_refused) == (5, 0, 0)
        assert borrowed.nbytes == lent.nbytes == (3 * 150 + 15) * NBYTES
        assert borrowed.seconds > 0 < lent.seconds
    with place(tmp_path, nbytes=m.CHUNK_NBYTES + 1) as p:  # in pieces
        loan = p.lend(range(3))
        rows = read(loan, range(3))
        assert all((row == block(i, len(row))).all() for i, row in enumerate(rows))
        loan.close()


def test_tcp_lends_with_and_without_tls(tmp_path: Path) -> None:
    """And a borrower with another certificate, or without one, gets nothing."""
    ours, others = certificate(tmp_path, "ours"), certificate(tmp_path, "others")
    with nothing_left():
        for server_side, client_side, is_served in (
            (None, None, True),
            (server_tls(ours), client_tls(ours), True),
            (server_tls(ours), client_tls(others), False),
            (server_tls(ours), client_tls(ours._replace(ca=others.ca)), False),
            (server_tls(ours), None, False),
            (None, client_tls(ours), False),
        ):
            lender, times = MadeLender(), None if is_served else SHORT
            server = LendingServer(lender, SECRET, node="n0", tls=server_side, times=times)
            server.listen_tcp("127.0.0.1")
            borrower = Borrower("w1", SECRET, node="n1", tls=client_side, times=times)
            asked = ask(str(server.address), range(200))
            if is_served:
                for _ in range(2):
                    loan = borrower.lend(asked)
                    check(loan, range(200))
                    loan.close()
                assert server.num_connections == 1
            else:
                with pytest.raises(WorkerLost):
                    borrower.lend(asked)
            borrower.close()
            server.close()
            assert not lender.open
            assert server.failure is None


def test_a_refusal_has_the_lenders_error_and_leaves_the_connection(tmp_path: Path) -> None:
    with place(tmp_path) as p:
        with pytest.raises(UnknownCapsule, match="'gone' is not held"):
            p.lend((), "gone")
        with pytest.raises(IncompatibleCapsule, match="model was 'a model' and is 'another'"):
            p.borrower.lend(ask(p.address, range(3), identity="another"))
        loan = p.lend([1])
        check(loan, [1])
        loan.close()
        assert p.server.num_connections == 1
        for counts in (p.server.counts.use, p.borrower.counts.use):
            assert (counts.num_refused, counts.num_granted, counts.num_failed) == (2, 1, 0)


def test_an_error_while_blocks_are_read_ends_the_loan_and_tells_why(tmp_path: Path) -> None:
    def fail() -> None:
        raise StorageError("the disk is gone")

    with place(tmp_path) as p:
        loan = p.lend(range(3))
        p.lender.before_read = fail
        with pytest.raises(StorageError, match="the disk is gone"):
            read(loan, [0])
        soon(lambda: not p.lender.open)
        with pytest.raises(WorkerLost, match="the loan is over"):
            read(loan, [1])
        loan.close()


def test_an_address_that_leads_nowhere_is_a_named_error(tmp_path: Path) -> None:
    with place(tmp_path) as p:
        with pytest.raises(CodecError, match="not an address"):
            p.lend([1], address="")
        with pytest.raises(ConfigError, match="own node alone"):
            p.lend([1], address=p.address.replace("n0", "n7"))
        with pytest.raises(WorkerLost, match="No such file"):
            p.lend([1], address=f"node=n0;unix:{tmp_path}/gone.sock")
        p.lend([1]).close()


@pytest.mark.parametrize(
    ("key", "roles", "reason"),
    [
        (b"the secret of another app", LENDING, "another secret"),
        (b"the secret of this app", LINK, "another secret"),  # the greeting of a gateway
    ],
)
def test_a_proof_of_another_app_or_kind_opens_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: bytes, roles: Roles, reason: str
) -> None:
    """At both ends; what proves a gateway to a host is no proof of a borrower."""
    with place(tmp_path) as p:
        monkeypatch.setattr(borrower_module, "LENDING", roles)
        stranger = Borrower("w2", Secret(key), node="n0")
        with pytest.raises(ConfigError, match=reason):
            stranger.lend(ask(p.address, [1]))
        stranger.close()
        monkeypatch.undo()
        soon(lambda: p.server.num_connections == 0)
        with (
            false_lender(tmp_path, Secret(key), roles) as address,
            pytest.raises(ConfigError, match="another secret"),
        ):
            p.lend([1], address=address)


@contextmanager
def false_lender(folder: Path, secret: Secret, roles: Roles) -> Iterator[str]:
    """A place that greets with `secret` as the listener of `roles`, right or not."""

    def say(stream: Stream) -> None:
        greeting = ListenerGreeting(secret, roles)
        stream.send(m.GREETING, greeting.challenge())
        stream.receive(5.0, 1000)
        with suppress(MalleeError):
            greeting.take(b"")
        proof = secret.proof(roles.listener, "w1", bytes(32), bytes(32))
        stream.send(m.GREETING, msgspec.msgpack.encode((proof,)))

    with scripted(folder, say) as address:
        yield address


@contextmanager
def scripted(folder: Path, say: Callable[[Stream], None]) -> Iterator[str]:
    """An end that accepts one connection, and says what it says."""
    path = folder / "false.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def run() -> None:
        with suppress(OSError):
            sock, _ = listener.accept()
            stream = Stream(sock, 5.0)
            with suppress(OSError):
                say(stream)
                stream.receive_head(5.0)
            stream.close()

    thread = threading.Thread(target=run)
    thread.start()
    yield f"node=n0;unix:{path}"
    thread.join(5)
    assert not thread.is_alive()
    listener.close()
    path.unlink()


def greeted(stream: Stream) -> None:
    greeting = ListenerGreeting(SECRET, LENDING)
    stream.send(m.GREETING, greeting.challenge())
    _, welcome = greeting.take(stream.receive(5.0, 1000)[1])
    stream.send(m.GREETING, welcome)
    stream.receive(5.0, 10_000)  # the question


def lent(record: bytes, num_blocks: int, nbytes: int) -> bytes:
    told = m.checksum(record, max(0, num_blocks))
    return msgspec.msgpack.encode((record, num_blocks, nbytes, told))


def blocks(num: int, size: int) -> tuple[int, bytes, bytes]:
    return m.BLOCKS, bytes(8 * num), bytes(size)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ([(m.LENT, lent(b"", 1 << 19, NBYTES))], "at most 262144"),
        ([(m.LENT, lent(b"", -1, NBYTES))], "at most 262144"),
        ([(m.LENT, lent(b"", 4, 1 << 30))], "at most 67108864"),
        ([(m.LENT, lent(b"", 4, 0))], "without bytes"),
        ([(m.LENT, lent(b"", 5, NBYTES))], "5 blocks were lent, and 4 asked for"),
        ([(m.LENT, b"\xff")], "not a loan"),
        ([(m.LENT, msgspec.msgpack.encode((b"r", 1, 1, 1)))], "not what was sent"),
        ([(m.END, b"")], "kind 7 where a loan is due"),
        ([(m.REFUSED, b"\xff")], "not a refusal"),
        ([(m.LENT, lent(b"", 4, NBYTES)), blocks(5, 5 * NBYTES)], "4 blocks of 1000 are due"),
        ([(m.LENT, lent(b"", 4, NBYTES)), blocks(0, 0)], "4 blocks of 1000 are due"),
        ([(m.LENT, lent(b"", 4, NBYTES)), blocks(1, NBYTES - 1)], "4 blocks of 1000 are due"),
        ([(m.LENT, lent(b"", 4, NBYTES)), (m.LENT, b"")], "4 blocks of 1000 are due"),
        ([(m.LENT, lent(b"", 4, NBYTES)), blocks(1, NBYTES)], "block 0 that worker w0 lent is not"),
    ],
)
def test_a_lender_that_says_what_it_may_not_is_a_named_error(
    tmp_path: Path, said: list[tuple[Any, ...]], error: str
) -> None:
    def say(stream: Stream) -> None:
        greeted(stream)
        for each in said:
            stream.send(*each)

    with nothing_left(), scripted(tmp_path, say) as address:
        borrower = Borrower("w1", SECRET, node="n0")
        with pytest.raises((CodecError, CorruptLoan), match=error):
            read(borrower.lend(ask(address, range(4))), range(4))
        borrower.close()
        assert borrower.counts.use.num_failed == 1


def by_hand(p: Place) -> Stream:
    """A connection to the lender whose greeting was right."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(p.path))
    stream = Stream(sock, 5.0)
    greeting = DialerGreeting(SECRET, "by hand", LENDING)
    answer = greeting.take(stream.receive(5.0, 1000)[1])
    assert answer is not None
    stream.send(m.GREETING, answer)
    assert greeting.take(stream.receive(5.0, 1000)[1]) is None
    return stream


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ([(m.READ, b"")], "kind 5 where a question is due"),
        ([(m.ASK, b"\xff")], "not a question for blocks"),
        ([(m.ASK, msgspec.msgpack.encode((("w0", 1, "", 0), b"123", "")))], "bytes of keys of 8"),
        ([("ask",), (m.ASK, b"")], "kind 3 within a loan"),
        ([("ask",), (m.READ, b"123")], "3 bytes of places of 4"),
        ([("ask",), (m.READ, m.pack_places([1, 1]))], "don't rise"),
        ([("ask",), (m.READ, m.pack_places([3, 2]))], "don't rise"),
        ([("ask",), (m.READ, m.pack_places([4]))], "not among the 4 lent"),
    ],
)
def test_a_borrower_that_says_what_it_may_not_is_told_so_and_closed(
    tmp_path: Path, said: list[tuple[Any, ...]], error: str
) -> None:
    with place(tmp_path) as p:
        stream = by_hand(p)
        for each in said:
            if each == ("ask",):
                stream.send(m.ASK, m.pack_ask(ask("", range(4))))
                assert stream.receive(5.0, 1000)[0] == m.LENT
            else:
                stream.send(*each)
        kind, raw = stream.receive(5.0, 10_000)
        told = m.read_refusal(raw)
        assert kind == m.REFUSED
        assert isinstance(told, CodecError)
        assert error in str(told)
        with pytest.raises(ConnectionError):
            stream.receive_head(5.0)
        stream.close()
        soon(lambda: p.server.num_connections == 0)


def test_what_is_too_long_is_refused_by_its_head(tmp_path: Path) -> None:
    """Records, questions and greetings."""

    def say(stream: Stream) -> None:
        greeted(stream)
        stream._sock.sendall(m.HEAD.pack(m.MAX_RECORD_NBYTES + 5000, m.LENT))

    with place(tmp_path) as p:
        with scripted(tmp_path, say) as address, pytest.raises(CodecError, match="at most"):
            p.lend(range(4), address=address)
        with pytest.raises(CodecError, match="at most"):
            p.lend(range(m.MAX_ASK_NBYTES // 8))
        stream = by_hand(p)
        stream._sock.sendall(m.HEAD.pack(m.MAX_ASK_NBYTES + 1, m.ASK))
        assert "at most" in str(m.read_refusal(stream.receive(5.0, 10_000)[1]))
        stream.close()
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(p.path))
        stream = Stream(sock, 5.0)
        stream.receive(5.0, 1000)
        sock.sendall(m.HEAD.pack(m.MAX_GREETING_NBYTES + 1, m.GREETING))
        assert "at most" in str(m.read_refusal(stream.receive(5.0, 10_000)[1]))
        stream.close()


def attempt(p: Place, address: str) -> str | None:
    """Borrow twenty blocks; None if they are right, else the type of the error."""
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
    """At random places of the talk: both ends are free after the times that they give each other."""

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
            soon(lambda: not p.lender.open and p.server.num_connections == 0)
            between.close()


def test_a_borrower_that_does_not_read_fills_no_memory_and_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "SLOW_NBYTES_S", 1 << 30)
    times = LendingTimes(message_s=0.3, unread_s=0.3)
    with place(tmp_path, nbytes=1 << 20, times=times) as p:
        reads = 0

        def note() -> None:
            nonlocal reads
            reads += 1

        p.lender.before_read = note
        loan = p.lend(range(300))
        loan._stream.send(m.READ, m.pack_places(range(300)))  # type: ignore[attr-defined]
        soon(lambda: not p.lender.open and p.server.num_connections == 0)
        assert reads < 20
        loan.close()
        loan = p.lend(range(5))  # of which nothing is asked for
        soon(lambda: not p.lender.open)
        with pytest.raises(WorkerLost, match="broke"):
            read(loan, [0])
        loan.close()


def test_a_thousand_connections_that_say_nothing_cost_few_threads(tmp_path: Path) -> None:
    """Of as many as come, few are waited for; then the lender serves as before."""
    times = LendingTimes(greeting_s=0.5)
    with place(tmp_path, times=times, bounds=LendingBounds(4, 8)) as p:
        ends = []
        most = 0
        for _ in range(1000):
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(5)
            soon(lambda sock=sock: sock.connect_ex(str(p.path)) == 0)  # type: ignore[misc]
            ends.append(sock)
            most = max(most, p.server.num_connections)
        assert most <= 4
        soon(lambda: p.server.num_connections == 0)
        check_one(p)
        said = [_all(sock) for sock in ends]
        for sock in ends:
            sock.close()
        assert sum(b"have not greeted yet" in each for each in said) >= 900


def _all(sock: socket.socket) -> bytes:
    said = b""
    with suppress(OSError):
        while data := sock.recv(1000):
            said += data
    return said


def check_one(p: Place) -> None:
    loan = p.lend([5])
    check(loan, [5])
    loan.close()


def test_idle_connections_give_way_and_open_loans_do_not(tmp_path: Path) -> None:
    with place(tmp_path, bounds=LendingBounds(4, 2)) as p:
        others = [Borrower(f"w{i}", SECRET, node="n0") for i in range(2, 5)]
        for other in (*others, p.borrower):  # each leaves a connection that is idle
            other.lend(ask(p.address, [1])).close()
            soon(lambda: _all_idle(p))
        soon(lambda: p.server.num_connections <= 2)
        held = [other.lend(ask(p.address, [1])) for other in others[:2]]
        with pytest.raises(Unavailable, match="2 loans are open"):
            others[2].lend(ask(p.address, [1]))
        for loan in held:
            check(loan, [1])
            loan.close()
        soon(lambda: _all_idle(p))
        check_one(p)
        for other in others:
            other.close()


def _all_idle(p: Place) -> bool:
    """Whether the lender has heard of the end of every loan."""
    return all(session.idle_since is not None for session in list(p.server._sessions))


def test_a_borrower_has_so_many_loans_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(borrower_module, "MAX_LOANS", 2)
    with place(tmp_path, times=LendingTimes(connect_s=0.05)) as p:
        held = [p.lend([1]), p.lend([2])]
        with pytest.raises(Unavailable, match="2 loans from other workers are open"):
            p.lend([3])
        held.pop().close()
        check_one(p)
        held.pop().close()


def test_a_loan_may_be_closed_while_another_thread_reads_it(tmp_path: Path) -> None:
    with place(tmp_path) as p, ThreadPoolExecutor(1) as pool:
        gate = threading.Event()
        p.lender.before_read = lambda: gate.wait(5) and None
        loan = p.lend(range(3))
        reading = pool.submit(read, loan, range(3))
        soon(lambda: loan._num_using > 0)  # type: ignore[attr-defined]
        loan.close()
        with pytest.raises(WorkerLost):
            reading.result(5)
        assert p.borrower.counts.use.num_open == 0
        gate.set()
        check_one(p)


def test_threads_that_read_one_loan_take_turns(tmp_path: Path) -> None:
    with place(tmp_path) as p, ThreadPoolExecutor(4) as pool:
        loan = p.lend(range(200))
        rows = pool.map(lambda i: read(loan, [i])[0], range(200))
        assert all((row == block(i)).all() for i, row in enumerate(rows))
        loan.close()
        assert p.borrower.counts.use.nbytes == 200 * NBYTES


def test_a_question_under_way_ends_when_the_borrower_closes(tmp_path: Path) -> None:
    with place(tmp_path) as p, ThreadPoolExecutor(1) as pool:
        asked, gate = threading.Event(), threading.Event()
        p.lender.before_loan = lambda: asked.set() or (gate.wait(5) and None)
        asking = pool.submit(p.lend, [1])
        assert asked.wait(5)
        p.borrower.close()
        with pytest.raises(WorkerLost):
            asking.result(1)
        with pytest.raises(Unavailable, match="shutting down"):
            p.lend([1])
        gate.set()


def test_both_ends_close_in_the_midst_of_loans(tmp_path: Path) -> None:
    with place(tmp_path) as p:
        loan = p.lend(range(3))
        p.server.close()
        with pytest.raises(WorkerLost):
            read(loan, range(3))
        loan.close()
        with pytest.raises(WorkerLost):
            p.lend([1])
        p.borrower.close()
        with pytest.raises(MalleeError):
            p.lend([1])
    with place(tmp_path) as p:
        loan = p.lend(range(3))
        p.borrower.close()
        soon(lambda: not p.lender.open)
        with pytest.raises(WorkerLost, match="over"):
            read(loan, range(3))


async def test_a_thread_that_fails_by_a_bug_is_a_failure_of_its_server(tmp_path: Path) -> None:
    """And whoever supervises it gets to know; `close` is the other end of that wait."""

    def fail() -> None:
        raise RuntimeError("a bug")

    with nothing_left():
        p = Place(tmp_path / "l.sock")
        watch = asyncio.create_task(p.server.supervise())
        p.lender.before_loan = fail
        with pytest.raises(WorkerLost):
            await asyncio.to_thread(p.lend, [1])
        with pytest.raises(RuntimeError, match="a bug"):
            await asyncio.wait_for(watch, 5)
        assert isinstance(p.server.failure, RuntimeError)
        p.borrower.close()
        p.server.close()
        sound = Place(tmp_path / "s.sock")
        watch = asyncio.create_task(sound.server.supervise())
        await asyncio.sleep(0)
        sound.server.close()
        sound.borrower.close()
        await asyncio.wait_for(watch, 5)
        await sound.server.supervise()
        await asyncio.get_running_loop().shutdown_default_executor()


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
