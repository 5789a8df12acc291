"""Processes of `mallee up`: NATS servers, the entry before the gateways, and those of a killed one."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from mallee.runtime.addresses import free_port
from mallee.runtime.bus.accounts import Passwords
from mallee.runtime.bus.broker import find_binary
from mallee.runtime.proxy.choice import haproxy_binary
from mallee.testing.nodes import network
from mallee.testing.nodes.brokers import Server, configurations
from mallee.testing.nodes.folders import Folder, clear_abandoned
from mallee.testing.nodes.front import Front
from support.waiting import wait_until

pytestmark = [pytest.mark.process, pytest.mark.nats]


def test_the_configurations_of_the_nats_servers_are_valid(tmp_path: Path) -> None:
    servers = [Server(network.address(i), 4222, 6222) for i in (1, 2, 3)]
    logs = [str(tmp_path / f"{i}.log") for i in (1, 2, 3)]
    written = configurations(servers, logs, fleet="f", passwords=Passwords.new())
    for number, text in enumerate(written):
        file = tmp_path / f"{number}.conf"
        file.write_text(text)
        done = subprocess.run(
            [find_binary(), "-t", "-c", file], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        others = [each.host for each in servers if each != servers[number]]
        assert [host for host in (s.host for s in servers) if f"@{host}:6222" in text] == others


class _Gateway(BaseHTTPRequestHandler):
    delay_s = 0.0

    def do_GET(self) -> None:
        time.sleep(self.delay_s)
        port = str(self.server.server_address[1])
        self.send_response(200)
        self.send_header("content-length", str(len(port)))
        self.end_headers()
        self.wfile.write(port.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def front(tmp_path: Path) -> Iterator[tuple[str, list[int]]]:
    """The entry's URL, and the two ports behind it."""
    if haproxy_binary() is None:
        pytest.skip("no HAProxy here")
    ports = [free_port(), free_port()]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = Front(
            listener,
            [f"127.0.0.1:{port}" for port in ports],
            folder=tmp_path,
            max_connections=64,
            max_per_client=8,
        )
        made.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", ports
        finally:
            made.stop()


def _serve(port: int) -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", port), _Gateway)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return server


def test_the_entry_sends_requests_to_gateways_that_are_there(
    front: tuple[str, list[int]],
) -> None:
    """And finds one that comes; without any, a refusal says so."""
    url, ports = front

    def answer() -> tuple[int, str]:
        try:
            found = httpx.get(f"{url}/v1/models", timeout=5, trust_env=False)
        except httpx.HTTPError as error:
            return 0, repr(error)
        return found.status_code, found.text

    wait_until(lambda: answer()[0] == 503 and '"no_gateway"' in answer()[1], timeout_s=10)
    first = _serve(ports[0])
    wait_until(lambda: answer() == (200, str(ports[0])), timeout_s=10)
    second = _serve(ports[1])
    wait_until(lambda: answer() == (200, str(ports[1])), timeout_s=10)
    first.shutdown()
    first.server_close()
    assert {answer() for _ in range(8)} == {(200, str(ports[1]))}
    second.shutdown()
    second.server_close()


def test_a_gateway_that_answers_late_stays_in_the_entry(
    front: tuple[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is busy: a machine that is gone accepts no connection."""
    url, ports = front
    monkeypatch.setattr(_Gateway, "delay_s", 0.8)
    server = _serve(ports[0])
    try:
        wait_until(lambda: _status(url) == 200, timeout_s=10)
        assert {_status(url) for _ in range(4)} == {200}
    finally:
        server.shutdown()
        server.server_close()


def _status(url: str) -> int:
    return httpx.get(f"{url}/v1/models", timeout=5, trust_env=False).status_code


def test_what_a_killed_one_left_is_removed_and_what_lives_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/tmp")  # paths of sockets are short
    mine = Folder()
    program = "from mallee.testing.nodes.folders import Folder; import os;" + (
        " print(Folder().path, flush=True); os.kill(os.getpid(), 9)"
    )
    try:
        killed = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"TMPDIR": "/tmp"},
        )
        left = Path(killed.stdout.strip())
        assert left.is_dir()
        command = [sys.executable, "-c", "import time; time.sleep(60)", f"{left}/1/orders.json"]
        process = subprocess.Popen(command)
        try:
            told = [each for each in clear_abandoned() if str(left) in each]
            assert told == [
                f"removed {left} of a `mallee up` that was killed, and ended 1 processes of it"
            ]
            process.wait(5)
        finally:
            process.kill()
            process.wait()
        assert not left.exists()
        assert mine.path.is_dir()
    finally:
        mine.remove()
    assert not mine.path.exists()
