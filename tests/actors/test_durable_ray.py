"""Durable capsules over processes, by default settings: Ctrl-C of `mallee serve`, and a rolling update."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.ray_marks import PROCESS_MARKS, deploy, local_serve
from support.serve_command import ServeCommand
from support.waiting import wait_until

pytestmark = [*PROCESS_MARKS, pytest.mark.timeout(500)]

SAMPLED = {"n": 1, "max_tokens": 12, "temperature": 1.0, "seed": 7, "ignore_eos": True}
until = partial(wait_until, timeout_s=150.0)


class Client:
    """A user, who keeps the ids of capsules and what a fork of each answered."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """The answer, asked for again for as long as the server says when."""
        for _ in range(30):
            answer = self._http.request(method, path, json=body)
            if answer.status_code != 503:
                break
            time.sleep(float(answer.headers["retry-after"]))
        return answer

    def post(self, path: str, **body: Any) -> Any:
        answer = self.ask("POST", path, body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def health(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = self._http.get("/health", timeout=5).json()
        except (httpx.HTTPError, ValueError):
            return {}
        return found

    @property
    def lives(self) -> set[tuple[str, str]]:
        return {(w["worker"], w["incarnation"]) for w in self.health().get("workers", ())}

    def fork(self, capsule: str) -> tuple[str, int]:
        choice = self.post(f"/v1/capsules/{capsule}/fork", **SAMPLED)["choices"][0]
        return choice["text"], choice["mallee"]["prefill_tokens"]

    def make_durable(self, n: int) -> dict[str, str]:
        answers = {}
        for i in range(n):
            made = self.post("/v1/capsules", prompt=f"{i}. A tree of many trunks. " * 3, ttl_s=900)
            answers[made["id"]], _ = self.fork(made["id"])
            self.demote(made["id"])
        return answers

    def demote(self, capsule: str) -> None:
        assert self.post(f"/v1/capsules/{capsule}/demote", tier="disk")["tier"] == "disk"

    def tier(self, capsule: str) -> str | None:
        found: str | None = self.ask("GET", f"/v1/capsules/{capsule}").json().get("tier")
        return found

    def check(self, answers: dict[str, str]) -> None:
        """All are on disk, and answer as ever, without a token of their prompts computed."""
        for capsule, text in answers.items():
            assert self.tier(capsule) == "disk"
            assert self.fork(capsule) == (text, 0)
            self.demote(capsule)


@contextmanager
def user(port: int) -> Iterator[Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        yield Client(http)


@contextmanager
def serving(model: Path, disk: Path, *, workers: int) -> Iterator[Client]:
    """`mallee serve`, until Ctrl-C."""
    sets = [f"engine.disk_path={disk}", "engine.kv_tokens=4096", "engine.dtype=float32"]
    options = ["--model", str(model), "--workers", str(workers), *(f"--set={x}" for x in sets)]
    with ServeCommand("serve", *options) as service, user(service.port) as client:
        yield client
        assert service.stop(signal.SIGINT) == 0, service.said


def test_capsules_answer_after_ctrl_c_and_another_start(model: Path, tmp_path: Path) -> None:
    """F24, S16, X28, part: plain `mallee serve`; then again with one worker less, which adopts."""
    disk = tmp_path / "kv"
    with serving(model, disk, workers=2) as client:
        answers = client.make_durable(6)
        client.check(answers)
    assert (disk / "default" / "secret").stat().st_mode & 0o777 == 0o600
    assert len(list(disk.glob("*/*/blocks-*"))) == 2
    with serving(model, disk, workers=2) as client:
        client.check(answers)
    with serving(model, disk, workers=1) as client:
        client.check(answers)
    assert len(list(disk.glob("*/*/blocks-*"))) == 1


def test_capsules_stay_durable_in_a_rolling_update(model: Path, tmp_path: Path) -> None:
    """X28, part: of this service's life, and of one before, whose texts no gateway knows."""
    disk = tmp_path / "kv"
    with serving(model, disk, workers=2) as client:
        older = client.make_durable(4)
    with local_serve() as port, user(port) as client:
        engine = {"kv_tokens": 4096, "dtype": "float32", "disk_path": str(disk)}
        given = {"model": str(model), "workers": 2, "engine": engine}
        deploy(given)
        until(lambda: len(client.lives) == 2 and client.health()["status"] == "ok")
        answers = {**older, **client.make_durable(4)}
        for drain_s in (29, 28):
            before = client.lives
            deploy({**given, "drain_s": drain_s})
            until(lambda: len(client.lives) == 2 and not before & client.lives)  # noqa: B023
            until(lambda: client.health().get("status") == "ok")
            # A gateway that began after the last one had left learns of them as they are adopted.
            until(lambda: {client.tier(each) for each in answers} == {"disk"}, timeout_s=15)
            client.check(answers)
