"""Ray Serve's autoscaler over mocked workers: more under load, fewer after it, no request lost."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from support.mock_scene import make_folder, mock_config
from support.serving import serving
from support.waiting import wait_until

pytestmark = [
    pytest.mark.alone,
    pytest.mark.ray,
    pytest.mark.nats,
    pytest.mark.slow,
]

ENGINES = 2  # of a replica


@contextmanager
def clients(url: str, n: int, failures: list[str]) -> Iterator[None]:
    """`n` clients that send one request after the other until the block ends."""
    stop = threading.Event()
    body = {"model": "tiny", "prompt": "a tree", "max_tokens": 200, "ignore_eos": True}

    def run() -> None:
        with httpx.Client(base_url=url, timeout=60) as client:
            while not stop.is_set():
                try:
                    answer = client.post("/v1/completions", json=body)
                except httpx.HTTPError as error:
                    failures.append(repr(error))
                else:
                    if answer.status_code != 200:
                        failures.append(answer.text)

    with ThreadPoolExecutor(n) as pool:
        for _ in range(n):
            pool.submit(run)
        try:
            yield
        finally:
            stop.set()


def test_a_second_worker_comes_with_the_load_and_goes_after_it(tmp_path: Path) -> None:
    config = mock_config(
        make_folder(tmp_path),
        mock__engines_per_worker=ENGINES,
        mock__speedup=1.0,
        scheduler__max_rows=4,
        autoscaling__max_workers=2,
        autoscaling__lower_after_s=1.0,
    )
    failures: list[str] = []
    with serving(config) as url, httpx.Client(base_url=url, timeout=30) as reader:

        def workers() -> int:
            return len(reader.get("/health").json()["workers"])

        assert workers() == ENGINES
        with clients(url, 1, failures):
            with clients(url, 15, failures):
                wait_until(lambda: workers() == 2 * ENGINES, timeout_s=60)
            wait_until(lambda: workers() == ENGINES, timeout_s=90)
            wait_until(lambda: reader.get("/health").json()["status"] == "ok", timeout_s=20)
    assert failures == []
