"""Mocked engines as the worker deployment of the Ray app: gateway, NATS and Ray unchanged. K21, part."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from support.mock_scene import make_folder, mock_config
from support.serving import serving

pytestmark = [
    pytest.mark.service,
    pytest.mark.ray,
    pytest.mark.nats,
    pytest.mark.slow,
]

ENGINES_PER_WORKER = 25


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a running app with two replicas of 25 mocked engines."""
    config = mock_config(
        make_folder(tmp_path_factory.mktemp("tiny")),
        workers=2,
        mock__engines_per_worker=ENGINES_PER_WORKER,
        mock__speedup=50.0,
        routing__policy="round_robin",
        lease_period_s=None,
    )
    with serving(config) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


def complete(client: httpx.Client, number: int) -> dict[str, Any]:
    body = {
        "model": "tiny", "prompt": f"a tree of {number} trunks " * 8, "max_tokens": 6,
        "ignore_eos": True,
    }  # fmt: skip
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_all_engines_of_all_replicas_are_workers_and_answer(service: httpx.Client) -> None:
    names = {f"w{i}-{k}" for i in range(2) for k in range(ENGINES_PER_WORKER)}
    assert {w["worker"] for w in service.get("/health").json()["workers"]} == names
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda i: complete(service, i), range(2 * len(names))))
    assert {a["choices"][0]["mallee"]["worker"] for a in answers} == names
    assert {a["usage"]["completion_tokens"] for a in answers} == {6}


def test_a_fork_lands_on_its_capsules_engine(service: httpx.Client) -> None:
    made = service.post("/v1/capsules", json={"model": "tiny", "prompt": "many trunks " * 9}).json()
    body = {"n": 8, "max_tokens": 4, "temperature": 1, "seed": 7, "ignore_eos": True}
    answer = service.post(f"/v1/capsules/{made['id']}/fork", json=body).json()
    for choice in answer["choices"]:
        assert choice["mallee"]["worker"] == made["worker"]
        assert choice["mallee"]["prefill_tokens"] == 0
