"""Ray Serve's autoscaler over mocked workers: one to four under a burst and back, nothing is lost."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from mallee.client import Mallee
from support.mock_scene import make_folder, mock_config
from support.serve_command import serving
from support.waiting import wait_until

pytestmark = [
    pytest.mark.process,
    pytest.mark.ray,
    pytest.mark.nats,
    pytest.mark.slow,
]

MOST = 4


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


def test_workers_come_with_a_burst_and_go_after_it_and_capsules_stay(tmp_path: Path) -> None:
    """Forks of kept capsules are the same with one worker, with four, and with one again."""
    config = mock_config(
        make_folder(tmp_path),
        mock__engines_per_worker=1,
        mock__speedup=1.0,
        scheduler__max_rows=4,
        autoscaling__max_workers=MOST,
        autoscaling__lower_after_s=1.0,
    )
    failures: list[str] = []
    with (
        serving(config.model_dump(mode="json")) as service,
        httpx.Client(base_url=service.url, timeout=30) as reader,
        Mallee(service.url) as sdk,
    ):
        capsules = [sdk.prefill(f"{n} trunks of a tree from one root" * 4) for n in range(4)]

        def workers() -> int:
            return len(reader.get("/health").json()["workers"])

        def forks() -> list[list[str]]:
            return [
                [branch.text for branch in each.fork([" a", " b"], max_tokens=20, seed=3).wait()]
                for each in capsules
            ]

        texts = forks()
        assert workers() == 1
        with clients(service.url, 1, failures):
            with clients(service.url, 23, failures):
                wait_until(lambda: workers() == MOST, timeout_s=120)
                assert forks() == texts
            wait_until(lambda: workers() == 1, timeout_s=120)
            assert forks() == texts
            wait_until(lambda: reader.get("/health").json()["status"] == "ok", timeout_s=20)
    assert failures == []
