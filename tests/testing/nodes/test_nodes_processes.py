"""Folders, processes and brokers of `mallee up`."""

import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from mallee.protocol.errors import ConfigError
from mallee.runtime.addresses import free_port
from mallee.runtime.bus.access import BrokerAccess
from mallee.runtime.bus.accounts import Passwords
from mallee.runtime.bus.broker import check_broker, find_binary
from mallee.testing.nodes.brokers import Server, configurations
from mallee.testing.nodes.folders import Folder, clear_abandoned
from support.waiting import wait_until

pytestmark = pytest.mark.process


def test_folders_without_their_owners_are_removed_and_others_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the processes of such an owner, which has its folder locked; a new one is not locked yet."""
    monkeypatch.setattr("tempfile.tempdir", "/tmp")  # paths of sockets are short
    mine = Folder()
    secret = Path(mine.secret("key", "k"))
    abandoned, young = (Path(tempfile.mkdtemp(prefix="mup-", dir="/tmp")) for _ in range(2))
    (abandoned / "owner").touch()
    program = [sys.executable, "-c", "import time; time.sleep(60)", f"{abandoned}/1/orders.json"]
    left = subprocess.Popen(program)
    try:
        told = [each for each in clear_abandoned() if str(abandoned) in each]
        said = f"removed {abandoned} of a `mallee up` that was killed"
        assert told == [f"{said}, and ended 1 processes of it"]
        left.wait(5)
        assert not abandoned.exists()
        assert young.is_dir()
        assert mine.made("a/b").is_dir()
        assert (secret.read_text(), secret.stat().st_mode & 0o777) == ("k", 0o600)
    finally:
        left.kill()
        left.wait()
        mine.remove()
        young.rmdir()
    assert not mine.path.exists()


def keeps(access: BrokerAccess) -> bool:
    """Whether a broker keeps values. Several servers choose one of them first, which takes seconds."""
    with suppress(ConfigError):
        check_broker(access, keeps_for="mallee")
        return True
    return False


@pytest.mark.parametrize("num", [1, 3])
def test_the_brokers_of_nodes_keep_what_gateways_store(num: int, tmp_path: Path) -> None:
    servers = [Server("127.0.0.1", free_port(), free_port()) for _ in range(num)]
    passwords = Passwords.new()
    folders = [tmp_path / str(i) for i in range(num)]
    written = configurations(servers, folders, fleet="mallee", passwords=passwords)
    running = []
    try:
        for folder, text in zip(folders, written, strict=True):
            folder.mkdir()
            (folder / "nats.conf").write_text(text)
            command = [str(find_binary()), "-c", str(folder / "nats.conf")]
            running.append(subprocess.Popen(command))
        for folder, server in zip(folders, servers, strict=True):
            access = BrokerAccess(server.url, login=passwords.login("gateway"))
            wait_until(partial(keeps, access), timeout_s=30.0)
            assert (folder / "nats" / "jetstream").is_dir()
    finally:
        for each in running:
            each.kill()
            each.wait()
