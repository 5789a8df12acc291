"""A deploy by the documented commands, over Ray's token: strangers are refused, and secrets shown nowhere."""

import base64
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from mallee.runtime.addresses import free_port
from mallee.runtime.bus.broker import find_binary
from mallee.runtime.config import AppConfig
from support.certificates import certificate
from support.folders import short_folder
from support.mock_scene import make_folder
from support.otlp import Receiver, receiving
from support.waiting import wait_until

pytestmark = [pytest.mark.process, pytest.mark.ray, pytest.mark.nats, pytest.mark.slow]

until = partial(wait_until, timeout_s=120.0)
OPERATOR = "MALLEE_API_KEY"
SERVICES = ("nats", "nats of workers", "nats, wrong", "links", "key, wrong", "backend of spans")
CLIENTS = ("prompt", "system prompt", "session", "user", "schema", "stop string", "cache key")
"""Kinds of texts in a request of a client's, none of which may be logged."""


class Head:
    """A head of Ray, started as docs/deploy.md says, and the commands that talk to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {"gcs": free_port(), "dashboard": free_port(), "http": free_port()}
        self.secrets = {OPERATOR: secrets.token_hex(24)}
        self.rest = f"http://127.0.0.1:{self.ports['dashboard']}"
        self.url = f"http://127.0.0.1:{self.ports['http']}"
        self.said = ""
        self.spans: Receiver | None = None
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
            "HOME": str(folder),
            "RAY_AUTH_MODE": "token",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_SERVE_ENABLE_HA_PROXY": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_raylet_start_wait_time_s": "150",
            "RAY_DASHBOARD_ADDRESS": self.rest,
            OPERATOR: self.secrets[OPERATOR],
        }

    def run(self, command: str, *arguments: str) -> str:
        """The output of a command of Ray or Serve. Fails if it does."""
        program = str(Path(sys.executable).parent / command)
        done = subprocess.run(
            [program, *arguments],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            umask=0o077,
            text=True,
            timeout=90,
            check=False,
        )
        self.said += done.stdout
        assert done.returncode == 0, done.stdout
        return done.stdout

    def as_stranger(self, code: str) -> str:
        """The output of a Python program that has no token."""
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**self.environment, "HOME": "/nowhere", "RAY_AUTH_MODE": "disabled"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        )
        return done.stdout

    @contextmanager
    def running(self) -> Iterator[None]:
        self.run("ray", "get-auth-token", "--generate")
        token = self.folder / ".ray" / "auth_token"
        self.secrets["token of Ray"] = token.read_text()
        self.said = ""  # the command above is there to tell it
        assert token.stat().st_mode & 0o077 == 0
        options = {
            "node-ip-address": "127.0.0.1",
            "port": self.ports["gcs"],
            "dashboard-port": self.ports["dashboard"],
            "dashboard-agent-listen-port": free_port(),
            "ray-client-server-port": free_port(),
            "temp-dir": self.folder / "r",
            "num-cpus": 4,
            "object-store-memory": 100 << 20,
        }
        program = str(Path(sys.executable).parent / "ray")
        with (self.folder / "head.txt").open("w") as out:
            command = [program, "start", "--head", "--block"]
            command += [f"--{name}={value}" for name, value in options.items()]
            head = subprocess.Popen(command, env=self.environment, stdout=out, stderr=out)
        try:
            until(lambda: self.is_up)
            yield
        finally:
            self.end(head)

    def end(self, head: "subprocess.Popen[bytes]") -> None:
        mine = self.processes
        head.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            head.wait(5)
        for process in mine:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        head.wait()

    @property
    def is_up(self) -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.rest}/api/version").status_code in (200, 401)
        return False

    @property
    def processes(self) -> list[psutil.Process]:
        """Those of this head: they alone have this home."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("HOME") == str(self.folder):
                    found.append(process)
        return found

    def deploy(self, args: dict[str, Any], until_status: str) -> str:
        """The output of `serve status` in the end."""
        file = self.folder / "serve.yaml"
        app = {"name": "mallee", "route_prefix": "/", "import_path": "mallee.actors.app:app"}
        http = {"host": "127.0.0.1", "port": self.ports["http"]}
        document = {"http_options": http, "applications": [{**app, "args": args}]}
        file.write_text(yaml.safe_dump(document))
        self.run("serve", "deploy", str(file))
        until(lambda: f"status: {until_status}" in self.run("serve", "status"))
        return self.run("serve", "status")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """A service with a secret in every place that takes one, after requests and deploys that failed."""
    files = tmp_path_factory.mktemp("files")
    with short_folder() as folder, receiving() as receiver:
        head = Head(Path(folder))
        head.secrets |= {name: secrets.token_hex(24) for name in (*SERVICES, *CLIENTS)}
        for name in ("nats", "nats of workers", "nats, wrong"):
            (files / name).write_text(f"{name.replace(' ', '')}:{head.secrets[name]}")
        head.spans = receiver
        head.environment |= {
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url,
            "OTEL_EXPORTER_OTLP_HEADERS": f"api-key={head.secrets['backend of spans']}",
            "OTEL_BSP_SCHEDULE_DELAY": "200",
        }
        (files / "links").write_text(head.secrets["links"])
        tls = certificate(files, "links")
        head.secrets["TLS key"] = Path(tls.key).read_text().splitlines()[1]
        with nats_server(head, files) as url, head.running():
            args: dict[str, Any] = {
                "model": str(make_chat_folder(files)),
                "served_model_name": "m",
                "engine": {"kind": "mock"},
                "mock": {"speedup": 0},
                "nats_url": url,
                "nats_credentials": str(files / "nats"),
                "nats_worker_credentials": str(files / "nats of workers"),
                "links": {
                    "tcp": "always",
                    "secret_file": str(files / "links"),
                    "tls_cert": tls.cert,
                    "tls_key": tls.key,
                },
                "drain_s": 1,
                "telemetry": {"log_level": "debug", "log_format": "json"},
            }
            assert repr(AppConfig.model_validate(args))
            head.deploy(args, "RUNNING")
            wrong = {**args, "nats_worker_credentials": str(files / "nats, wrong")}
            told = head.deploy(wrong, "DEPLOY_FAILED")
            assert "refuses the credentials of nats_worker_credentials" in told
            yield head


def make_chat_folder(folder: Path) -> Path:
    """A model's folder with a chat template."""
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    made = make_folder(folder)
    (made / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return made


@contextmanager
def nats_server(head: Head, files: Path) -> Iterator[str]:
    port, conf = free_port(), files / "nats.conf"
    users = [
        {"user": name.replace(" ", ""), "password": head.secrets[name]}
        for name in ("nats", "nats of workers")
    ]
    stored = f'jetstream {{store_dir: "{files / "nats-store"}"}}'
    accounts = f"authorization: {json.dumps({'users': users})}"
    conf.write_text(f'listen: "127.0.0.1:{port}"\n{stored}\n{accounts}\n')
    server = subprocess.Popen([str(find_binary()), "-c", str(conf)], stderr=subprocess.DEVNULL)
    try:
        yield f"nats://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def test_who_has_no_token_is_refused_by_ray(head: Head) -> None:
    """Its REST API, jobs, and the ports of its own protocol."""
    assert httpx.get(f"{head.rest}/api/serve/applications/").status_code == 401
    assert httpx.put(f"{head.rest}/api/serve/applications/", json={}).status_code == 401
    assert httpx.post(f"{head.rest}/api/jobs/", json={"entrypoint": "id"}).status_code == 401
    guess = {"authorization": f"Bearer {'0' * 64}"}
    assert httpx.get(f"{head.rest}/api/serve/applications/", headers=guess).status_code == 403
    said = head.as_stranger(
        f"import ray; ray.init('127.0.0.1:{head.ports['gcs']}'); print('joined')"
    )
    assert "InvalidAuthToken" in said
    assert "joined" not in said


def test_ray_and_mallee_listen_on_loopback_but_for_the_replicas_ports(head: Head) -> None:
    """Of which Ray 2.60 has no setting; they want the token too."""
    names = []
    for process in head.processes:
        with suppress(psutil.Error):
            for each in process.net_connections("tcp"):
                is_local = each.laddr.ip.removeprefix("::ffff:") in ("127.0.0.1", "::1")
                if each.status == psutil.CONN_LISTEN and not is_local:
                    names.append(process.cmdline()[0].split(":mallee:")[0])
    assert set(names) <= {"ray::ServeReplica"}, names


def ask_with_secrets(client: httpx.Client, secret: dict[str, str]) -> None:
    """Requests with a secret in each field that takes text, those that are refused too."""
    chat = {
        "model": "m",
        "messages": [
            {"role": "system", "content": secret["system prompt"]},
            {"role": "user", "content": secret["prompt"]},
        ],
        "max_tokens": 8,
        "user": secret["user"],
        "mallee": {"session": secret["session"]},
        "prompt_cache_key": secret["cache key"],
        "stop": [secret["stop string"]],
    }
    schema = {"name": "s", "schema": {"const": secret["schema"]}}
    constrained = {"type": "json_schema", "json_schema": schema}
    broken = {
        "type": "json_schema",
        "json_schema": {"name": "s", "schema": {"type": secret["schema"]}},
    }
    for more, status in (
        ({}, 200),
        ({"n": 3, "stream": True}, 200),
        ({"response_format": constrained, "max_tokens": 90}, 400),
        ({"response_format": broken}, 400),
        ({"user": [secret["user"]]}, 400),
        ({"model": secret["prompt"]}, 404),
        ({"stop": [secret["stop string"]] * 40}, 400),
    ):
        answer = client.post("/v1/chat/completions", json=chat | more)
        assert answer.status_code == status, answer.text
    session = client.get(f"/v1/sessions/{secret['session']}/record")
    assert session.status_code == 400, session.text
    with client.stream("POST", "/v1/chat/completions", json=chat | {"stream": True}) as answer:
        next(answer.iter_lines())  # and hangs up


def check_logs(files: dict[str, str]) -> None:
    """Records of each replica, once it has read its settings, are objects; probes left none."""
    for deployment in ("Gateway", "Worker"):
        lines = [
            line for name, text in files.items() if deployment in name for line in text.splitlines()
        ]
        found = [json.loads(line) for line in lines if line.startswith("{")]
        assert any(each["process"] == deployment.lower() for each in found), files
        assert not any("/health" in each["message"] for each in found)


def test_planted_secrets_are_found_nowhere(head: Head) -> None:
    """In no log of the session, process list, `serve config`, REST answer, metric, span, error or output."""
    texts: dict[str, str] = {}
    operator = {"authorization": f"Bearer {head.secrets[OPERATOR]}"}
    stranger = {"authorization": f"Bearer {head.secrets['key, wrong']}"}
    body = {"model": "m", "prompt": "a tree", "max_tokens": 4}
    with httpx.Client(base_url=head.url, timeout=30, headers=operator) as client:
        ask_with_secrets(client, head.secrets)
    with httpx.Client(base_url=head.url, timeout=30) as client:
        answer = client.post("/v1/completions", json=body, headers=operator)
        assert answer.status_code == 200, answer.text
        for headers in (operator, stranger, {}):
            for path in ("/health", "/metrics", "/v1/router/workers", "/v1/models", "/v1/nothing"):
                texts[f"{path} {len(texts)}"] = client.get(path, headers=headers).text
            for wrong in ({**body, "n": -1}, {**body, "model": "x"}, [], {"prompt": 3}):
                answer = client.post("/v1/completions", json=wrong, headers=headers)
                assert answer.status_code >= 400
                texts[f"error {len(texts)}"] = answer.text
    texts["serve config"] = head.run("serve", "config")
    token = {"authorization": f"Bearer {head.secrets['token of Ray']}"}
    answer = httpx.get(f"{head.rest}/api/serve/applications/", headers=token)
    assert "nats_credentials" in answer.text
    texts["REST"] = answer.text
    texts["commands"] = head.said
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            texts[f"process {process.pid}"] = " ".join(process.cmdline())
    session = [each for each in (head.folder / "r").rglob("*") if each.is_file()]
    logs = [each for each in (*session, head.folder / "head.txt") if not each.is_symlink()]
    check_logs({each.name: each.read_text() for each in logs if each.name.startswith("replica_")})
    assert head.spans is not None
    until(lambda: head.spans is not None and bool(head.spans.named("engine")))
    texts["spans"] = head.spans.raw.decode(errors="replace")
    texts |= {str(each): each.read_bytes().decode(errors="replace") for each in logs}
    for name, secret in head.secrets.items():
        encoded = base64.b64encode(secret.encode()).decode().rstrip("=")
        shown = [place for place, text in texts.items() if secret in text or encoded in text]
        assert shown == [], name
