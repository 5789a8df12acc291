"""Credentials and accounts at a real nats-server: refused without, and each role held to its subjects."""

import asyncio
import json
import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from mallee.cli.main import cli
from mallee.protocol.errors import ConfigError
from mallee.protocol.subjects import BusRole, Subjects
from mallee.runtime.addresses import free_port
from mallee.runtime.bus import broker as broker_module
from mallee.runtime.bus.access import BrokerAccess, operators_broker
from mallee.runtime.bus.broker import (
    Broker,
    check_folder,
    check_operators_broker,
    find_binary,
    start_broker,
)
from mallee.runtime.bus.buckets import BucketSpec
from mallee.runtime.bus.children import end
from mallee.runtime.bus.nats import BusClient, NatsBus
from mallee.runtime.config import AppConfig
from support.certificates import certificate
from support.waiting import until

pytestmark = [pytest.mark.process, pytest.mark.nats]

SUBJECTS = Subjects.of("f")


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    made = Broker(fleet="f")
    await made.start()
    yield made
    await made.stop()


@asynccontextmanager
async def server(
    folder: Path, configuration: str, *, keeps: bool = True, **environment: str
) -> AsyncIterator[int]:
    """An operator's nats-server, which keeps values unless `keeps` is false; its port."""
    port = free_port()
    file = folder / f"nats-{port}.conf"  # its own: a server may read it after another has begun
    store = f'jetstream {{store_dir: "{folder}/store-{port}"}}\n' if keeps else ""
    file.write_text(f'listen: "127.0.0.1:{port}"\n{store}{configuration}')
    process = await asyncio.create_subprocess_exec(
        str(find_binary()),
        "-c",
        str(file),
        stderr=asyncio.subprocess.DEVNULL,
        env=os.environ | environment,
    )
    try:
        yield port
    finally:
        await end(process)


class Account:
    """A client of one role that tries what it likes."""

    def __init__(self, access: BrokerAccess) -> None:
        self._access = access
        self._client = BusClient()
        self.heard: list[str] = []
        self.refusals: list[str] = []

    async def _refused(self, error: Exception) -> None:
        self.refusals.append(str(error).lower())

    async def __aenter__(self) -> "Account":
        await self._client.connect(**self._access.options(), error_cb=self._refused)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def listen(self, subject: str) -> None:
        async def hear(message: Any) -> None:
            self.heard.append(message.subject)

        await self._client.subscribe(subject, cb=hear)
        await self._client.flush()

    async def say(self, subject: str) -> None:
        await self._client.publish(subject, b"forged")
        await self._client.flush()


OF_GATEWAYS = (
    *(SUBJECTS.bookings("g"), SUBJECTS.queues("g"), SUBJECTS.peers("g")),
    *(f"$KV.{SUBJECTS.bucket('texts')}.a.b", f"$JS.API.STREAM.PURGE.KV_{SUBJECTS.bucket('texts')}"),
    SUBJECTS.host("w"),
)
OF_WORKERS = (SUBJECTS.events("w"), SUBJECTS.lease("w"))
ELSEWHERE = (
    *("mallee.other.events.w", "mallee.other.peers.g", "anything", "_INBOX.x.y"),
    *("$KV.mallee_other_texts.a.b", "$JS.API.STREAM.INFO.KV_mallee_other_texts"),
    *("$JS.API.STREAM.LIST", "$JS.API.CONSUMER.CREATE.KV_mallee_other_texts"),
)


@pytest.mark.parametrize(
    ("role", "own", "others"),
    [("gateway", OF_GATEWAYS, OF_WORKERS), ("worker", OF_WORKERS, OF_GATEWAYS)],
)
async def test_each_role_publishes_its_own_subjects_alone(
    broker: Broker, role: BusRole, own: tuple[str, ...], others: tuple[str, ...]
) -> None:
    """A worker can't forge bookings or drains, nor a gateway leases or events."""
    async with Account(broker.access(role)) as account:
        for subject in own:
            await account.say(subject)
        assert account.refusals == []
        for subject in (*others, *ELSEWHERE, f"{SUBJECTS.inbox()}.x"):
            await account.say(subject)
            await until(
                lambda subject=subject: any(subject.lower() in each for each in account.refusals)
            )


async def test_a_store_that_fleets_share_is_used_by_its_own_name() -> None:
    broker = Broker(fleet="test", store="shared")
    await broker.start()
    try:
        bus = NatsBus(broker.access("gateway"), fleet="test")
        await bus.connect()
        await until(lambda: bus.is_up)
        bucket = BucketSpec(Subjects.of("shared").bucket("texts"), ttl_s=60.0, max_nbytes=1 << 20)
        revision = await bus.buckets.put(bucket, "a.b", b"value")
        assert revision is not None
        assert await bus.buckets.get(bucket, "a.b") == (b"value", revision)
        await bus.close()
    finally:
        await broker.stop()


async def test_a_worker_hears_no_prompt_and_no_answer(broker: Broker) -> None:
    """Not by name, by wildcard, nor by another fleet's subjects."""
    secret = (SUBJECTS.peers("g0"), f"$KV.{SUBJECTS.bucket('texts')}.a.b", SUBJECTS.bookings("g0"))
    async with (
        Account(broker.access("worker")) as worker,
        Account(broker.access("gateway")) as gateway,
        Account(broker.access("gateway")) as peer,
    ):
        wanted = (*secret, SUBJECTS.peers(), f"{SUBJECTS.inbox()}.>", "mallee.>", ">")
        for number, subject in enumerate((*wanted, *ELSEWHERE), 1):
            await worker.listen(subject)
            await until(lambda number=number: len(worker.refusals) == number)
        await peer.listen(SUBJECTS.peers())
        await gateway.say(SUBJECTS.peers("g0"))
        await until(lambda: bool(peer.heard))
        assert (worker.heard, gateway.refusals, peer.refusals) == ([], [], [])


async def test_an_account_that_may_too_little_is_one_error_with_the_remedy(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    bus = NatsBus(broker.access("worker"), fleet="f", name="it")
    try:
        await bus.connect()
        await until(lambda: bus.is_up)
        for _ in range(5):
            bus.publish(SUBJECTS.bookings("g"), b"forged")
        await until(lambda: "the broker's account for it may do too little" in caplog.text)
        assert "`mallee settings --nats-permissions`" in caplog.text
        assert bus.is_up
    finally:
        await bus.close()
    assert caplog.text.count("too little") == 1


def mode_and_text(file: Path) -> tuple[int, str]:
    return stat.S_IMODE(file.stat().st_mode), file.read_text()


async def test_a_broker_shows_its_passwords_to_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not on a command line, in a repr or a log; the file is its user's alone, and goes."""
    seen: list[tuple[int, str]] = []
    launch = asyncio.create_subprocess_exec

    async def look(*command: str, **options: Any) -> asyncio.subprocess.Process:
        seen.append(mode_and_text(Path(command[-1])))
        return await launch(*command, **options)

    monkeypatch.setattr(broker_module.asyncio, "create_subprocess_exec", look)
    broker = Broker(fleet="f")
    await broker.start()
    try:
        ((mode, text),) = seen
        passwords = (broker.passwords.gateway, broker.passwords.worker)
        assert mode == 0o600
        assert all(password in text for password in passwords)
        process = psutil.Process(broker.pid)
        shown = [str(process.cmdline()), str(process.environ()), caplog.text, broker.url]
        shown += [repr(broker.passwords), repr(broker.access("worker")), repr(vars(broker))]
        assert not any(password in each for password in passwords for each in shown)
        assert not os.path.exists(process.cmdline()[-1])  # noqa: ASYNC240
    finally:
        await broker.stop()


def make(port: int, **settings: Any) -> AppConfig:
    settings.setdefault("nats_url", f"nats://127.0.0.1:{port}")
    return AppConfig(model="m", fleet="f", **settings)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, login in {"right": "u:right", "wrong": "u:wrong", "token": "tttt"}.items():
        (tmp_path / name).write_text(f"{login}\n")
    return tmp_path


async def test_credentials_come_from_a_file_and_wrong_ones_are_told_in_one_sentence(
    files: Path,
) -> None:
    """Before anything is started with them."""
    configuration = 'authorization: {user: "u", password: "right"}\n'
    async with server(files, configuration) as port:
        right = make(port, nats_credentials=str(files / "right"))
        await asyncio.to_thread(check_operators_broker, right)
        wrong = make(port, nats_credentials=str(files / "wrong"))
        with pytest.raises(ConfigError, match=f"at 127.0.0.1:{port} refuses the cred") as caught:
            await asyncio.to_thread(check_operators_broker, wrong)
        assert "u:wrong" not in repr(caught.value)
        with pytest.raises(ConfigError, match="wants credentials"):
            await asyncio.to_thread(check_operators_broker, make(port))
        mixed = right.model_copy(update={"nats_worker_credentials": str(files / "wrong")})
        with pytest.raises(
            ConfigError, match="refuses the credentials of nats_worker_credentials="
        ):
            await asyncio.to_thread(check_operators_broker, mixed)
    async with server(files, 'authorization: {token: "tttt"}\n') as port:
        token = make(port, nats_credentials=str(files / "token"))
        await asyncio.to_thread(check_operators_broker, token)


async def test_a_broker_that_keeps_nothing_is_refused_with_the_remedy(files: Path) -> None:
    async with server(files, "", keeps=False) as port:
        with pytest.raises(ConfigError, match=r"keeps nothing .*: enable JetStream there"):
            await asyncio.to_thread(check_operators_broker, make(port))


async def test_what_is_stored_stays_in_the_folder_which_one_broker_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(broker_module, "LOCK_WAIT_S", 0.3)
    spec = BucketSpec("mallee_f_texts", ttl_s=60.0, max_nbytes=1 << 20)
    for number in (1, 2):
        broker = Broker(fleet="f", folder=tmp_path / "store")
        await broker.start()
        bus = NatsBus(broker.access("gateway"), fleet="f")
        try:
            await bus.connect()
            await until(lambda bus=bus: bus.is_up)
            found = await bus.buckets.get(spec, "a.b")
            assert (found is None) == (number == 1)
            await bus.buckets.put(spec, "a.b", b"1")
            async for key, _ in bus.buckets.follow(spec, "a"):
                assert key == "a.b"
                break
            with pytest.raises(ConfigError, match=r"store\.folder=.*another fleet"):
                await start_broker(free_port(), fleet="f", folder=tmp_path / "store")
            assert "another port" not in caplog.text, "it is not the port: waiting once is enough"
            with pytest.raises(ConfigError, match="another fleet"):
                await asyncio.to_thread(check_folder, tmp_path / "store")
        finally:
            await bus.close()
            await broker.stop()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"store\.folder=.*give another folder"):
        await Broker(fleet="f", folder=tmp_path / "file" / "store").start()


async def test_a_broker_whose_disk_was_full_is_started_again_once_it_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nats-server takes nothing more for a stream after a write that failed, whatever is freed."""
    room = SimpleNamespace(free=0)
    monkeypatch.setattr("shutil.disk_usage", lambda _: room)
    monkeypatch.setattr(broker_module, "LOOK_S", 0.02)
    broker = Broker(fleet="f", folder=tmp_path / "store")
    await broker.start()
    try:
        await asyncio.sleep(0.2)
        assert broker.restarts == 0
        before, room.free = broker.pid, 1 << 30
        await until(lambda: broker.restarts == 1 and broker.pid not in (None, before))
        await asyncio.sleep(0.2)
        assert (broker.restarts, broker.is_running) == (1, True)
    finally:
        await broker.stop()


async def test_an_operators_server_takes_the_accounts_that_are_printed(files: Path) -> None:
    printed = CliRunner().invoke(cli, ["settings", "--nats-permissions", "f"]).stdout
    (files / "gateways").write_text("gateways:gg")
    (files / "workers").write_text("workers:ww")
    passwords = {"GATEWAYS_PASSWORD": "gg", "WORKERS_PASSWORD": "ww"}
    async with server(files, printed, **passwords) as port:
        config = make(
            port,
            nats_credentials=str(files / "gateways"),
            nats_worker_credentials=str(files / "workers"),
        )
        await asyncio.to_thread(check_operators_broker, config)
        async with Account(operators_broker(config, "worker")) as worker:
            await worker.say(SUBJECTS.lease("w"))
            assert worker.refusals == []
            await worker.say(SUBJECTS.bookings("g"))
            await until(lambda: len(worker.refusals) == 1)


async def test_a_broker_whose_url_says_tls_is_never_spoken_to_in_the_clear(
    files: Path,
) -> None:
    cert, key, _ = certificate(files, "nats")
    right = str(files / "right")
    login = 'authorization: {user: "u", password: "right"}\n'
    settings = {"nats_credentials": right, "nats_ca": cert}
    tls = f"tls {{cert_file: {json.dumps(cert)}, key_file: {json.dumps(key)}}}\n"
    async with server(files, login + tls) as port:
        url = f"tls://127.0.0.1:{port}"
        await asyncio.to_thread(check_operators_broker, make(port, nats_url=url, **settings))
        unknown = make(port, nats_url=url, nats_credentials=right)
        with pytest.raises(ConfigError, match="certificate verify failed"):
            await asyncio.to_thread(check_operators_broker, unknown)
        missing = make(port, nats_url=url, nats_ca=str(files / "none"))
        with pytest.raises(ConfigError, match=r"nats_ca=.*No such file"):
            await asyncio.to_thread(check_operators_broker, missing)
    async with server(files, login) as port:
        plain = make(port, nats_url=f"tls://127.0.0.1:{port}", **settings)
        with pytest.raises(ConfigError, match="it offers no TLS"):
            await asyncio.to_thread(check_operators_broker, plain)
