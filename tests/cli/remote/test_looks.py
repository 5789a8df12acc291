"""`mallee top`, `mallee explain` and `mallee doctor` at a running service."""

import json

import pytest
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from mallee.actors.addresses import free_port
from mallee.cli.main import cli
from mallee.cli.remote.fleet import Answers, Metrics, Sample, draw
from mallee.client import Mallee
from mallee.protocol.errors import ConfigError


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


@pytest.mark.nats
def test_the_fleet_is_shown_once_and_as_json(url: str, client: Mallee) -> None:
    client.prefill("a tree of many trunks")
    shown = run("top", "--url", url, "--once").stdout.splitlines()
    assert shown[0] == "mallee ok  gateway g0, broker up, 2 workers"
    assert shown[1].startswith("waiting 0  capsules 1")
    assert [line.split()[:2] for line in shown[3:]] == [["w0", "ready"], ["w1", "ready"]]
    assert all(len(line.rstrip()) <= 80 for line in shown)
    body = json.loads(run("top", "--url", url, "--json").stdout)
    assert (len(body["workers"]), body["health"]["status"], body["capsules"]) == (2, "ok", 1)


def sample(at: float, tokens: float, active: int = 0, gateway: str = "g0") -> Sample:
    worker = {
        **{"worker": "w0", "state": "ready", "active_blocks": active, "num_blocks": 100, "rows": 3},
        **{"waiting": 1, "prefill_tokens": 5, "indexed_blocks": 9, "lease_age_s": 0.5},
        **{"weight_version": "base", "device": "NVIDIA H100"},
    }
    health = {"status": "degraded", "gateway": gateway, "broker": "down", "workers": [{}]}
    metrics = f'mallee_output_tokens_total{{gateway="{gateway}"}} {tokens}'
    return Sample.of(at, Answers(health, [worker], metrics))


def test_speeds_are_of_the_time_between_two_looks() -> None:
    before, now = sample(10.0, 100.0), sample(12.0, 400.0, active=95)
    assert now.rates(before)["output tokens/s"] == 150.0
    assert sample(14.0, 5.0).rates(now)["output tokens/s"] == 0.0  # the gateway began anew
    assert now.rates(None) == {}
    assert now.rates(sample(11.0, 100.0, gateway="g1")) == {}  # another's counters
    console = Console(width=100)
    with console.capture() as shown:
        console.print(draw(now, now.rates(before)))
    lines = shown.get().splitlines()
    assert "mallee degraded  gateway g0, broker down, 1 workers" in lines[0]
    assert "output tokens/s 150" in lines[1]
    assert lines[3].split() == [
        *("w0", "ready", "██████████", "95%", "3", "1", "5", "9", "0.5", "s", "base"),
        *("NVIDIA", "H100"),
    ]


@pytest.mark.nats
def test_a_decision_is_explained_with_its_prices(url: str, client: Mallee) -> None:
    (branch,) = client.complete("a tree of many trunks", max_tokens=3)
    name = str(branch.request_id)
    told = run("explain", name, "--url", url).stdout
    assert f"{name} went to {branch.worker} (" in told
    assert "2 workers could take it" in told
    assert "its prompt was served as" in told
    assert told.splitlines()[-1].split()[:3] == ["0", "length", str(branch.worker)]
    assert name in run("explain", "--url", url).stdout
    body = json.loads(run("explain", name, "--url", url, "--json").stdout)
    assert body["data"][0]["worker"] == branch.worker
    refused = run("explain", "req_none", "--url", url)
    assert isinstance(refused.exception, ConfigError)
    assert "not in the decision log" in str(refused.exception)


@pytest.mark.nats
def test_the_doctor_finds_the_service(url: str) -> None:
    answer = run("doctor", "--url", url, "--json")
    findings = {each["name"]: each for each in json.loads(answer.stdout)["findings"]}
    assert findings["service"]["verdict"] == "ok"
    assert "broker up, 2 workers" in findings["service"]["found"]
    assert findings["broker"]["found"].startswith("nats-server: v")


@pytest.mark.parametrize("command", ["top", "explain"])
def test_a_service_that_is_not_there_is_told(command: str) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    answer = run(command, "--url", url)
    assert isinstance(answer.exception, ConfigError)
    assert url in str(answer.exception)


def test_answers_are_those_that_generate() -> None:
    """Its own looks at the service, and capsules that are read, are none."""
    paths = {
        "/health": 50, "/metrics": 50, "/v1/router/workers": 50, "/v1/capsules/{capsule}": 9,
        "/v1/completions": 1, "/v1/chat/completions": 2, "/v1/capsules/{capsule}/fork": 3,
        "/v1/capsules/{capsule}/restore": 4,
    }  # fmt: skip
    lines = [
        f'mallee_http_answers_total{{endpoint="{path}",status="200"}} {num}'
        for path, num in paths.items()
    ]
    found = Metrics(
        "\n".join([*lines, 'mallee_capsules{gateway="g0",worker="w0"} 5', "mallee_x 1"])
    )
    totals = [
        found.total(f"mallee_{name}") for name in ("http_answers_total", "capsules", "x", "y")
    ]
    assert totals == [10.0, 5.0, 1.0, 0.0]


def test_counters_are_told_by_label() -> None:
    lines = (
        'mallee_worker_capsules{gateway="g1",tier="0",worker="w0"} 2',
        'mallee_worker_capsules{gateway="g1",tier="1",worker="w0"} 3',
        'mallee_worker_capsules{gateway="g1",tier="0",worker="w1"} 4',
    )
    found = Metrics("\n".join(lines))
    assert found.gateway == "g1"
    assert found.by("mallee_worker_capsules", "worker") == {"w0": 5.0, "w1": 4.0}
    assert found.by("mallee_worker_capsules", "tier") == {"0": 6.0, "1": 3.0}
    assert found.by("mallee_none", "tier") == {}


def test_answers_of_another_program_are_refused() -> None:
    with pytest.raises(ConfigError, match="not a list of workers"):
        Sample.of(0.0, Answers({}, [{"worker": 3}], ""))
