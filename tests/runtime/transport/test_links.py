"""One listener, and links over real sockets: kinds, secrets, order, bounds, TCP with TLS, ends. K28, part.

K21, part: many workers share one way, and one that is lost takes none of the others with it.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mallee.protocol.codec import encode
from mallee.protocol.errors import CodecError, ConfigError, WorkerLost
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import Cancel, Frame, Generate, Limits, Update, pack_tokens
from mallee.protocol.parcels import Parcel, Report, decode_parcels
from mallee.runtime.transport import link as links
from mallee.runtime.transport import listener, server, wire
from mallee.runtime.transport.address import Address, parse_address
from mallee.runtime.transport.greeting import (
    COMMANDS,
    KV,
    DialerGreeting,
    Kind,
    ListenerGreeting,
    Secret,
    new_secret,
)
from mallee.runtime.transport.link import Link, LinkTimes, Transport
from mallee.runtime.transport.listener import Listener
from mallee.runtime.transport.server import CommandServer
from mallee.runtime.transport.tls import TlsFiles, client_tls, expiry, server_tls
from support.certificates import certificate
from support.local_transport import ByHand
from support.waiting import until

TIMES = LinkTimes(connect_s=2.0, retry_s=0.01, silence_s=5.0, keepalive_s=0.05)
W, LIFE = WorkerId("w0"), Incarnation(1)
KEY = b"the secret of this app"


class FakeHost:
    """A host that echoes: it answers each command with its request, told twice over.

    With `accept`, batches get no receipt before that is done, and nothing is echoed.
    """

    def __init__(self) -> None:
        self.batches: list[tuple[Parcel, ...]] = []
        self.accept: asyncio.Future[None] | None = None
        self.refusal: str | None = None
        self.echoes = True
        self.sinks: dict[str, Any] = {}
        self.opened = self.closed = 0

    def open(self, gateway: str, sink: Any) -> "FakeHost":
        self.opened += 1
        self.sinks[gateway] = sink
        return self

    def submit(self, raw: bytes) -> asyncio.Future[None] | None:
        if self.refusal is not None:
            raise WorkerLost("h0", self.refusal)
        if parcels := decode_parcels(raw):
            self.batches.append(parcels)
        for parcel in parcels if self.echoes and self.accept is None else ():
            updates = tuple(Update(c.request, 0, (1,)) for c in parcel.commands)  # type: ignore[union-attr]
            report = Report(parcel.worker, parcel.incarnation, Frame(1, updates))
            self.write(encode([report, report]))
        return self.accept

    def resume(self) -> None:
        pass

    def close(self) -> None:
        self.closed += 1
        self.sinks.clear()

    @property
    def commands(self) -> list[Any]:
        """All that came, in order."""
        return [c for batch in self.batches for parcel in batch for c in parcel.commands]

    def say(self, frame: Frame, worker: str = W, lost: str | None = None) -> None:
        self.write(encode([Report(worker, LIFE, frame, lost)]))

    def write(self, raw: bytes) -> None:
        self.sinks["g0"].send(raw)


class Seen:
    """Frames and losses of one worker's link."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.lost: list[str] = []


class Place:
    """A host that listens, and a gateway's links to it, which are whole at the end."""

    def __init__(self, **options: Any) -> None:
        self.host = FakeHost()
        self.server = CommandServer(self.host, Secret(KEY))
        self.listener = Listener(self.server, node="n0", **options)
        self.transports: list[Transport] = []
        self.links: list[Link] = []
        self.seen = Seen()

    def link(
        self, *, key: bytes = KEY, node: str = "n0", address: str = "", times: LinkTimes = TIMES,
        **options: Any,
    ) -> Any:  # fmt: skip
        self.transports.append(Transport("g0", Secret(key), node=node, times=times, **options))
        return self.more(W, self.seen, address)

    def more(self, worker: str, seen: Seen, address: str = "") -> Any:
        """One more link of the last transport."""
        address = address or str(self.listener.address)
        taken = seen.frames.append, seen.lost.append
        link = self.transports[-1].link(WorkerId(worker), LIFE, address, *taken)
        self.links.append(link)
        return link

    async def two(self) -> tuple[Any, Any, Seen]:
        """Links to two workers of the host, which does not echo, and what the second hears."""
        self.host.echoes, other = False, Seen()
        links = self.link(), self.more("w1", other)
        await until(lambda: links[0].host.is_connected)
        return *links, other

    async def close(self) -> None:
        for link in self.links:
            await link.close()
            link.host.check()
        for transport in self.transports:
            assert not transport._hosts
            await transport._tasks.finish()
            assert transport.failure is None
        await self.listener.close()


@asynccontextmanager
async def place(folder: Path, **options: Any) -> AsyncIterator[Place]:
    made = Place(**options)
    await made.listener.listen_unix(str(folder / "h.sock"))
    try:
        yield made
    finally:
        await made.close()
        assert not made.server.connections
        assert not made.host.sinks
        assert not [name for name in os.listdir(folder) if name.endswith(".sock")]


async def answered(p: Place, link: Any) -> None:
    link.send(Cancel("a"))
    await until(lambda: len(p.seen.frames) == 2)
    assert not p.seen.lost


async def test_commands_cross_in_order_and_frames_come_back(tmp_path: Path) -> None:
    path = tmp_path / "later"
    async with place(tmp_path) as p:
        link = p.link(address=f"node=n0;unix:{path}")  # it is tried again until the host listens
        sent: list[Any] = [Cancel(f"r{i}") for i in range(300)]
        for command in sent[:150]:
            link.send(command)
        await p.listener.listen_unix(str(path))
        await until(lambda: len(p.seen.frames) == 2)
        for command in sent[150:]:
            link.send(command)
        await until(lambda: sum(len(f.updates) for f in p.seen.frames) == 600)
        num_frames = len(p.seen.frames)
        sent.append(Generate("large", pack_tokens(range(1_000_000)), Limits(1)))
        link.send(sent[-1])
        await until(lambda: len(p.seen.frames) > num_frames)
        assert p.host.commands == sent
        assert list(p.host.sinks) == ["g0"]
        await until(lambda: link.host._untaken_nbytes == 0)
        await link.close()
        await until(lambda: not p.host.sinks)
        assert not p.seen.lost
        os.unlink(tmp_path / "h.sock")


async def test_a_host_that_closes_sends_its_last_frames_and_is_lost(tmp_path: Path) -> None:
    async with place(tmp_path) as p:
        link = p.link()
        await answered(p, link)
        last = Frame(9, (Update("z", 0, tuple(range(100_000))),))
        p.host.say(last)
        await p.listener.close()
        await until(lambda: bool(p.seen.lost))
        assert p.seen.frames[-1] == last
        assert p.seen.lost == ["it closed the connection"]


async def test_another_secret_is_refused_at_once_and_never_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = b"the secret of another app"
    async with place(tmp_path) as p:
        p.link(key=wrong)
        await until(lambda: bool(p.seen.lost), 1.0)
        assert p.seen.lost == ["it refused: it has another secret"]
        assert not p.host.sinks
        errors = [r for r in caplog.records if r.levelno == logging.ERROR]
        assert len(errors) == 1
        assert "another secret" in caplog.text
        for secret in (KEY, wrong):
            assert secret.decode() not in caplog.text + repr(Secret(secret))


OURS, OTHERS = Secret(KEY), Secret(b"the secret of another app")


@pytest.mark.parametrize(
    ("secret", "kind"), [(OTHERS, COMMANDS), (OTHERS, KV), (OURS, COMMANDS), (OURS, KV)]
)
def test_a_proof_of_another_app_or_kind_opens_nothing(secret: Secret, kind: Kind) -> None:
    """At neither end: a lease may be forged, and the place that it names must prove itself, too."""
    right = kind if secret is OTHERS else next(each for each in (COMMANDS, KV) if each != kind)
    dialer = DialerGreeting(secret, "w1", kind)
    challenge = ListenerGreeting(OURS, right).challenge()
    hello = dialer.take(challenge)
    assert hello is not None
    with pytest.raises(ConfigError, match="another secret"):
        ListenerGreeting(OURS, right).take(hello)
    dialer = DialerGreeting(OURS, "w1", right)
    false = ListenerGreeting(secret, kind)
    hello = dialer.take(false.challenge())
    assert hello is not None
    proof = secret.proof(kind.listener, "w1", false._nonce, dialer._nonce)
    with pytest.raises(ConfigError, match="another secret"):
        dialer.take(encode(proof))


async def test_a_host_that_does_not_know_the_secret_gets_no_commands(tmp_path: Path) -> None:
    heard = b""

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal heard
        writer.write(wire.message(wire.GREETING, ListenerGreeting(OTHERS, COMMANDS).challenge()))
        heard = await reader.read(1000)
        writer.write(wire.message(wire.GREETING, encode(bytes(32))))
        heard += await reader.read()
        writer.close()

    listening = await asyncio.start_unix_server(impostor, str(tmp_path / "impostor"))
    async with place(tmp_path) as p:
        p.link(address=f"node=n0;unix:{tmp_path}/impostor").send(Cancel("a prompt"))
        await until(lambda: bool(p.seen.lost))
        assert "another secret" in p.seen.lost[0]
        assert b"a prompt" not in heard
        assert KEY not in heard
    listening.close()
    await listening.wait_closed()


async def test_a_kind_that_is_not_served_is_closed(tmp_path: Path) -> None:
    async with place(tmp_path) as p:
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "h.sock"))
        writer.write(KV.first)
        assert await reader.read() == b""
        writer.close()
        link = p.link()
        await answered(p, link)


async def test_a_greeting_that_does_not_come_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether its kind comes or not: they are few at a time, and take no thread."""
    monkeypatch.setattr(listener, "GREETING_S", 0.05)
    monkeypatch.setattr(server, "GREETING_S", 0.05)
    monkeypatch.setattr(listener, "MAX_GREETINGS", 3)
    async with place(tmp_path) as p:
        ends = [await asyncio.open_unix_connection(str(tmp_path / "h.sock")) for _ in range(5)]
        ends[0][1].write(COMMANDS.first)
        link = p.link()  # it is one too many, and comes again
        said = await asyncio.gather(*(reader.read() for reader, _ in ends))
        assert sum(b"too many connections" in each for each in said) == 2
        assert sum(b"not greet in time" in each for each in said) == 3
        for _, writer in ends:
            writer.close()
        await answered(p, link)
        assert len(p.server.connections) == 1


class Stuck:
    """A server of KV whose connections never greet."""

    kind = KV

    def __init__(self) -> None:
        self.over = asyncio.Event()

    async def serve(self, sock: Any, tls: Any, on_greeted: Any) -> None:
        await self.over.wait()
        sock.close()

    def end(self) -> None:
        self.over.set()


async def test_connections_for_kv_take_no_room_of_those_for_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "MAX_GREETINGS", 3)
    async with place(tmp_path) as p:
        both = Listener(p.server, Stuck(), node="n0")
        await both.listen_unix(str(tmp_path / "both"))
        ends = []
        for _ in range(4):
            ends.append(await asyncio.open_unix_connection(str(tmp_path / "both")))
            ends[-1][1].write(KV.first)
        assert b"too many connections" in await ends[-1][0].read()
        await answered(p, p.link(address=str(both.address)))
        await both.close()
        for _, writer in ends:
            writer.close()


@pytest.mark.parametrize("is_greeted", [False, True])
async def test_a_message_that_is_too_long_is_refused_by_its_head(
    tmp_path: Path, is_greeted: bool
) -> None:
    async with place(tmp_path) as p:
        path = tmp_path / "h.sock"
        if is_greeted:
            found = await ByHand.to(str(path), Secret(KEY))
            reader, writer = found.reader, found.writer
            size = wire.MAX_MESSAGE_NBYTES + 1
        else:
            reader, writer = await asyncio.open_unix_connection(str(path))
            writer.write(COMMANDS.first)
            size = wire.MAX_GREETING_NBYTES + 1
        writer.write(size.to_bytes(4, "little") + b"\x02")
        assert b"at most" in await reader.read()
        await until(lambda: not p.server.connections)
        writer.close()


async def test_a_gateway_of_another_protocol_is_told_so(tmp_path: Path) -> None:
    async with place(tmp_path) as p:
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "h.sock"))
        writer.write(COMMANDS.first)
        writer.write(wire.message(wire.GREETING, encode((99, "g", bytes(32), bytes(32)))))
        assert b"version 99 of the protocol" in await reader.read()
        assert not p.host.sinks
        writer.close()


async def test_a_gateway_of_another_node_takes_tcp(tmp_path: Path) -> None:
    async with place(tmp_path) as p:
        p.link(node="n1")
        await until(lambda: bool(p.seen.lost))
        assert "own node alone" in p.seen.lost.pop()
        await p.listener.listen_tcp("127.0.0.1")
        link = p.link(node="n1")
        await answered(p, link)


def test_the_end_of_a_certificate_is_read(tmp_path: Path) -> None:
    ours = certificate(tmp_path, "ours")  # for two days
    assert expiry(ours) == pytest.approx(time.time() + 2 * 86400, abs=60.0)
    for wrong in ("no certificate", ""):
        Path(ours.cert).write_text(wrong)
        with pytest.raises(ConfigError, match=r"links\.tls_cert, tls_key or tls_ca can't be used"):
            expiry(ours)


async def test_tcp_goes_through_tls_and_other_certificates_are_refused(tmp_path: Path) -> None:
    ours, others = certificate(tmp_path, "ours"), certificate(tmp_path, "others")
    async with place(tmp_path, tls=server_tls(ours)) as p:
        await p.listener.listen_tcp("127.0.0.1")
        link = p.link(node="n1", tls=client_tls(ours))
        await answered(p, link)
        found = p.host.sinks["g0"]._transport.get_extra_info("ssl_object")
        assert found.version() == "TLSv1.3"
        await link.close()
        await until(lambda: not p.server.connections)
        for wrong in (None, client_tls(others), client_tls(ours._replace(ca=others.ca))):
            p.seen.lost.clear()
            p.link(node="n1", tls=wrong, times=TIMES._replace(connect_s=0.3))
            await until(lambda: bool(p.seen.lost))
            assert not p.host.sinks
        await until(lambda: not p.server.connections)


def test_tls_files_that_are_not_there_are_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tls_cert"):
        server_tls(TlsFiles(str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "c")))


def test_secrets_are_long_and_never_the_same() -> None:
    assert new_secret() != new_secret()
    with pytest.raises(ConfigError, match="16 at least"):
        Secret(b"short")


@pytest.mark.parametrize(
    "address",
    [
        Address("n1", "/tmp/m/w0.sock"),
        Address("n1", "/tmp/m/w0.sock", ("10.0.0.3", 4567)),
        Address("", None, ("::1", 1)),
        Address("", "/w.sock"),
    ],
)
def test_an_address_is_its_text(address: Address) -> None:
    assert parse_address(str(address)) == address


def test_the_way_depends_on_the_node() -> None:
    address = Address("n1", "/tmp/w0.sock", ("10.0.0.3", 4567))
    assert address.way_from("n1") == "/tmp/w0.sock"
    assert address.way_from("n2") == ("10.0.0.3", 4567)
    with pytest.raises(ConfigError, match="own node alone"):
        address._replace(tcp=None).way_from("n2")


@pytest.mark.parametrize(
    "text",
    [
        "", "here", "node=n1", "unix:w0.sock", "tcp:host", "tcp::1", "tcp:h:0", "tcp:h:65536",
        "tcp:h:x", "unix:/a;;", "unix:/" + "a" * 107, "node=" + "n" * 2000 + ";tcp:h:1",
    ],
)  # fmt: skip
def test_other_text_is_no_address(text: str) -> None:
    with pytest.raises(CodecError, match="not an address"):
        parse_address(text)


# Links


async def test_commands_of_a_turn_travel_as_one_batch_and_wait_for_no_receipt(
    tmp_path: Path,
) -> None:
    async with place(tmp_path) as p:
        link, host = p.link(), p.host
        await until(lambda: link.host.is_connected)
        host.accept = asyncio.get_running_loop().create_future()
        link.send(Cancel("0"))
        await until(lambda: len(host.commands) == 1)
        for i in range(1, 100):
            link.send(Cancel(str(i)))
        await until(lambda: len(host.commands) == 100)
        assert [len(parcels[0].commands) for parcels in host.batches] == [1, 99]
        assert [c.request for c in host.commands] == [str(i) for i in range(100)]
        waiting: int = link.host._untaken_nbytes
        assert waiting > 0
        host.accept.set_result(None)
        await asyncio.sleep(0)
        host.write(encode(()))  # a heartbeat: a receipt has no message of its own
        await until(lambda: link.host._untaken_nbytes < waiting)


async def test_a_host_that_takes_nothing_is_lost_beyond_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "MAX_UNTAKEN_NBYTES", 4000)
    async with place(tmp_path) as p:
        link = p.link()
        await until(lambda: link.host.is_connected)
        p.host.accept = asyncio.get_running_loop().create_future()
        for i in range(3):
            link.send(Generate(f"r{i}", pack_tokens(range(400)), Limits(1)))
            await until(lambda i=i: len(p.host.batches) == i + 1 or bool(p.seen.lost))  # type: ignore[misc]
        await until(lambda: bool(p.seen.lost))
        assert "takes no commands" in p.seen.lost[0]


async def test_a_worker_that_cannot_be_reached_is_lost_after_the_connect_time(
    tmp_path: Path,
) -> None:
    async with place(tmp_path) as p:
        times = TIMES._replace(connect_s=0.3)
        link = p.link(address=f"node=n0;unix:{tmp_path}/none.sock", times=times)
        link.send(Cancel("a"))
        await until(lambda: bool(p.seen.lost), 2.0)
        assert "No such file" in p.seen.lost[0]
        link.send(Cancel("b"))
        assert link.is_over
        assert not link.host.is_connected


@pytest.mark.parametrize("fault", ["silent", "refused", "no frame"])
async def test_silence_a_refused_batch_and_bytes_that_are_no_frame_are_loss(
    tmp_path: Path, fault: str
) -> None:
    async with place(tmp_path) as p:
        link = p.link(times=TIMES._replace(silence_s=0.2) if fault == "silent" else TIMES)
        await until(lambda: link.host.is_connected)
        if fault == "no frame":
            p.host.write(b"\xff\xff")
        elif fault == "silent":
            p.host.accept = asyncio.get_running_loop().create_future()  # no receipts either
        else:
            p.host.refusal = "every engine failed"
        link.send(Cancel("a"))
        await until(lambda: bool(p.seen.lost))
        reasons = {
            "silent": "it has gone silent",
            "refused": "it refused: every engine failed",
            "no frame": "not a run of reports",
        }
        assert reasons[fault] in p.seen.lost[0]


async def test_an_idle_gateway_says_that_it_lives(tmp_path: Path) -> None:
    async with place(tmp_path) as p:
        link = p.link()
        await until(lambda: link.host.num_batches >= 2)


async def test_workers_of_a_host_share_one_way_and_each_hears_its_own(tmp_path: Path) -> None:
    async with place(tmp_path) as p:
        one, two, other = await p.two()
        for i in range(7):
            (one, two)[i % 2].send(Cancel(str(i)))
        await until(lambda: len(p.host.commands) == 7)
        assert (p.host.opened, len(p.host.batches)) == (1, 1)
        (parcels,) = p.host.batches
        got = {parcel.worker: [c.request for c in parcel.commands] for parcel in parcels}  # type: ignore[union-attr]
        assert got == {"w0": ["0", "2", "4", "6"], "w1": ["1", "3", "5"]}
        said = [Frame(1, (Update("a", 0, (1,)),)), Frame(7, ())]  # the last tells that it goes on
        for frame in said:
            p.host.say(frame, "w1")
        await until(lambda: other.frames == said)
        assert not p.seen.frames


async def test_a_lost_worker_leaves_the_others_their_way(tmp_path: Path) -> None:
    """Their way ends with the last one that is lost."""
    async with place(tmp_path) as p:
        one, two, other = await p.two()
        last = Frame(1, (Update("a", 0, (), "error"),))
        p.host.say(last, "w0", lost="it broke")
        await until(lambda: p.seen.lost == ["it broke"])
        assert p.seen.frames == [last]
        one.send(Cancel("x"))
        two.send(Cancel("y"))
        await until(lambda: p.host.commands == [Cancel("y")])
        assert not other.lost
        p.host.say(Frame(1, ()), "w1", lost="it crashed, too")
        await until(lambda: p.host.closed == 1)
        assert (p.seen.lost, other.lost) == (["it broke"], ["it crashed, too"])


async def test_who_fails_to_take_in_a_loss_does_not_keep_it_from_others(tmp_path: Path) -> None:
    def fail(_: str) -> None:
        raise RuntimeError("a bug")

    async with place(tmp_path) as p:
        one, _, other = await p.two()
        one._on_lost = fail
        p.host.sinks["g0"].finish()
        await until(lambda: other.lost == ["it closed the connection"])


async def test_a_closed_link_says_so_and_the_way_stays_for_the_rest(tmp_path: Path) -> None:
    async with place(tmp_path) as p:
        one, two, other = await p.two()
        one.send(Cancel("x"))
        await one.close()
        await until(lambda: p.host.batches == [(Parcel("w0", 1, (Cancel("x"),), True),)])
        p.host.say(Frame(1, (Update("a", 0, (1,)),)), "w0")
        p.host.say(Frame(1, (Update("b", 0, (1,)),)), "w1")
        await until(lambda: bool(other.frames))
        assert (p.seen.frames, p.seen.lost, p.host.closed) == ([], [], 0)
        await two.close()
        await until(lambda: p.host.closed == 1)
