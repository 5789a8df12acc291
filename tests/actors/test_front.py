"""HTTP as users reach it: `mallee serve` with two gateways, behind HAProxy and behind Ray's Python proxy."""

import json
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import httpx
import psutil
import pytest

from mallee.runtime.proxy.choice import SWITCH, haproxy_binary
from support.mock_scene import make_folder
from support.serve_command import ServeCommand
from support.waiting import wait_until

pytestmark = [pytest.mark.process, pytest.mark.ray, pytest.mark.nats, pytest.mark.slow]

MODES = {"haproxy": "HAProxy", "python": "Ray's Python proxy"}
MAX_BODY = 200_000
ENGINES = 25  # of each worker


class Front(NamedTuple):
    """A running service, and the proxy before it."""

    mode: str
    service: ServeCommand

    @property
    def url(self) -> str:
        return self.service.url


@pytest.fixture(scope="module", params=list(MODES))
def front(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Front]:
    if request.param == "haproxy" and haproxy_binary() is None:
        pytest.skip("HAProxy does not run here")
    command = ["serve", "--model", str(make_folder(tmp_path_factory.mktemp("model")))]
    command += ["--served-model-name", "m"]
    for setting in (
        *("gateways=2", "workers=2", "engine.kind=mock", f"mock.engines_per_worker={ENGINES}"),
        *("routing.policy=round_robin", "drain_s=20", f"http.max_body_bytes={MAX_BODY}"),
    ):
        command += ["--set", setting]
    switch = {SWITCH: str(int(request.param == "haproxy"))}
    with ServeCommand(*command, environment=switch) as service:
        yield Front(request.param, service)


until = partial(wait_until, timeout_s=15.0)


def body(**options: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "a tree", "ignore_eos": True, "max_tokens": 4, **options}


def talk(front: Front, raw: bytes, *, ends: bytes) -> bytes:
    """Everything that is answered to `raw` on a connection of its own, until `ends` is there."""
    found = b""
    with socket.create_connection(("127.0.0.1", front.service.port), timeout=10) as sock:
        sock.sendall(raw)
        while ends not in found and (part := sock.recv(65536)):
            found += part
    return found


def post(content: bytes, *, length: int | None = None, headers: str = "") -> bytes:
    """A request for a completion, with `content` announced as of `length` bytes."""
    nbytes = len(content) if length is None else length
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {nbytes}\r\n{headers}\r\n"
    return head.encode() + content


def rows(front: Front) -> int:
    """Branches that run, as one of the gateways sees them."""
    found = httpx.get(f"{front.url}/health").json()["workers"]
    return sum(worker["rows"] for worker in found)


def test_the_start_up_line_names_the_proxy(front: Front) -> None:
    assert f"at {front.url}/v1 behind {MODES[front.mode]}" in front.service.said[-1]


def test_nothing_but_the_known_ports_of_ray_listens_beyond_loopback(front: Front) -> None:
    """Ray Serve's gRPC server, one in each replica, has no setting for its address."""
    family = [psutil.Process(front.service.process.pid), *front.service.family()]
    open_wide = []
    for process in family:
        with suppress(psutil.NoSuchProcess):  # one that ended meanwhile: HAProxy's former, say
            open_wide += [
                (process.name(), connection.laddr.port)
                for connection in process.net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN
                and connection.laddr.ip not in ("127.0.0.1", "::ffff:127.0.0.1", "::1")
            ]
    assert all(name.startswith("ray::ServeRepl") for name, _ in open_wide), open_wide
    assert len(open_wide) <= 5, open_wide  # broker, two workers, two gateways


def metrics(front: Front) -> dict[str, str]:
    """The metrics of both gateways, by name."""
    found: dict[str, str] = {}

    def ask() -> bool:
        text = httpx.get(f"{front.url}/metrics").text
        names = set(re.findall(r'gateway="([^"]+)"', text))
        samples = [line for line in text.splitlines() if not line.startswith("#")]
        assert len(names) == 1
        assert all("gateway=" in line for line in samples)
        found[names.pop()] = text
        return len(found) == 2

    until(ask)
    return found


def test_health_and_metrics_name_the_gateway_that_answers(front: Front) -> None:
    seen = set()
    until(lambda: seen.add(httpx.get(f"{front.url}/health").json()["gateway"]) or len(seen) == 2)  # type: ignore[func-returns-value]
    numbers = {name.partition("-")[0] for name in seen}  # an update makes no new series
    assert set(metrics(front)) == numbers


def test_a_client_that_hangs_up_ends_its_branches(front: Front) -> None:
    content = json.dumps(body(stream=True, n=3, max_tokens=1900)).encode()
    assert b"data: " in talk(front, post(content), ends=b"data: ")
    until(lambda: rows(front) == 0, timeout_s=5)


def test_connections_are_kept_and_errors_on_them_end_nothing(front: Front) -> None:
    """Three requests in one write: the second is wrong, the third is answered."""
    good = json.dumps(body()).encode()
    last = post(good, headers="Connection: close\r\n")
    found = talk(front, post(good) + post(b"[]") + last, ends=b"never there")
    assert re.findall(rb"HTTP/1\.1 (\d+)", found) == [b"200", b"400", b"200"]


def test_a_client_may_wait_for_leave_to_send_its_body(front: Front) -> None:
    content = json.dumps(body()).encode()
    with socket.create_connection(("127.0.0.1", front.service.port), timeout=10) as sock:
        sock.sendall(post(b"", length=len(content), headers="Expect: 100-continue\r\n"))
        assert sock.recv(4096).startswith(b"HTTP/1.1 100")
        sock.sendall(content)
        assert sock.recv(4096).startswith(b"HTTP/1.1 200")


def test_running_streams_end_before_the_service_does(front: Front) -> None:
    """The last test of its service: SIGTERM while 8 streams run."""

    def stream(_: int) -> str:
        content = body(stream=True, max_tokens=400)
        return httpx.post(f"{front.url}/v1/completions", json=content, timeout=60).text

    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(stream, range(8))
        until(lambda: rows(front) == 8)
        front.service.process.send_signal(signal.SIGTERM)
        texts = list(answers)
    assert [text.endswith("data: [DONE]\n\n") for text in texts] == [True] * 8
    assert all('"finish_reason":"length"' in text for text in texts)
    assert front.service.process.wait(60) == 0
