"""One listener, and links over real sockets: kinds, secrets, order, bounds, TCP with TLS, ends. K28, part."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mallee.protocol.codec import encode
from mallee.protocol.errors import CodecError, ConfigError
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import Cancel, Frame, Generate, Limits, Update, pack_tokens
from mallee.protocol.parcels import Parcel, Report, decode_parcels
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
from mallee.runtime.transport.link import LinkTimes, Transport
from mallee.runtime.transport.listener import Listener
from mallee.runtime.transport.server import CommandServer
from mallee.runtime.transport.tls import TlsFiles, client_tls, server_tls
from support.certificates import certificate
from support.local_transport import ByHand
from support.waiting import until

TIMES = LinkTimes(connect_s=2.0, retry_s=0.01, silence_s=5.0, keepalive_s=0.05)
W, LIFE = WorkerId("w0"), Incarnation(1)
KEY = b"the secret of this app"


class Echo:
    """A host that answers each command with its request, told twice over; of one gateway at a time."""

    def __init__(self) -> None:
        self.batches: list[tuple[Parcel, ...]] = []
        self.sinks: dict[str, Any] = {}

    def open(self, gateway: str, sink: Any) -> "EchoStream":
        self.sinks[gateway] = sink
        return EchoStream(self, gateway)


class EchoStream:
    def __init__(self, host: Echo, gateway: str) -> None:
        self.host = host
        self.gateway = gateway

    def submit(self, raw: bytes) -> None:
        parcels = decode_parcels(raw)
        if not parcels:
            return
        self.host.batches.append(parcels)
        for parcel in parcels:
            updates = tuple(Update(c.request, 0, (1,)) for c in parcel.commands)  # type: ignore[union-attr]
            report = Report(parcel.worker, parcel.incarnation, Frame(1, updates))
            self.host.sinks[self.gateway].send(encode([report, report]))

    def resume(self) -> None:
        pass

    def close(self) -> None:
        self.host.sinks.pop(self.gateway, None)


class Place:
    """A host that listens, and a gateway's links to it."""

    def __init__(self, **options: Any) -> None:
        self.host = Echo()
        self.server = CommandServer(self.host, Secret(KEY))
        self.listener = Listener(self.server, node="n0", **options)
        self.frames: list[Frame] = []
        self.lost: list[str] = []

    def link(self, *, key: bytes = KEY, node: str = "n0", address: str = "", **options: Any) -> Any:
        self.transport = Transport("g0", Secret(key), node=node, **({"times": TIMES} | options))
        address = address or str(self.listener.address)
        return self.transport.link(W, LIFE, address, self.frames.append, self.lost.append)


@asynccontextmanager
async def place(folder: Path, **options: Any) -> AsyncIterator[Place]:
    made = Place(**options)
    await made.listener.listen_unix(str(folder / "h.sock"))
    try:
        yield made
    finally:
        await made.listener.close()
        assert not made.server.connections
        assert not made.host.sinks
        assert not [name for name in os.listdir(folder) if name.endswith(".sock")]


async def answered(p: Place, link: Any) -> None:
    link.send(Cancel("a"))
    await until(lambda: len(p.frames) == 2)
    assert not p.lost


async def test_commands_cross_in_order_and_frames_come_back(tmp_path: Path) -> None:
    path = tmp_path / "later"
    async with place(tmp_path) as p:
        link = p.link(address=f"node=n0;unix:{path}")  # it is tried again until the host listens
        sent: list[Any] = [Cancel(f"r{i}") for i in range(300)]
        for command in sent[:150]:
            link.send(command)
        await p.listener.listen_unix(str(path))
        await until(lambda: len(p.frames) == 2)
        for command in sent[150:]:
            link.send(command)
        await until(lambda: sum(len(f.updates) for f in p.frames) == 600)
        num_frames = len(p.frames)
        sent.append(Generate("large", pack_tokens(range(1_000_000)), Limits(1)))
        link.send(sent[-1])
        await until(lambda: len(p.frames) > num_frames)
        got = [c for batch in p.host.batches for parcel in batch for c in parcel.commands]
        assert got == sent
        assert list(p.host.sinks) == ["g0"]
        await until(lambda: link.host._untaken_nbytes == 0)
        await link.close()
        await until(lambda: not p.host.sinks)
        assert not p.lost
        os.unlink(tmp_path / "h.sock")


async def test_a_host_that_closes_sends_its_last_frames_and_is_lost(tmp_path: Path) -> None:
    async with place(tmp_path) as p:
        link = p.link()
        await answered(p, link)
        last = Report(W, LIFE, Frame(9, (Update("z", 0, tuple(range(100_000))),)))
        p.host.sinks["g0"].send(encode([last]))
        await p.listener.close()
        await until(lambda: bool(p.lost))
        assert p.frames[-1] == last.frame
        assert p.lost == ["it closed the connection"]
        await link.close()


async def test_another_secret_is_refused_at_once_and_never_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = b"the secret of another app"
    async with place(tmp_path) as p:
        p.link(key=wrong)
        await until(lambda: bool(p.lost), 1.0)
        assert p.lost == ["it refused: it has another secret"]
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


async def test_a_kind_that_is_not_served_is_closed(tmp_path: Path) -> None:
    async with place(tmp_path) as p:
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "h.sock"))
        writer.write(KV.first)
        assert await reader.read() == b""
        writer.close()
        link = p.link()
        await answered(p, link)
        await link.close()


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
        said = await asyncio.gather(*(reader.read() for reader, _ in ends))
        assert sum(b"too many connections" in each for each in said) == 2
        assert sum(b"not greet in time" in each for each in said) == 3
        assert not p.server.connections
        for _, writer in ends:
            writer.close()
        link = p.link()
        await answered(p, link)
        await link.close()


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
        await until(lambda: bool(p.lost))
        assert "own node alone" in p.lost.pop()
        await p.listener.listen_tcp("127.0.0.1")
        link = p.link(node="n1")
        await answered(p, link)
        await link.close()


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
            p.lost.clear()
            p.link(node="n1", tls=wrong, times=TIMES._replace(connect_s=0.3))
            await until(lambda: bool(p.lost))
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
