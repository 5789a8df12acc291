"""The whole app on a local Ray cluster: a tiny random model behind the real HTTP API."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from mallee.actors.config import AppConfig, EngineSettings
from support.serving import serving
from support.waiting import wait_until

pytestmark = [
    pytest.mark.process,
    pytest.mark.ray,
    pytest.mark.nats,
    pytest.mark.slow,
]

VOCABULARY = 300


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with a byte-level tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from mallee.testing.random_model import random_model

    folder = tmp_path_factory.mktemp("tiny")
    random_model(vocab_size=VOCABULARY, max_position_embeddings=512).save(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["a mallee is a tree of many trunks"],
        trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def service(model_folder: Path) -> Iterator[httpx.Client]:
    """A client of a running app with two workers.

    In a process of its own: Ray keeps the way a process authenticates, and the modules that ran before
    this one in the same process had another.
    """
    config = AppConfig(
        model=str(model_folder),
        served_model_name="tiny",
        workers=2,
        engine=EngineSettings(kv_tokens=4096, threads=1),
    )
    with serving(config) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


def workers(client: httpx.Client) -> dict[str, str]:
    """Incarnation by worker, as the gateway sees them."""
    body = client.get("/health").json()
    return {w["worker"]: w["incarnation"] for w in body["workers"]}


def complete(client: httpx.Client, prompt: str, **options: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "temperature": 0, "ignore_eos": True, **options}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


until = partial(wait_until, timeout_s=30.0)


def processes(part: str) -> list[psutil.Process]:
    """Running descendants of this process with `part` in their command line."""
    return [
        p
        for p in psutil.Process().children(recursive=True)
        if p.is_running() and part in " ".join(p.cmdline())
    ]


def test_requests_are_answered_by_both_workers(service: httpx.Client) -> None:
    assert set(workers(service)) == {"w0", "w1"}
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda i: complete(service, f"tree {i}", max_tokens=8), range(32)))
    assert {a["usage"]["completion_tokens"] for a in answers} == {8}
    assert {a["choices"][0]["mallee"]["worker"] for a in answers} == {"w0", "w1"}


def test_a_fork_lands_on_the_capsules_worker_without_prefill(service: httpx.Client) -> None:
    made = service.post("/v1/capsules", json={"model": "tiny", "prompt": "many trunks " * 4}).json()
    body = {"n": 8, "max_tokens": 4, "temperature": 1, "seed": 7, "ignore_eos": True}
    answer = service.post(f"/v1/capsules/{made['id']}/fork", json=body).json()
    assert [c["index"] for c in answer["choices"]] == list(range(8))
    for choice in answer["choices"]:
        assert choice["mallee"]["worker"] == made["worker"]
        assert choice["mallee"]["prefill_tokens"] == 0


def test_a_killed_broker_comes_back_and_requests_go_on_meanwhile(service: httpx.Client) -> None:
    (broker,) = processes("nats-server")
    os.kill(broker.pid, signal.SIGKILL)
    assert complete(service, "a tree", max_tokens=4)["usage"]["completion_tokens"] == 4
    until(lambda: bool(processes("nats-server")))
    until(lambda: service.get("/health").json()["status"] == "ok")
    assert set(workers(service)) == {"w0", "w1"}


def test_a_killed_worker_is_noticed_in_two_seconds_and_returns_under_its_name(
    service: httpx.Client,
) -> None:
    before = workers(service)
    replicas = processes("ServeReplica:mallee:Worker")
    assert len(replicas) == 2
    os.kill(replicas[0].pid, signal.SIGKILL)
    seconds = until(lambda: len(workers(service)) == 1)
    assert seconds < 2.0
    (survivor,) = workers(service)
    answer = complete(service, "a tree", max_tokens=4)
    assert answer["choices"][0]["mallee"]["worker"] == survivor
    until(lambda: len(workers(service)) == 2)
    after = workers(service)
    assert after.keys() == before.keys()
    assert after[survivor] == before[survivor]
    (returned,) = after.keys() - {survivor}
    assert int(after[returned]) > int(before[returned])
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: complete(service, f"new {i}", max_tokens=4), range(16)))
    assert {a["choices"][0]["mallee"]["worker"] for a in answers} == {"w0", "w1"}
